"""The interactive parts of the notebooks. They redraw from traces: a change of selection never runs the model."""

from __future__ import annotations

import base64
import html
import io
import json
import logging
import math
import re
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import anywidget
import ipywidgets as widgets
import matplotlib.pyplot as plt
import pandas as pd
import torch
import traitlets
from IPython import get_ipython
from matplotlib import colormaps, colors
from matplotlib.figure import Figure

from iglens_core import Attribution, IGLensError, Readout, Trace, attribute, encode, path_credits, read, token_text
from iglens_lab import figures, theory, validation
from iglens_lab.translators import RIDGE, RIDGES, for_model

WIDE = widgets.Layout(width="420px")
SLIDER = {"continuous_update": False, "layout": WIDE, "style": {"description_width": "90px"}}


NARROW = {"description_width": "70px"}
SWITCH = {"style": {"button_width": "92px"}}
EXAMPLES = {  # of controls' values; they were chosen for the default model, and work with any
    "a wrong answer: the capital of Vietnam": {"prompt": "What is the capital of Vietnam?", "chat": True},
    "a rewording that works": {
        "prompt": "What is the capital of Vietnam?", "other_prompt": "Which city is the capital of Vietnam?",
        "chat": True,
    },
    "why not Hanoi?": {
        "prompt": "What is the capital of Vietnam?", "answer": "The capital of Vietnam is Hanoi.",
        "other_answer": "The capital of Vietnam is Hoi An.", "chat": True,
    },
    "a fact, bare prompt": {"prompt": "The capital of France is", "chat": False},
    "copied from the context": {"prompt": "My name is Zorblatt. Hello, my name is", "chat": False},
    "a line of code": {"prompt": "def add(a, b):\n    return", "chat": False},
}  # fmt: skip
SCALARS = [("probability", "prob"), ("log-probability", "log_prob"), ("logit", "logit"), ("entropy", "entropy")]
SHADES = {
    mode: [colors.to_hex(colormaps[name](i / 64)) for i in range(65)]
    for mode, name in (("credits", "RdBu"), ("levels", "cividis"))
}
EXPORTS = {"SVG": "image/svg+xml", "PNG": "image/png", "CSV": "text/csv", "HTML": "text/html"}
PRESETTABLE = (
    "prompt", "answer", "other_prompt", "other_answer", "chat", "max_new_tokens", "show", "layers", "stride", "single",
    "path", "ridge", "baseline", "estimator", "steps", "scalar", "target", "contrast", "limit",
)  # fmt: skip
SCRIPT = Path(__file__).with_suffix(".js")
KEPT = 64  # attributions kept for each prompt
TOP = 5  # next tokens named at a cell
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
</head><body><h1 style="font: 600 18px sans-serif">{title}</h1><p style="font: 13px sans-serif">{about}</p>
<div id="view"></div><script type="module">
{code}
const state = {state}, listening = {{}};
const model = {{
  get: (name) => state[name], on: (name, done) => (listening[name] ??= []).push(done), off() {{}}, send() {{}},
  set: (name, value) => {{ state[name] = value; listening["change:" + name]?.forEach((done) => done()); }},
  save_changes() {{}},
}};
render({{ model, el: document.getElementById("view") }});
</script></body></html>
"""


def merged(result: Attribution, layers: tuple[int, ...]) -> Attribution:
    """The attribution at fewer of its layers: observed credits between two of them add up."""
    if layers == result.layers:
        return result
    levels = result.levels[:, [0, *(result.layers.index(layer) + 1 for layer in layers)]]
    return replace(result, levels=levels, credits=levels.diff(dim=1), layers=layers)


def joined(results: list[Attribution]) -> Attribution:
    """The rows of several attributions of one path, one after the other."""
    tensors = ("credits", "levels", "delta", "model_level", "positions", "token_ids", "target_ids")
    rows = {name: torch.cat([getattr(one, name) for one in results]) for name in tensors}
    return replace(results[0], **rows, tokens=tuple(token for one in results for token in one.tokens))


def _part(trace: Trace, position: int) -> Trace:
    """The same run, explained at one position, where the model's own logits were not kept."""
    ids = trace.input_ids[position + 1 :][:1]
    some = {"positions": torch.tensor([position]), "token_ids": ids, "tokens": trace.input_tokens[position + 1 :][:1]}
    return replace(trace, **some, logits=None, logit_positions=torch.zeros(0, dtype=torch.long))


def _words(result: Attribution, row: int) -> str:
    """What happens to one token, in a sentence or two."""
    level, delta, index = result.levels[row], float(result.delta[row]), float(result.non_monotonicity()[row])
    onset, ends = int(result.onset()[row]), [_number(float(level[j])) for j in (0, -1)]
    text = f"Δ = {_number(delta, '+')}: {figures.scalar_name(result.scalar)} goes from {ends[0]} to {ends[1]}."
    if onset < 0:
        return f"{text} No layer moves it."
    detour = "hardly any detour" if index <= 1.1 else "it goes up and down on its way"
    shown = f"{index:.2f}" if index < 1e4 else "∞" if math.isinf(index) else f"{index:.0e}"
    return f"{text} Onset, half of Σ|credit|: layer {onset}. Non-monotonicity Σ|credit| / |Δ|: {shown}, {detour}."


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:{sign}.1e}"


def _label(position: int, token: str) -> str:
    """A row's name. What the browser has no glyph for, it shows by its code."""
    return f"{position} → {figures.shortened(figures.visible(token))}"


def _short(value) -> float:
    return float(f"{float(value):.4g}")  # what a reader can see, and no more to send


def _fits(control: widgets.Widget) -> str:
    """What a control takes, in words."""
    if hasattr(control, "options"):
        return "one of " + ", ".join(str(one[1] if isinstance(one, tuple) else one) for one in control.options)
    if isinstance(control, widgets.IntRangeSlider):
        return f"two numbers of {control.min} … {control.max}, the lower first"
    if hasattr(control, "min"):
        return f"a number of {control.min:g} … {control.max:g}"
    return "True or False" if isinstance(control.value, bool) else "a text"


def _named(name: str, control: widgets.Widget) -> widgets.HBox:
    """A control with its name before it, where its own would stand above it."""
    label = widgets.Label(name, layout=widgets.Layout(width="70px", justify_content="flex-end"))
    return widgets.HBox([label, control])


def _close(widget: widgets.Widget) -> None:
    """Close a widget and all that belongs to it."""
    inside = [*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)]
    for one in inside:
        if isinstance(one, widgets.Widget):
            _close(one)
    widgets.Widget.close(widget)


class _Drawn(widgets.VBox):
    """Controls above a picture and a line of text, redrawn at each change; what cannot be drawn is said there."""

    def __init__(self, controls: list[widgets.Widget]):
        self.picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", align_self="flex-start"))
        self.says = widgets.Label()
        super().__init__([*controls, self.picture, self.says])
        for control in controls:
            control.observe(self._draw, "value")
        self._draw()

    def _figure(self) -> tuple[Figure, str]:
        raise NotImplementedError

    def _draw(self, change=None) -> None:
        try:
            figure, text = self._figure()
            try:
                with io.BytesIO() as file:
                    figure.savefig(file, format="png", dpi=100)
                    self.picture.value = file.getvalue()
            finally:
                plt.close(figure)
            self.says.value = text
        except IGLensError as error:  # shown, not swallowed
            self.picture.value = b""  # not the picture of another selection
            self.says.value = f"cannot be drawn: {error}"


class Segment(_Drawn):
    """Move the ends of a path of one segment on the plane, bend it, and choose the steps of the estimators.

    readout: of width 2; start, end: [2], where the sliders begin.
    """

    def __init__(self, readout: Readout, start, end, target: int = 0):
        self._readout, self._target = readout, target
        names = ("start, first", "start, second", "end, first", "end, second")
        places = [*map(float, start), *map(float, end)]
        if len(places) != 4 or not all(abs(place) <= 2.5 for place in places):
            raise IGLensError(f"Segment: expected two points of two coordinates, −2.5 … 2.5, got {places}")
        self.ends = [
            widgets.FloatSlider(value=value, min=-2.5, max=2.5, step=0.1, description=name, **SLIDER)
            for name, value in zip(names, places, strict=True)
        ]
        self.bend = widgets.FloatSlider(value=0.4, min=-1, max=1, step=0.1, description="bend", **SLIDER)
        self.steps = widgets.IntSlider(value=4, min=1, max=32, description="steps", **SLIDER)
        super().__init__([*self.ends, self.bend, self.steps])

    def _figure(self) -> tuple[Figure, str]:
        ends = torch.tensor([slider.value for slider in self.ends], dtype=torch.float64).view(2, 2)
        curve = theory.curves(*ends, bend=self.bend.value)["bent"]
        figure = figures.plane(self._readout, {"straight": ends, "bent": curve}, self._target, arrows=False)
        steps, found = self.steps.value, {}
        for estimator in ("observed", "midpoint", "gauss-legendre"):
            options = {"estimator": estimator, "steps": steps}
            found[estimator] = float(path_credits(self._readout, ends[:, None], [self._target], **options)[0])
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        along = theory.integral(self._readout, curve, self._target)
        return figure, f"{steps} steps: {numbers}; along the bent curve {along:.4f}"

    def __repr__(self) -> str:
        return f"Segment(d = {self._readout.d})"


class Drops(_Drawn):
    """Choose a prompt, an intervention and its scope: credits and drops of every block, together.

    results: of iglens_lab.validation, a row a prompt and block. prompts: their texts, by number.
    """

    def __init__(self, results: pd.DataFrame, prompts, **chosen):
        self._results = results
        numbers = results["prompt"].unique().tolist()
        texts = [(figures.shortened(figures.visible(prompts[number]), 60), number) for number in numbers]
        conditions = [name for name in results.columns if name.endswith(("_last", "_all"))]
        self.prompt = widgets.Dropdown(options=texts, description="prompt", layout=WIDE)
        self.condition = widgets.Dropdown(options=conditions, description="ablation", layout=WIDE)
        for name, value in chosen.items():
            getattr(self, name).value = value
        super().__init__([self.prompt, self.condition])

    def _figure(self) -> tuple[Figure, str]:
        rows = self._results[self._results["prompt"] == self.prompt.value].sort_values("layer")
        one, drops = rows.iloc[0], rows[self.condition.value].to_numpy()
        rho = validation.rank_correlation(rows["credit"].to_numpy()[None, :-1], drops[None, :-1])[0, 0]
        title = f"“{figures.drawable(one['token'])}”, p = {one['p']:.2f}"
        layers, credits, levels = (rows[name].to_numpy() for name in ("layer", "credit", "level"))
        figure = figures.beside(layers, credits, drops, levels, title)
        says = f"ρ = {rho:.2f}; largest drop at block {rows['layer'].iloc[drops.argmax()]}".replace("-", "−")
        if rho != rho:  # NaN
            says = "ρ is not defined; all drops are the same"
        return figure, f"without the last block: {says}"

    def __repr__(self) -> str:
        return f"Drops({self._results['prompt'].nunique()} prompts)"


class View(anywidget.AnyWidget):
    """What the browser draws: token strip, map and trajectories; explorer.js is its other half.

    data: scalar, mode ("credits" or "levels"), columns (the path points' names), limit (of the credits' colours), range
    (of the levels'), colours (of both, as hex), and for each of the panes its title, strip (position, text, part of
    every input token) and rows (position, label, levels, credits, onset, words, own). selected: [pane, position]
    pairs. top: by "pane:position", for each layer the most probable next tokens. Set by the browser: selected alone.
    """

    _esm = SCRIPT
    data = traitlets.Dict({"columns": [], "panes": []}).tag(sync=True)
    selected = traitlets.List().tag(sync=True)
    top = traitlets.Dict().tag(sync=True)
    badge = traitlets.Dict().tag(sync=True)
    message = traitlets.Unicode().tag(sync=True)
    live = traitlets.Bool(True).tag(sync=True)

    def __repr__(self) -> str:
        return "View()"


@dataclass(frozen=True, eq=False)
class _Pane:
    """One prompt and answer: what the run left behind, and what was computed from it."""

    title: str
    trace: Trace
    known: dict = field(default_factory=dict)  # attributions, by what they depend on


class Explorer(widgets.VBox):
    """Type a prompt, run it once, and look: which layers produced each token's probability.

    model, tokenizer: any that iglens_core reads. prompt: run at once where given. The other arguments preset the
    controls of the same name: answer, other_prompt and other_answer ("" for none), chat, max_new_tokens, show
    ("credits" or "levels"), layers (low, high), stride, single, path, ridge, baseline, estimator, steps, scalar,
    target, contrast, limit. selected: rows of the answer whose trajectories are shown. translators: by their ridge;
    None takes the project's, fitted on first use.

    Only run() runs the model. results holds the Attributions that are shown, error the last failure of a control.
    """

    _all: ClassVar[list[Explorer]] = []

    def __init__(
        self, model, tokenizer, prompt: str = "", *, selected=(0,), translators: dict | None = None, **presets
    ):
        if translators is not None and not (isinstance(translators, dict) and translators):
            raise IGLensError(f"Explorer: expected translators by their ridge, a dict, got {str(translators)[:60]}")
        self._model, self._tokenizer, self._readout = model, tokenizer, Readout(model)
        self._translators, self._panes, self.results, self.error = translators, [], [], None
        self._reading = None  # the path that the view's next tokens were read on
        self._quiet = True  # until all is there
        n, ridges = self._readout.n, sorted(translators or RIDGES)
        self._template = bool(getattr(tokenizer, "chat_template", None))
        text = {"continuous_update": False, "layout": widgets.Layout(width="280px"), "style": NARROW}
        long = {"layout": widgets.Layout(width="415px"), "style": NARROW}
        number = {"layout": widgets.Layout(width="150px"), "style": NARROW}
        choice = {"layout": widgets.Layout(width="230px"), "style": NARROW}
        empty = "empty: what the model says"
        self.examples = widgets.Dropdown(options=["", *EXAMPLES], description="examples", **long)
        self.prompt = widgets.Textarea(description="prompt", rows=2, **long)
        self.answer = widgets.Text(description="answer", placeholder=empty, **long)
        self.other_prompt = widgets.Textarea(description="beside it", placeholder="empty: none", rows=2, **long)
        self.other_answer = widgets.Text(description="its answer", placeholder=empty, **long)
        self.chat = widgets.Checkbox(
            value=self._template, description="chat template", indent=False, disabled=not self._template
        )
        self.max_new_tokens = widgets.BoundedIntText(value=20, min=1, max=512, description="tokens", **number)
        self.button = widgets.Button(description="Run", button_style="primary")
        self.progress = widgets.IntProgress(description="", layout=widgets.Layout(visibility="hidden", width="200px"))
        self.show = widgets.ToggleButtons(
            options=["credits", "levels"], tooltips=["what a layer added", "what is read at a layer"], **SWITCH
        )
        self.layers = widgets.IntRangeSlider(
            value=(0, n), min=0, max=n, description="layers", continuous_update=False, **choice
        )
        self.stride = widgets.BoundedIntText(value=1, min=1, max=n, description="stride", **number)
        self.single = widgets.Text(
            description="or single", placeholder="0, 10, 20", **text | {"layout": widgets.Layout(width="200px")}
        )
        self.path = widgets.ToggleButtons(
            options=["plain", "translated"], tooltips=["as the head reads the states", "through fitted maps"], **SWITCH
        )
        usual = RIDGE if RIDGE in ridges else ridges[0]
        self.ridge = widgets.SelectionSlider(
            options=ridges, value=usual, description="ridge", continuous_update=False, **choice
        )
        self.baseline = widgets.Dropdown(options=["embedding", "mean", "zero"], description="baseline", **choice)
        estimators = ["observed", "midpoint", "gauss-legendre"]
        self.estimator = widgets.Dropdown(options=estimators, description="estimator", **choice)
        self.steps = widgets.BoundedIntText(value=4, min=1, max=256, description="steps", **number)
        self.scalar = widgets.Dropdown(options=SCALARS, description="scalar", **choice)
        self.target = widgets.Text(description="target", placeholder="a token: ␣Paris, id 7042", **text)
        self.contrast = widgets.Text(description="minus", placeholder="another token: a contrast", **text)
        self.limit = widgets.BoundedFloatText(value=0, min=0, max=1e6, step=0.1, description="colours ±", **number)
        self.exports = [
            widgets.Button(description=kind, tooltip=f"download what is shown as {kind}") for kind in EXPORTS
        ]
        self.view = View()
        self._selecting = (  # a change of these draws anew, and never runs the model
            self.show, self.layers, self.stride, self.single, self.path, self.ridge, self.baseline, self.estimator,
            self.steps, self.scalar, self.target, self.contrast, self.limit,
        )  # fmt: skip
        lines = (
            (self.examples, self.chat, self.max_new_tokens),
            (self.prompt, self.other_prompt),
            (self.answer, self.other_answer),
            (self.button, self.progress),
            (_named("show", self.show), self.layers, self.stride, self.single),
            (_named("path", self.path), self.ridge, self.baseline),
            (self.target, self.contrast, self.scalar),
            (self.estimator, self.steps, self.limit),
        )
        flow = widgets.Layout(flex_flow="row wrap")
        boxes = [widgets.HBox(line, layout=flow) for line in lines]
        super().__init__([*boxes, self.view, widgets.HBox([widgets.Label("download"), *self.exports], layout=flow)])
        for name, value in presets.items():
            self._preset(name, value)
        self._preset("prompt", prompt)
        self._rows = [selected] if isinstance(selected, int) else list(selected)
        if not all(type(row) is int and row >= 0 for row in self._rows):
            raise IGLensError(f"Explorer: expected rows of the answer, from 0, as selected, got {selected!r}")
        for control in self._selecting:
            control.observe(lambda change: self._guarded(self._draw), "value")
        self.examples.observe(lambda change: self._guarded(self._example), "value")
        self.view.observe(lambda change: self._select(), "selected")
        self.view.on_msg(lambda view, message, buffers: self._guarded(self._top, message))
        self.button.on_click(lambda button: self.run())
        for button in self.exports:
            button.on_click(lambda button: self._guarded(self._download, button.description))
        self._quiet = False
        self._take_the_place()
        if prompt:
            self.run()

    def _preset(self, name: str, value) -> None:
        control = getattr(self, name, None) if name in PRESETTABLE else None
        if control is None:
            raise IGLensError(f"Explorer: expected presets of {', '.join(PRESETTABLE)}, got {name!r}")
        if name == "chat" and value is True and not self._template:
            raise IGLensError("Explorer: chat=True: this tokenizer has no chat template; pass chat=False")
        refusal = f"Explorer: {name}: expected {_fits(control)}, got {value!r}"
        try:
            control.value = value
        except (traitlets.TraitError, TypeError, ValueError) as error:
            raise IGLensError(refusal) from error
        # a number is moved into its bounds, and a choice can be of nothing
        if value is None or control.value != (tuple(value) if isinstance(value, list) else value):
            raise IGLensError(refusal)

    def _take_the_place(self) -> None:
        """A cell that is run again closes the explorers of its earlier runs, which would stay in memory."""
        parent = getattr(get_ipython(), "get_parent", dict)()
        self._cell = parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id")
        for one in list(Explorer._all):
            if self._cell[0] and one._cell[0] == self._cell[0] and one._cell[1] != self._cell[1]:
                one.close()
        Explorer._all.append(self)

    def close(self) -> None:
        """Close all controls and forget the prompts that were read."""
        self._panes, self.results = [], []
        if self in Explorer._all:
            Explorer._all.remove(self)
        _close(self)

    def _guarded(self, work, *given) -> None:
        """What goes wrong is shown, logged, kept in error and raised: in a batch run it fails the cell."""
        if self._quiet or (work == self._draw and not self._panes):
            return
        drawing = work in (self._read, self._draw)  # all else leaves standing what is shown and said
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                work(*given)
            if drawing:
                self.error = None
                notes = dict.fromkeys(str(one.message) for one in warned if one.category is UserWarning)
                self.view.message = "\n".join(f"note: {one}" for one in notes)
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            kind = "" if isinstance(error, IGLensError) else f"{type(error).__name__}: "
            self.view.message = f"{kind}{error}"
            if drawing:  # not the map of another selection, and nothing of a prompt that was forgotten
                self.results, self.view.badge = [], {}
                self.view.data = {**self.view.data, "panes": [self._pane(pane) for pane in self._panes]}
            logging.getLogger(__name__).exception("the explorer failed")
            raise

    # -----------------------------------------------------------------------------------------------------------------
    # Running the model
    # -----------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Read prompt and answer, and what stands beside them; the only thing that runs the model."""
        self._guarded(self._read)

    def _read(self) -> None:
        first, second = (self.prompt, self.answer), (self.other_prompt, self.other_answer)
        if not first[0].value:
            raise IGLensError("prompt: expected a text, got none; type one, or choose an example")
        asked = [(prompt.value or first[0].value, answer.value) for prompt, answer in (first, second)]
        asked = asked if any(box.value for box in second) else asked[:1]
        self._panes, self.results = [], []  # if this fails, nothing of an earlier prompt stays
        panes = []
        with self._counting(len(asked)):
            for prompt, answer in asked:
                options = {"answer": answer or None, "max_new_tokens": self.max_new_tokens.value}
                chat = self.chat.value if self._template else None
                trace = read(self._model, self._tokenizer, prompt, chat=chat, **options)
                panes.append(_Pane(f"{prompt} → {''.join(trace.tokens)}", trace))
        self._panes = panes
        rows = [row for row in self._rows if row < len(panes[0].trace.tokens)] or [0]
        self._quiet, before = True, self._quiet
        self.view.top, self.view.selected = {}, [[0, int(panes[0].trace.positions[row])] for row in rows]
        self._quiet = before
        self._draw()

    @contextmanager
    def _counting(self, prompts: int):
        """The progress bar counts what the head is asked for: a token each while the model speaks."""
        self.progress.max = prompts * (self.max_new_tokens.value + 1)
        self.progress.value, self.progress.layout.visibility, self.button.disabled = 0, "visible", True

        def count(*_):
            self.progress.value += 1

        handle = self._model.get_output_embeddings().register_forward_hook(count)
        try:
            yield
        finally:
            handle.remove()
            self.progress.layout.visibility, self.button.disabled = "hidden", False

    # -----------------------------------------------------------------------------------------------------------------
    # What is shown: everything below works from the traces
    # -----------------------------------------------------------------------------------------------------------------

    def _chosen(self) -> tuple[int, ...]:
        """The layers to show, as numbers; the last is always among them."""
        n, lowest = self._readout.n, int(self.baseline.value == "embedding")
        if self.single.value.strip():
            try:
                some = {int(part) for part in self.single.value.replace(",", " ").split()}
            except ValueError as error:
                raise IGLensError(f"single: expected layers such as 0, 10, 20, got {self.single.value!r}") from error
            if not all(lowest <= layer <= n for layer in some):
                raise IGLensError(f"single: expected layers of {lowest} … {n}, got {self.single.value!r}")
        else:
            low, high = self.layers.value
            some = set(range(max(low, lowest), high + 1, self.stride.value))
        return tuple(sorted(some | {n}))

    def _token(self, text: str) -> int | None:
        """The id of what was typed: ␣ is a space, "id 123" a token without a text; None for nothing."""
        text = text.replace("␣", " ")
        if number := re.fullmatch(r"\s*id (\d+)\s*", text):
            return int(number[1])
        ids = encode(self._tokenizer, text) if text else [None]
        if len(ids) == 1:
            spaced = encode(self._tokenizer, " " + text) if text[:1].isalnum() else ids
            if len(spaced) == 1 and spaced != ids:
                warnings.warn(
                    f"{text!r} is the token without a space before it; within a sentence, type ␣{text}", stacklevel=2
                )
            return ids[0]
        if not ids:
            raise IGLensError(f"target: expected the text of a token, {text!r} encodes to none")
        first = figures.visible(token_text(self._tokenizer, ids[0]))
        warnings.warn(f"{text!r} is {len(ids)} tokens; its first, {first}, is taken", stacklevel=2)
        return ids[0]

    def _scalar(self):
        other, kind = self._token(self.contrast.value), self.scalar.value
        if other is None:
            return kind
        one = self._token(self.target.value)
        if one is None or kind not in ("prob", "logit"):
            raise IGLensError("minus: expected a target to take it from, and probability or logit as the scalar")
        return kind, one, other

    def _fitted(self):
        """The translators to use, None on the plain path."""
        if self.path.value == "plain":
            return None
        if self._translators is not None:
            return self._translators[self.ridge.value]
        return for_model(self._model, self._tokenizer, self.ridge.value)

    def _attribution(self, pane: _Pane, position: int | None, target: int | None) -> Attribution:
        """Of the answer's rows, or of one position of the prompt; from what is known where that is enough."""
        layers, baseline, observed = self._chosen(), self.baseline.value, self.estimator.value == "observed"
        path, steps = layers, self.steps.value
        if observed:  # credits of fewer layers are sums of those of all: the head need not be asked again
            path, steps = range({"embedding": 1, "zero": 0, "mean": layers[0]}[baseline], self._readout.n + 1), 1
        ridge = self.ridge.value if self.path.value == "translated" else None
        options = {"targets": target, "layers": tuple(path), "baseline": baseline, "scalar": self._scalar()}
        options |= {"estimator": self.estimator.value, "steps": steps}
        key = (position, ridge, *options.values())
        if key not in pane.known:
            trace = pane.trace if position is None else _part(pane.trace, position)
            result = attribute(self._readout, trace, translators=self._fitted(), **options)
            if not (result.levels.isfinite().all() and result.credits.isfinite().all()):
                name = figures.scalar_name(result.scalar)
                raise IGLensError(f"{name} is not finite on this path; choose another scalar, path or baseline")
            while len(pane.known) >= KEPT + 2 * len(self.view.selected):  # all that is shown, for target and own token
                del pane.known[next(iter(pane.known))]
            pane.known[key] = result
        return merged(pane.known[key], layers)

    def _selected(self, index: int) -> set[int]:
        """The selected positions of a prompt that predict a token of it; the browser may still mean an earlier one."""
        count = len(self._panes[index].trace.input_ids) - 1
        return {position for one, position in self.view.selected if one == index and 0 <= position < count}

    def _shown(self, index: int, target: int | None) -> Attribution:
        """Of all rows: the answer's, and those of the prompt that are selected."""
        pane = self._panes[index]
        others = sorted(self._selected(index) - {*pane.trace.positions.tolist()})
        return joined([self._attribution(pane, position, target) for position in (*others, None)])

    def _draw(self) -> None:
        target = self._token(self.target.value)
        self.results = [self._shown(i, target) for i in range(len(self._panes))]
        # an entropy or a contrast is the same for every target
        alike = target is None or self.contrast.value or self.scalar.value == "entropy"
        own = self.results if alike else [self._shown(i, None) for i in range(len(self._panes))]
        ends = [float(end) for one in self.results for end in (one.levels.min(), one.levels.max())]
        low, high = figures.level_range(self.results[0].scalar, min(ends), max(ends))
        reading = (self.path.value, self.ridge.value)
        if reading != self._reading:
            self._reading, self.view.top = reading, {}
        self.view.data = {
            "scalar": figures.scalar_name(self.results[0].scalar),
            "mode": self.show.value,
            "columns": ["base", *map(str, self.results[0].layers)],
            "base": "0" if self.baseline.value == "embedding" else "",  # the layer that the baseline is
            "limit": self._limit(),
            "range": [low, high if high > low else low + 1],
            "colours": SHADES,
            "panes": [
                self._pane(pane, self._rows_of(*both))
                for pane, *both in zip(self._panes, self.results, own, strict=True)
            ],
        }
        self._judge()

    def _limit(self) -> float:
        return self.limit.value or max(float(one.credits.abs().max()) for one in self.results) or 1.0

    @staticmethod
    def _pane(pane: _Pane, rows: tuple = ()) -> dict:
        trace = pane.trace
        strip = [
            {
                "position": i - 1,
                "text": figures.visible(text),
                "part": "answer" if i >= trace.prompt_length else "prompt",
            }
            for i, text in enumerate(trace.input_tokens)
        ]
        title = figures.visible(pane.title).replace("␣", " ")
        return {"title": figures.shortened(title, 200), "strip": strip, "rows": list(rows)}

    @staticmethod
    def _rows_of(result: Attribution, own: Attribution) -> list[dict]:
        labels = ([_label(*one) for one in zip(a.positions.tolist(), a.tokens, strict=True)] for a in (result, own))
        onsets, rows = result.onset().tolist(), []
        for t, (label, was) in enumerate(zip(*labels, strict=True)):
            onset = result.layers.index(onsets[t]) + 1 if onsets[t] >= 0 else -1
            levels, credits = ([_short(value) for value in part[t]] for part in (result.levels, result.credits))
            row = {"position": int(result.positions[t]), "label": label, "levels": levels, "credits": credits}
            row |= {"onset": onset, "words": _words(result, t), "own": None}
            if own is not result:
                row["own"] = {"label": was, "levels": [_short(value) for value in own.levels[t]]}
            rows.append(row)
        return rows

    def _judge(self) -> None:
        """The badge: both errors, the worst of what is shown."""
        complete = max(one.completeness_error for one in self.results)
        faithful = max(one.faithfulness_error for one in self.results)
        try:
            for one in self.results:
                one.check()
            verdict = "✓ checked"
        except IGLensError as error:
            verdict = f"✗ {error}"
        text = f"{verdict} · sum off by {complete:.0e} · readout off the model's own logits by {faithful:.0e}"
        self.view.badge = {"text": text.replace("e-", "e−"), "ok": verdict.startswith("✓")}

    def _select(self) -> None:
        """The browser draws the selected rows itself, but must be given those of the prompt."""
        known = [{row["position"] for row in pane["rows"]} for pane in self.view.data["panes"]]
        wanted = [{*pane.trace.positions.tolist()} | self._selected(i) for i, pane in enumerate(self._panes)]
        if wanted != known:
            self._guarded(self._draw)

    def _top(self, message) -> None:
        index, position = message["top"]
        if index >= len(self.results) or position not in self.results[index].positions:
            return  # asked before another prompt was run
        self.view.top = {**self.view.top, f"{index}:{position}": self._best(self._panes[index].trace, position)}

    def _best(self, trace: Trace, position: int) -> dict:
        """The most probable next tokens that the lens reads at every layer: {"0": [[text, p], …], …}."""
        states, translators = trace.stream[:, [position]], self._fitted()
        states = states if translators is None else translators(states, range(len(states)))
        with torch.no_grad():
            p, ids = self._readout.topk(states[:, 0], min(TOP, self._readout.V))
        return {
            str(layer): [
                [figures.visible(token_text(self._tokenizer, i)), round(one, 3)]
                for one, i in zip(p[layer].tolist(), ids[layer].tolist(), strict=True)
                if math.isfinite(one)
            ]
            for layer in range(len(states))
        }

    def _example(self) -> None:
        """Fill the boxes; nothing runs before Run is pressed."""
        if self.examples.value:
            fresh = {"answer": "", "other_prompt": "", "other_answer": "", **EXAMPLES[self.examples.value]}
            for name, value in fresh.items():
                getattr(self, name).value = value and self._template if name == "chat" else value

    # -----------------------------------------------------------------------------------------------------------------
    # Taking it away
    # -----------------------------------------------------------------------------------------------------------------

    def frame(self) -> pd.DataFrame:
        """What is shown as a table: a row for each prompt, token and layer."""
        if not self.results:
            raise IGLensError("nothing is shown yet: type a prompt and press Run")
        frames = [one.to_frame() for one in self.results]
        for frame, pane in zip(frames, self._panes, strict=True):
            frame.insert(0, "prompt", pane.title)
        return pd.concat(frames, ignore_index=True)

    def figure(self) -> Figure:
        """What is shown as a matplotlib figure: the maps, and the trajectories of the selected tokens."""
        self.frame()
        rows = {(i, int(p)): row for i, one in enumerate(self.results) for row, p in enumerate(one.positions)}
        selected = [(i, rows[i, position]) for i, position in self.view.selected if (i, position) in rows]
        levels = self.show.value == "levels"
        titles = [pane.title for pane in self._panes]
        return figures.explored(self.results, titles, selected, levels, self._limit())

    def page(self) -> str:
        """What is shown as an HTML page that needs no network, no Python and no file beside it, and keeps hover."""
        self.frame()
        shown = [(i, int(position)) for i, one in enumerate(self.results) for position in one.positions]
        top = {f"{i}:{position}": self._best(self._panes[i].trace, position) for i, position in shown}
        state = {name: getattr(self.view, name) for name in ("data", "selected", "badge")}
        state |= {"top": top, "message": "", "live": False}
        one = self.results[0]
        about = (
            f"{one.model} ({one.dtype}), {self.path.value} path, baseline: {one.baseline}, estimator: {one.estimator}"
        )
        return PAGE.format(
            title="Which layers produced the probability of this token?",
            about=html.escape(about),
            code=SCRIPT.read_text(encoding="utf-8"),
            state=json.dumps(state, ensure_ascii=False).replace("<", "\\u003c"),  # no text can end the script
        )

    def export(self, kind: str) -> bytes:
        """The content of a file of what is shown. kind: "SVG", "PNG", "CSV" or "HTML"."""
        if kind not in EXPORTS:
            raise IGLensError(f"export: expected one of {', '.join(EXPORTS)}, got {kind!r}")
        if kind == "CSV":
            # with these ends of lines, a carriage return or a line feed within a token is quoted
            return self.frame().to_csv(index=False, lineterminator="\r\n").encode()
        if kind == "HTML":
            return self.page().encode()
        figure = self.figure()
        try:
            with io.BytesIO() as file:
                dots = min(150, 60_000 / max(figure.get_size_inches()))  # matplotlib draws 2¹⁶ dots a side at most
                figure.savefig(file, format=kind.lower(), dpi=dots)
                return file.getvalue()
        finally:
            plt.close(figure)

    def _download(self, kind: str) -> None:
        self.view.send({"download": f"iglens.{kind.lower()}", "type": EXPORTS[kind]}, [self.export(kind)])

    def _repr_mimebundle_(self, **kwargs):
        """Where widgets do not run, on GitHub or in a stored notebook, the picture stands in their place."""
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is not None and self.results:
            bundle["image/png"] = base64.b64encode(self.export("PNG")).decode()
        return bundle

    def __repr__(self) -> str:
        return f"Explorer(prompts={len(self._panes)}, layers={self._readout.n})"
