"""The static figures of the notebooks: maps, trajectories, waterfalls, comparisons, and the softmax on a plane.

Every function draws what it is given and returns the matplotlib figure, to be saved in any format. Tokens are
shown with their white space visible and never interpreted as mathematics.
"""

from __future__ import annotations

import functools
import itertools
import textwrap

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib import font_manager, patheffects
from matplotlib.figure import Figure
from matplotlib.textpath import text_to_path

from iglens_core import Attribution, IGLensError, Readout
from iglens_lab import theory

MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
# matplotlib brings the first; the others give glyphs to more scripts where they are installed
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans", "Hiragino Sans", "Apple SD Gothic Neo",
         "Yu Gothic", "Microsoft YaHei", "Malgun Gothic", "Segoe UI", "Arial Unicode MS", "Noto Emoji")  # fmt: skip
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito: told apart by colour-blind readers
OUTLINED = [patheffects.withStroke(linewidth=4, foreground="black")]  # white lines are seen on any ground
LONGEST = 24  # characters of a label
ROWS = 160  # above this many tokens, labels get a stride, said on the axis


@functools.cache
def _fonts() -> tuple[list[str], list]:
    known = set(font_manager.get_font_names())
    names = [name for name in FONTS if name in known]
    return names, [font_manager.get_font(font_manager.findfont(name)) for name in names]


def visible(token: str) -> str:
    """The token with white space marked; characters that cannot be seen stand as their code, ⟨U+200B⟩."""
    return "".join(
        MARKS.get(character) or (character if character.isprintable() else _code(character)) for character in token
    )


def _code(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩"


def drawable(token: str, longest: int = LONGEST) -> str:
    """The visible token as a figure's label: shortened, and with the code of what no installed font can draw."""
    known = (any(font.get_char_index(ord(character)) for font in _fonts()[1]) for character in visible(token))
    text = "".join(c if drawn else _code(c) for c, drawn in zip(visible(token), known, strict=True))
    return shortened(text, longest)


def shortened(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning and a mark where it is longer."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def scalar_name(scalar) -> str:
    """What an axis is called: p, log p (nats), …; the ids of a contrast."""
    if isinstance(scalar, str):
        names = {"prob": "p", "log_prob": "log p (nats)", "entropy": "entropy (nats)"}
        return names.get(scalar, scalar)
    kind = "p" if scalar[0] == "prob" else scalar[0]
    return f"{kind}(id {scalar[1]}) − {kind}(id {scalar[2]})"


def level_range(scalar, low=None, high=None) -> tuple:
    """The ends of a colour scale of levels: probabilities go from 0 to 1, all else from its least to its greatest."""
    return (0.0, 1.0) if scalar == "prob" else (low, high)


def token_labels(result: Attribution) -> list[str]:
    """One label a token, distinct even where tokens repeat: the position that predicts it, and its visible text."""
    return [f"{p} → {drawable(token)}" for p, token in zip(result.positions.tolist(), result.tokens, strict=True)]


def _write(labels) -> None:
    for label in labels:
        label.set_parse_math(False)  # a $ in a token is a $
        label.set_fontfamily(_fonts()[0])


def _map(ax, values, columns: list[str], rows: list[str], name: str, **colours) -> None:
    count, k = values.shape
    mesh = ax.pcolormesh(np.arange(k + 1), np.arange(count + 1), values, edgecolors="face", linewidth=0.1, **colours)
    ax.invert_yaxis()
    across, down = -(-k // 32), -(-count // ROWS)
    shown = [j for j in range(k) if (k - 1 - j) % across == 0]  # the last layer always has its label
    ax.set_xticks([j + 0.5 for j in shown], [columns[j] for j in shown], fontsize=8)
    ax.set_yticks(np.arange(0, count, down) + 0.5, rows[::down], fontsize=9)
    _write(ax.get_yticklabels())
    ax.set_xlabel("layer")
    ax.set_ylabel("predicting position → token" + (f" (every {down}th is labelled)" if down > 1 else ""))
    ax.tick_params(length=0)
    ax.figure.colorbar(mesh, ax=ax, label=name, fraction=0.08, pad=0.02, aspect=25)


def _sizes(results: list[Attribution], columns: list[int]) -> tuple[list[float], float]:
    """The widths of maps that stand side by side, and their height, in inches."""
    longest = max(len(label) for result in results for label in token_labels(result))
    count = max(len(result.tokens) for result in results)
    widths = [1.4 + 0.08 * longest + 0.19 * min(max(k, 14), 48) for k in columns]
    return widths, 1.4 + 0.25 * min(max(count, 6), ROWS)


def _wrapped(text: str, inches: float, size: float = 10) -> str:
    """The text in lines that are no longer than this, whatever its characters measure."""
    font = font_manager.FontProperties(family=_fonts()[0], size=size)
    for count in range(70, 0, -1):
        lines = textwrap.wrap(text, count)
        wide = [text_to_path.get_text_width_height_descent(line, font, False)[0] for line in lines]
        if max(wide, default=0) <= 72 * inches:
            break
    return "\n".join(lines)


def _figure(results: list[Attribution], columns: list[int]) -> tuple[Figure, list]:
    widths, height = _sizes(results, columns)
    figure, axes = plt.subplots(1, len(columns), figsize=(sum(widths), height), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def _alike(*results: Attribution) -> list[Attribution]:
    for result in results:
        if not isinstance(result, Attribution) or result.scalar != results[0].scalar:
            raise IGLensError("expected Attributions of one scalar: others do not share an axis")
    return list(results)


def _token(result: Attribution, token: int, name: str) -> int:
    if type(token) is not int or not 0 <= token < len(result.tokens):
        raise IGLensError(f"{name}: expected a token of 0 … {len(result.tokens) - 1}, got {token!r}")
    return token


def _limit(results: list[Attribution]) -> float:
    return max(float(result.credits.abs().max()) for result in results) or 1.0


def _credits(ax, result: Attribution, limit: float) -> None:
    colours = {"cmap": "RdBu", "vmin": -limit, "vmax": limit}  # zero is white, in the middle
    columns = [str(layer) for layer in result.layers]
    _map(
        ax,
        result.credits.numpy(),
        columns,
        token_labels(result),
        f"credit: change of {scalar_name(result.scalar)}",
        **colours,
    )


def _levels(ax, result: Attribution, ends: tuple = (None, None)) -> None:
    values = result.levels.numpy()
    low, high = level_range(result.scalar, *ends)
    colours = {"cmap": "cividis", "vmin": low, "vmax": high}
    columns = ["base", *map(str, result.layers)]
    _map(ax, values, columns, token_labels(result), f"level: {scalar_name(result.scalar)}", **colours)


def credit_map(result: Attribution, *more: Attribution, titles: tuple[str, ...] = ()) -> Figure:
    """Token × layer map of signed credits; several results stand side by side on one scale."""
    results = _alike(result, *more)
    if titles and len(titles) != len(results):
        raise IGLensError(f"credit_map: expected {len(results)} titles, got {len(titles)}")
    figure, axes = _figure(results, [len(one.layers) for one in results])
    for i, (ax, one) in enumerate(zip(axes, results, strict=True)):
        _credits(ax, one, _limit(results))
        _write([ax.set_title(titles[i] if titles else "credit of each layer", fontsize=11)])
    return figure


def level_map(result: Attribution) -> Figure:
    """Token × layer map of levels, the logit lens; the baseline is the first column."""
    figure, axes = _figure([result], [len(result.layers) + 1])
    _levels(axes[0], result)
    axes[0].set_title("level at each layer (logit lens)", fontsize=11)
    return figure


def maps(result: Attribution) -> Figure:
    """The credit map beside the level map."""
    figure, axes = _figure([result], [len(result.layers), len(result.layers) + 1])
    _credits(axes[0], result, _limit([result]))
    _levels(axes[1], result)
    axes[1].set_yticks([])
    axes[1].set_ylabel("")
    axes[0].set_title("credit of each layer: a row sums to its whole change", fontsize=11)
    axes[1].set_title("level at each layer (logit lens)", fontsize=11)
    return figure


def trajectory(result: Attribution, token: int, *more: Attribution) -> Figure:
    """One token's levels (line) and signed credits (bars) by layer, the onset marked; more results for other targets.

    token: the row of the result, 0 … T − 1. All results need the same layers.
    """
    results = _alike(result, *more)
    _token(result, token, "trajectory")
    if any(one.layers != result.layers or not torch.equal(one.positions, result.positions) for one in more):
        raise IGLensError("trajectory: expected results at the same layers and positions")
    k = len(result.layers)
    figure, ax = plt.subplots(figsize=(max(5.0, 2 + 0.27 * min(k, 60)), 3.6), layout="constrained")
    _trajectory(ax, results, token)
    _write([ax.set_title(f"predicted at position {int(result.positions[token])}", fontsize=11)])
    return figure


def _trajectory(ax, results: list[Attribution], token: int, onset: bool = True) -> None:
    k = len(results[0].layers)
    for i, one in enumerate(results):
        colour, width = COLOURS[i % len(COLOURS)], 0.8 / len(results)
        label, first = f"“{drawable(one.tokens[token])}”", int(one.onset()[token]) if onset else -1
        where = np.arange(1, k + 1) + (i - (len(results) - 1) / 2) * width
        ax.bar(where, one.credits[token].numpy(), width, color=colour, alpha=0.45, label=f"credits of {label}")
        ax.plot(range(k + 1), one.levels[token].numpy(), "o-", ms=3, lw=1.4, color=colour, label=f"level of {label}")
        if first >= 0:
            ax.axvline(one.layers.index(first) + 1, color=colour, ls=":", lw=1, label=f"onset of {label}: {first}")
    ax.axhline(0, color="black", lw=0.8)
    _layer_axis(ax, results[0])
    ax.set_xlim(-0.7, k + 0.7)
    ax.set_ylabel(scalar_name(results[0].scalar))
    _write(ax.legend(fontsize=8, loc="best").get_texts())


def _layer_axis(ax, result: Attribution) -> None:
    k = len(result.layers)
    across = -(-(k + 1) // 34)
    shown = [j for j in range(k + 1) if (k - j) % across == 0]
    names = ["base", *map(str, result.layers)]
    ax.set_xticks(shown, [names[j] for j in shown], fontsize=8, rotation=0 if k < 20 else 90)
    ax.set_xlabel("layer")


def explored(results, titles, selected=(), levels: bool = False, limit: float | None = None) -> Figure:
    """Maps of several results under their titles, on one scale; below, the trajectories of the selected tokens.

    selected: (result, row) pairs. levels: map levels instead of credits. limit: of the credits' colours.
    """
    alike = _alike(*results)
    if not alike or len(titles) != len(alike):
        raise IGLensError(f"explored: expected results and as many titles, got {len(alike)} and {len(titles)}")
    for i, row in selected:
        if not 0 <= i < len(alike):
            raise IGLensError(f"explored: expected a result of 0 … {len(alike) - 1}, got {i!r}")
        _token(alike[i], row, "explored")
    widths, height = _sizes(alike, [len(one.layers) + levels for one in alike])
    pairs = zip(titles, widths, strict=True)
    heads = [_wrapped(drawable(title, 200).replace("␣", " "), 0.95 * width) for title, width in pairs]
    lines = max(head.count("\n") for head in heads)
    heads = ["\n" * (lines - head.count("\n")) + head for head in heads]  # so that the maps begin at one height
    width, height = sum(widths), height + 0.17 * lines
    across = max(1, min(len(selected), int(width // 4.5)))
    down = -(-len(selected) // across)
    figure = plt.figure(figsize=(width, height + 2.8 * down), layout="constrained")
    parts = figure.subfigures(1 + bool(down), 1, height_ratios=[height, 2.8 * down][: 1 + bool(down)], squeeze=False)
    panes = parts[0, 0].subfigures(1, len(alike), width_ratios=widths, squeeze=False)[0]
    ends = [float(end) for one in alike for end in (one.levels.min(), one.levels.max())]
    for pane, head, one in zip(panes, heads, alike, strict=True):
        if levels:
            _levels(pane.subplots(), one, (min(ends), max(ends)))
        else:
            _credits(pane.subplots(), one, limit or _limit(alike))
        _write([pane.suptitle(head, fontsize=10)])  # as wide as the pane, not as its map
    if down:
        places = parts[1, 0].subplots(down, across, squeeze=False, sharey=True).flatten()
        for ax in places[len(selected) :]:
            ax.remove()
        for ax, (i, row) in zip(places, selected, strict=False):
            _trajectory(ax, [alike[i]], row)
            side = ("left: ", "right: ")[i] if len(alike) == 2 else ""
            _write([ax.set_title(side + token_labels(alike[i])[row], fontsize=10)])
    return figure


def comparison(results: dict[str, Attribution], token: int = 0) -> Figure:
    """Levels and credits of one token from several results side by side, on one scale, each under its title."""
    if not isinstance(results, dict) or not results:
        raise IGLensError(f"comparison: expected results by their titles, a dict, got {type(results).__name__}")
    alike = _alike(*results.values())
    for one in alike:
        _token(one, token, "comparison")
    width = sum(max(3.6, 1.5 + 0.15 * min(len(one.layers), 60)) for one in alike)
    figure, axes = plt.subplots(1, len(alike), figsize=(width, 3.4), layout="constrained", sharey=True, squeeze=False)
    for ax, title, one in zip(axes[0], results, alike, strict=True):
        _trajectory(ax, [one], token, onset=False)
        _write([ax.set_title(title, fontsize=10)])
    for ax in axes[0, 1:]:
        ax.set_ylabel("")
    return figure


def waterfall(result: Attribution, token: int = 0) -> Figure:
    """One token's credits as steps from the baseline's level to the last layer's: up is blue, down is orange."""
    (result,) = _alike(result)
    token, k = _token(result, token, "waterfall"), len(result.layers)
    credits, levels = result.credits[token].numpy(), result.levels[token].numpy()
    reached = levels[0] + np.concatenate([[0], credits.cumsum()])  # differs from the levels where the sum is incomplete
    figure, ax = plt.subplots(figsize=(max(5.0, 2 + 0.4 * min(k, 40)), 3.4), layout="constrained")
    colours = [COLOURS[0] if credit >= 0 else COLOURS[1] for credit in credits]
    ax.bar(range(1, k + 1), credits, 0.8, bottom=reached[:-1], color=colours, alpha=0.8)
    ax.hlines(reached[1:-1], np.arange(1, k) - 0.4, np.arange(2, k + 1) + 0.4, color="black", lw=0.8)
    ax.bar([0, k + 1], levels[[0, -1]], 0.8, color="0.7")
    reach = float(np.ptp(np.append(reached, 0))) or 1.0
    if k <= 16:
        for j, credit in enumerate(credits, 1):
            at = max(reached[j - 1], reached[j]) + 0.02 * reach
            text = f"{credit:+.2f}".replace("-", "−") if abs(credit) >= 0.005 else "0"
            ax.text(j, at, text, ha="center", va="bottom", fontsize=8)
    ax.use_sticky_edges = False
    ax.margins(y=0.12)
    _layer_axis(ax, result)
    ax.set_xticks([*ax.get_xticks(), k + 1], [*[text.get_text() for text in ax.get_xticklabels()], "end"], fontsize=8)
    ax.axhline(0, color="black", lw=0.8)
    ax.set_ylabel(scalar_name(result.scalar))
    _write([ax.set_title(f"“{drawable(result.tokens[token])}”: every step is a credit", fontsize=11)])
    return figure


def profiles(bands: dict[str, np.ndarray], layers, name: str) -> Figure:
    """Means by layer with their intervals: bands holds [3, k] for each label, mean, low and high."""
    if len(bands) > len(COLOURS):
        raise IGLensError(f"profiles: expected at most {len(COLOURS)} curves, got {len(bands)}")
    figure, ax = plt.subplots(figsize=(7.4, 3.4), layout="constrained")
    for (label, (mean, low, high)), colour, mark in zip(bands.items(), COLOURS, "os^D", strict=False):
        ax.plot(layers, mean, f"{mark}-", ms=4, lw=1.4, color=colour, label=label)
        ax.fill_between(layers, low, high, color=colour, alpha=0.2, lw=0)
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xlabel="block", ylabel=name)
    figure.legend(loc="outside upper center", ncols=2, fontsize=8)
    return figure


def beside(layers, credits, drops, levels, title: str) -> Figure:
    """One token's credit and drop of p of every block, side by side, and its trajectory, the levels."""
    figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
    ax.bar(layers - 0.2, credits, 0.4, color=COLOURS[0], label="credit of the block")
    ax.bar(layers + 0.2, drops, 0.4, color=COLOURS[1], hatch="//", label="drop of p without the block")
    ax.plot(layers, levels, "o-", ms=3, lw=1.2, color="black", label="level after the block")
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xlabel="block", ylabel="change of p, or p", xticks=layers[:: -(-len(layers) // 34)])
    _write([ax.set_title(title, fontsize=11)])
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure


def forest(frames: dict, name: str) -> Figure:
    """Estimates with their intervals, a panel for each title: frames of rows with mean, low, high and null."""
    size = 1.6 + 2.9 * len(frames), 1.4 + 0.24 * max(len(frame) for frame in frames.values())
    figure, axes = plt.subplots(1, len(frames), figsize=size, layout="constrained",
                                sharex=True, sharey=True, squeeze=False)  # fmt: skip
    for ax, (title, frame) in zip(axes[0], frames.items(), strict=True):
        y = np.arange(len(frame))[::-1]
        ends = np.abs(frame[["low", "high"]].to_numpy().T - frame["mean"].to_numpy())
        ax.errorbar(frame["mean"], y, xerr=ends, fmt="o", ms=4, color=COLOURS[0], capsize=3, label="mean, 95 %")
        ax.plot(frame["null"], y, "|", ms=11, mew=2, color=COLOURS[1], label="with other prompts' drops")
        ax.axvline(0, color="black", lw=0.8)
        ax.set_yticks(y, frame.index, fontsize=9)
        ax.set_xlabel(name)
        ax.set_title(title, fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8)
    return figure


def plane(
    readout: Readout,
    paths: dict[str, torch.Tensor],
    target: int = 0,
    arrows: bool = True,
    names: tuple[str, ...] | None = None,
    reach: float = 2.6,
) -> Figure:
    """A readout of width 2 as a contour of p(target), with its gradient field and paths [P, 2] drawn on it.

    arrows: draw each segment of a path as an arrow and name its points (0, 1, … by default); False for curves of many
    points. reach: of the axes, from the origin; what lies outside is cut.
    """
    if readout.d != 2 or not all(path.ndim == 2 and path.shape[1] == 2 for path in paths.values()):
        shapes = [list(path.shape) for path in paths.values()]
        raise IGLensError(f"plane: expected a readout of width d = 2 and paths [P, 2], got d = {readout.d}, {shapes}")
    side = torch.linspace(-reach, reach, 201, dtype=torch.float64)
    x, y = torch.meshgrid(side, side, indexing="xy")
    with torch.no_grad():
        p = readout.prob(torch.stack([x.flatten(), y.flatten()], 1), target).view_as(x)
    some = torch.stack([part[10::18, 10::18].flatten() for part in (x, y)], 1)
    some = some[some.norm(dim=1) > 0.15 * reach]  # at the origin of a norm the gradient has no bounds
    slope = theory.gradients(readout, some, target).numpy()
    figure, ax = plt.subplots(figsize=(6.4, 5.2), layout="constrained")
    mesh = ax.contourf(x, y, p, levels=np.linspace(0, 1, 21), cmap="cividis")
    figure.colorbar(mesh, ax=ax, label="level: p", ticks=np.linspace(0, 1, 6))
    ax.quiver(*some.T.numpy(), *slope.T, color="white", alpha=0.7, width=0.003, scale=18)
    for i, (name, path) in enumerate(paths.items()):
        points, style = path.detach().numpy(), ("-", "--", ":")[i % 3]
        if arrows:
            for a, b in itertools.pairwise(points):
                line = {"arrowstyle": "-|>", "color": "white", "lw": 2.2, "shrinkB": 8, "path_effects": OUTLINED}
                ax.annotate("", b, a, arrowprops=line)
            for j, point in enumerate(points):
                if np.abs(point).max() > reach:
                    continue
                ax.plot(*point, "o", ms=15, color="white", mec="black", zorder=4)
                ax.text(*point, names[j] if names else str(j), ha="center", va="center", fontsize=9, zorder=5)
        else:
            ax.plot(*points.T, style, color="white", lw=2.2, label=name, path_effects=OUTLINED)
            ax.plot(*points[[0, -1]].T, "o", ms=8, color="white", mec="black")
    if not arrows:
        ax.legend(fontsize=9, loc="lower left", facecolor="0.35", labelcolor="white", handlelength=3)
    ax.set(
        xlim=(-reach, reach),
        ylim=(-reach, reach),
        aspect="equal",
        xlabel="first coordinate of h",
        ylabel="second coordinate of h",
    )
    return figure
