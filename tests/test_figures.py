"""The static figures: every token identifiable, nothing interpreted, nothing cut, zero in the middle."""

import io
import itertools
import re
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from iglens_core import Attribution, IGLensError
from iglens_lab import figures

ODD = ("$x^{2$", "$", "<b>", "<script>alert(1)</script>", "-->", " the", "the", " the", "\n", "\t\t", "a b", "日本")
ODD += ("🙂", "<0xE6><0x97>", "id 96", "\\frac", "&amp;", "_{", "\u200b", "\x07", "a" * 80)


@pytest.fixture(autouse=True)
def _closed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # among others, matplotlib's "glyph missing from font"
        yield
    plt.close("all")


def made(tokens=ODD, k=6, scale=1.0, scalar="prob"):
    """A result with these tokens; random credits of both signs, unless scale is 0."""
    count = len(tokens)
    credits = torch.randn(count, k, generator=torch.Generator().manual_seed(0)) * 0.1 * scale
    levels = torch.cat([torch.zeros(count, 1), credits.cumsum(1)], 1)
    ids = torch.arange(count)
    labels = {"scalar": scalar, "baseline": "embedding", "estimator": "observed", "steps": 1, "model": "M"}
    return Attribution(credits=credits, levels=levels, delta=levels[:, -1], model_level=levels[:, -1],
                       layers=tuple(range(1, k + 1)), positions=ids + 3, token_ids=ids, target_ids=ids,
                       tokens=tuple(tokens), dtype="float32", **labels)  # fmt: skip


def bytes_of(figure, form):
    with io.BytesIO() as file:
        figure.savefig(file, format=form)
        return file.getvalue()


def drawn(figure):
    """Every text that is drawn; ticks beyond the limits of their axis are not."""
    figure.canvas.draw()
    hidden = {
        label
        for ax in figure.axes
        for axis in (ax.xaxis, ax.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        for label in (tick.label1, tick.label2)
    }
    return [text for text in figure.findobj(plt.Text) if text.get_text() and text.get_visible() and text not in hidden]


def texts_inside(figure):
    """What the texts of a figure say; each must lie within it."""
    texts = drawn(figure)
    for text in texts:
        low, high = text.get_window_extent().get_points()
        assert (low >= -1).all(), text
        assert (high <= figure.bbox.get_points()[1] + 1).all(), text
    return [text.get_text() for text in texts]


def test_visible_marks_white_space_and_keeps_the_rest():
    assert figures.visible(" a b\n\t\r") == "␣a␣b⏎⇥␍"
    assert figures.visible("$x$ <b>") == "$x$␣<b>"


def test_visible_writes_the_code_of_what_no_font_can_draw():
    assert figures.visible("\u200b\x07") == "⟨U+200B⟩⟨U+0007⟩"
    assert figures.drawable("\U0010fffd") == "⟨U+10FFFD⟩"
    assert figures.visible("日本🙂") == "日本🙂"  # outside figures the reader's own fonts draw it


def test_visible_shortens_and_says_so():
    assert len(figures.drawable("a" * 80)) == figures.LONGEST and figures.drawable("a" * 80).endswith("…")


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
@pytest.mark.parametrize("draw", [figures.credit_map, figures.level_map, figures.maps])
def test_maps_draw_any_token_in_any_format(draw, form):
    assert len(bytes_of(draw(made()), form)) > 5000


def test_svg_holds_tokens_as_text_never_as_markup():
    with plt.rc_context({"svg.fonttype": "none"}):
        svg = bytes_of(figures.credit_map(made()), "svg").decode()
    assert "&lt;script&gt;" in svg and "<script" not in svg and "&lt;b&gt;" in svg


@pytest.mark.parametrize("draw", [figures.credit_map, figures.level_map, figures.maps])
@pytest.mark.parametrize("count", [1, 2, 60, 120])
def test_every_token_has_its_own_label_inside_the_figure(draw, count):
    result = made([" the", "cat"] * count, k=30) if count > 1 else made(["$"], k=30)
    shown = texts_inside(draw(result))
    labels = figures.token_labels(result)
    assert len(set(labels)) == len(result.tokens)
    assert set(labels[:120]) <= set(shown) if len(labels) <= figures.ROWS else "is labelled" in " ".join(shown)


def test_labels_do_not_lie_on_each_other():
    figure = figures.credit_map(made([" the"] * 120, k=40))
    figure.canvas.draw()
    ax = figure.axes[0]
    for labels, low, high in ((ax.get_yticklabels(), "y0", "y1"), (ax.get_xticklabels(), "x0", "x1")):
        boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: getattr(box, low))
        for a, b in itertools.pairwise(boxes):
            assert getattr(a, high) <= getattr(b, low) + 1


@pytest.mark.parametrize("k", [1, 5, 32, 33, 80, 126])
def test_last_layer_always_has_its_label(k):
    labels = [label.get_text() for label in figures.credit_map(made(k=k)).axes[0].get_xticklabels()]
    assert labels[-1] == str(k)


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_zero_is_the_middle_of_the_credit_scale(sign):
    result = made()
    result.credits.copy_(result.credits.abs() * sign)
    mesh = figures.credit_map(result).axes[0].collections[0]
    low, high = mesh.get_clim()
    assert low == -high and high > 0
    middle = np.array(mesh.cmap(mesh.norm(0.0))[:3])
    assert middle.min() > 0.95  # white
    if sign:
        assert high == pytest.approx(float(result.credits.abs().max()))


def test_cells_show_the_credits_in_order():
    result = made()
    mesh = figures.credit_map(result).axes[0].collections[0]
    np.testing.assert_array_equal(mesh.get_array().reshape(result.credits.shape), result.credits.numpy())
    assert figures.credit_map(result).axes[0].yaxis_inverted()  # the first token on top


def test_results_side_by_side_share_one_scale():
    small, large = made(scale=0.1), made(scale=1.0)
    figure = figures.credit_map(small, large, titles=("a", "b"))
    meshes = [ax.collections[0] for ax in figure.axes[:2]]
    assert (
        meshes[0].get_clim() == meshes[1].get_clim() == (-float(large.credits.abs().max()),) * 0 + meshes[1].get_clim()
    )


def test_probability_levels_always_run_from_0_to_1():
    assert figures.level_map(made(scale=0.01)).axes[0].collections[0].get_clim() == (0, 1)


@pytest.mark.parametrize("token", range(len(ODD)))
def test_trajectory_draws_any_token(token):
    figure = figures.trajectory(made(), token)
    assert any(figures.drawable(ODD[token]) in text for text in texts_inside(figure))


def test_trajectory_draws_levels_credits_and_onset_of_each_target():
    one, two = made(), made(scale=0.5)
    ax = figures.trajectory(one, 3, two).axes[0]
    lines = [line for line in ax.lines if len(line.get_xdata()) == 7]
    for line, result in zip(lines, (one, two), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), result.levels[3].numpy())
    heights = [bar.get_height() for bars in ax.containers for bar in bars]
    np.testing.assert_allclose(heights, torch.cat([one.credits[3], two.credits[3]]).numpy())
    legend = " ".join(text.get_text() for text in ax.get_legend().get_texts())
    assert re.findall(r"onset of [^:]*: (\d)", legend) == [str(int(one.onset()[3])), str(int(two.onset()[3]))]


def test_trajectory_of_an_all_zero_token_has_no_onset():
    figure = figures.trajectory(made(scale=0.0), 0)
    assert not any("onset" in text for text in texts_inside(figure))


@pytest.mark.parametrize("token", [-1, 21, "0", 1.0, True, None])
def test_trajectory_refuses_a_row_that_is_not_there(token):
    with pytest.raises(IGLensError, match="0 … 20"):
        figures.trajectory(made(), token)
    assert plt.get_fignums() == []


def test_results_that_do_not_belong_on_one_axis_are_refused():
    with pytest.raises(IGLensError, match="layers and positions"):
        figures.trajectory(made(), 0, made(k=5))
    with pytest.raises(IGLensError, match="layers and positions"):
        figures.trajectory(made(), 0, made(ODD[:3]))
    for draw in (figures.credit_map, lambda *results: figures.trajectory(results[0], 0, results[1])):
        with pytest.raises(IGLensError, match="one scalar"):
            draw(made(), made(scalar="log_prob"))
    with pytest.raises(IGLensError, match="2 titles, got 1"):
        figures.credit_map(made(), made(), titles=("a",))
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("scalar", "name"),
    [("prob", "p"), ("log_prob", "log p (nats)"), ("entropy", "entropy (nats)"), (("prob", 5, 7), "p(id 5) − p(id 7)"),
     (("logit", 5, 7), "logit(id 5) − logit(id 7)")],
)  # fmt: skip
def test_every_scalar_is_named_on_its_axes(scalar, name):
    result = made(scalar=scalar)
    assert f"credit: change of {name}" in texts_inside(figures.credit_map(result))
    assert f"level: {name}" in texts_inside(figures.level_map(result))
    assert name in texts_inside(figures.trajectory(result, 0))
    assert len(texts_inside(figures.maps(result))) > 20
