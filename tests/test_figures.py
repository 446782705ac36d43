"""The static figures: every token identifiable, nothing interpreted, nothing cut, zero in the middle."""

import io
import itertools
import re
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from iglens_core import Attribution, IGLensError, Readout
from iglens_lab import figures, theory, toy

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


def apart(figure, texts):
    """No two of these texts lie on each other."""
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent().shrunk(0.98, 0.98)) for text in texts]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)


def beside(figure):
    """The labels of ticks, titles and values of all axes; not those of legends, which place themselves."""
    legends = {text for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()}
    return [text for text in drawn(figure) if text not in legends]


# ---------------------------------------------------------------------------------------------------------------------
# Side by side
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ks", [(1,), (60,), (1, 60), (4, 6, 12)])
def test_a_comparison_draws_each_result_under_its_title_and_no_label_on_another(ks):
    results = {f"planted in block {i} of {k}": made(k=k) for i, k in enumerate(ks)}
    figure = figures.comparison(results, 5)
    assert plt.get_fignums() == [figure.number]
    said = texts_inside(figure)
    for ax, (title, result) in zip(figure.axes, results.items(), strict=True):
        assert ax.get_title() == title and title in said
        (line,) = [line for line in ax.lines if line.get_label().startswith("level of")]
        np.testing.assert_array_equal(line.get_ydata(), result.levels[5].numpy())
        heights = [bar.get_height() for bars in ax.containers for bar in bars]
        np.testing.assert_allclose(heights, result.credits[5].numpy())
        labels = [label.get_text() for label in ax.get_xticklabels()]
        assert labels[-1] == str(result.layers[-1])
    apart(figure, beside(figure))


def test_a_comparison_has_one_scale_and_names_it_once():
    figure = figures.comparison({"small": made(scale=0.01), "large": made(scale=3.0)})
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert texts_inside(figure).count("p") == 1
    assert figures.comparison({"log": made(scalar="log_prob")}).axes[0].get_ylabel() == "log p (nats)"


@pytest.mark.parametrize("token", [0, 3, 8, 11, 20])
def test_a_comparison_draws_any_token_and_takes_its_title_as_it_is(token):
    said = texts_inside(figures.comparison({"$x^{2$ <b>": made()}, token))
    assert any(figures.drawable(ODD[token]) in text for text in said) and "$x^{2$ <b>" in said


@pytest.mark.parametrize("given", [{}, [], None, "results"])
def test_a_comparison_of_nothing_is_refused(given):
    with pytest.raises(IGLensError, match="comparison: expected results by their titles, a dict"):
        figures.comparison(given)
    assert plt.get_fignums() == []


def test_a_comparison_of_what_does_not_belong_on_one_axis_is_refused():
    for other in (made(scalar="log_prob"), None):
        with pytest.raises(IGLensError, match="one scalar"):
            figures.comparison({"a": made(), "b": other})
    assert plt.get_fignums() == []


@pytest.mark.parametrize("token", [-1, 21, "0", True])
def test_a_comparison_of_a_token_that_is_not_there_is_refused(token):
    with pytest.raises(IGLensError, match="comparison: expected a token of 0 … 20, got"):
        figures.comparison({"a": made()}, token)


def test_a_refused_comparison_leaves_no_figure_open():
    with pytest.raises(IGLensError):
        figures.comparison({"a": made(), "b": made(ODD[:3])}, 5)
    assert plt.get_fignums() == []


# ---------------------------------------------------------------------------------------------------------------------
# Waterfalls
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 6, 16, 17, 60])
def test_a_waterfall_goes_from_the_baselines_level_to_the_last_by_its_credits(k):
    result = made(k=k)
    result.levels.add_(0.2)
    figure = figures.waterfall(result, 5)
    assert plt.get_fignums() == [figure.number]
    ax = figure.axes[0]
    steps, ends = ([(bar.get_y(), bar.get_height()) for bar in bars] for bars in ax.containers)
    np.testing.assert_allclose(steps, np.stack([result.levels[5, :-1], result.credits[5]], 1), atol=1e-6)
    np.testing.assert_allclose(ends, [(0, result.levels[5, 0]), (0, result.levels[5, -1])], atol=1e-6)
    said = texts_inside(figure)
    assert "base" in said and "end" in said and str(k) in said
    apart(figure, beside(figure))


def test_a_waterfalls_steps_are_blue_up_and_orange_down():
    result = made()
    colours = [
        plt.matplotlib.colors.to_hex(bar.get_facecolor()) for bar in figures.waterfall(result, 5).axes[0].patches
    ]
    expected = [figures.COLOURS[0] if credit >= 0 else figures.COLOURS[1] for credit in result.credits[5]]
    assert colours[: len(expected)] == [colour.lower() for colour in expected]
    assert len(set(expected)) == 2


@pytest.mark.parametrize("k", [3, 16])
def test_a_waterfall_says_its_credits_with_their_signs(k):
    result = made(k=k)
    result.credits[5, 0] = -0.001
    texts = [text.get_text() for text in figures.waterfall(result, 5).axes[0].texts]
    for text, credit in zip(texts, result.credits[5].tolist(), strict=True):
        assert float(text.replace("−", "-")) == pytest.approx(credit, abs=0.00501)
        assert text == "0" or text[0] == ("+" if credit > 0 else "−")
    assert texts[0] == "0"  # neither +0.00 nor −0.00


def test_a_waterfall_of_many_layers_has_no_numbers_to_lie_on_each_other():
    assert len(figures.waterfall(made(k=17)).axes[0].texts) == 0


@pytest.mark.parametrize("scalar", ["log_prob", "entropy", ("logit", 5, 7)])
def test_a_waterfall_of_other_scalars_names_them_and_keeps_its_numbers_apart(scalar):
    figure = figures.waterfall(made(k=16, scalar=scalar, scale=30.0), 3)
    said = texts_inside(figure)
    assert figures.scalar_name(scalar) in said and "p" not in said
    apart(figure, beside(figure))


def test_a_waterfall_shows_where_credits_do_not_sum_to_the_whole():
    result = made()
    result.credits.copy_(result.credits.abs())  # credits without signs reach elsewhere
    ax = figures.waterfall(result, 5).axes[0]
    last = ax.containers[0][-1]
    assert last.get_y() + last.get_height() == pytest.approx(float(result.credits[5].sum()), abs=1e-6)
    assert ax.containers[1][-1].get_height() == pytest.approx(float(result.levels[5, -1]))
    assert float(result.credits[5].sum() - result.levels[5, -1]) > 0.1


@pytest.mark.parametrize("token", [0, 3, 8, 11, 20])
def test_a_waterfall_draws_any_token(token):
    assert any(figures.drawable(ODD[token]) in text for text in texts_inside(figures.waterfall(made(), token)))


def test_a_waterfall_of_a_token_that_nothing_happened_to_is_flat():
    figure = figures.waterfall(made(scale=0.0))
    assert texts_inside(figure).count("0") >= 6  # beside those of the axes


@pytest.mark.parametrize("token", [-1, 21, "0", 1.0, True, None])
def test_a_waterfall_of_a_token_that_is_not_there_is_refused(token):
    with pytest.raises(IGLensError, match="waterfall: expected a token of 0 … 20, got"):
        figures.waterfall(made(), token)
    assert plt.get_fignums() == []


def test_a_waterfall_of_no_result_is_refused():
    with pytest.raises(IGLensError, match="expected Attributions"):
        figures.waterfall({"a": made()})


# ---------------------------------------------------------------------------------------------------------------------
# The plane
# ---------------------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[0.0, 2.0], [-1.7, -1.0], [1.7, -1.0]], dtype=torch.float64)
WALK = torch.tensor([[-1.4, -1.2], [-0.6, 0.34], [-2.2, 1.25], [0.4, 1.6]], dtype=torch.float64)


@pytest.fixture(scope="module", params=[False, True], ids=["no norm", "norm"])
def readout(request):
    return Readout(toy.walking(WALK, ROWS, norm=request.param))


def quiver(ax):
    return next(one for one in ax.collections if isinstance(one, plt.matplotlib.quiver.Quiver))


@pytest.mark.parametrize("target", [0, 2])
def test_the_plane_shows_the_probability_and_its_gradient_everywhere(readout, target):
    figure = figures.plane(readout, {"path": WALK}, target)
    assert plt.get_fignums() == [figure.number]
    ax, field = figure.axes[0], quiver(figure.axes[0])
    places = torch.from_numpy(np.asarray(field.get_offsets()))
    slope = theory.gradients(readout, places, target)
    np.testing.assert_allclose(np.stack([field.U, field.V], 1), slope.numpy(), atol=1e-12)
    assert np.isfinite(slope.numpy()).all() and len(places) > 80
    mesh = next(one for one in ax.collections if isinstance(one, plt.matplotlib.contour.QuadContourSet))
    assert mesh.levels[[0, -1]].tolist() == [0, 1]
    assert mesh.cmap.name == "cividis"
    for low, high, path in zip(mesh.levels, mesh.levels[1:], mesh.get_paths(), strict=False):
        for x, y in path.vertices[:: max(1, len(path.vertices) // 20)]:  # between two levels, up to the grid
            p = float(readout.prob(torch.tensor([[x, y]], dtype=torch.float64), target).detach())
            assert low - 0.03 <= p <= high + 0.03 or abs(x) + abs(y) < 0.1  # where a norm's contours meet


def test_the_plane_draws_a_path_as_numbered_points_inside_the_figure(readout):
    figure = figures.plane(readout, {"path": WALK})
    said = texts_inside(figure)
    ax = figure.axes[0]
    numbers = {text.get_text(): text for text in ax.texts if text.get_text()}
    assert list(numbers) == ["0", "1", "2", "3"] and {"0", "3", "level: p", "first coordinate of h"} <= set(said)
    for i, point in enumerate(WALK.tolist()):
        assert list(numbers[str(i)].get_position()) == point
    arrows = [text for text in ax.texts if not text.get_text()]
    assert len(arrows) == 3
    apart(figure, beside(figure))


def test_points_of_the_plane_have_the_names_that_they_are_given(readout):
    figure = figures.plane(readout, {"path": WALK[:2]}, names=("zero", "h"))
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text()] == ["zero", "h"]


def test_curves_on_the_plane_are_lines_told_apart_and_named_in_a_legend(readout):
    curves = theory.curves(WALK[0], WALK[3])
    figure = figures.plane(readout, curves, arrows=False)
    ax = figure.axes[0]
    lines = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(lines) == list(curves)
    for name, curve in curves.items():
        np.testing.assert_array_equal(lines[name].get_xydata(), curve.numpy())
    assert len({line.get_linestyle() for line in lines.values()}) == 3
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(curves)
    texts_inside(figure)
    apart(figure, drawn(figure))


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_the_plane_is_drawn_in_any_format(form):
    flat = Readout(toy.walking(WALK, ROWS))
    assert len(bytes_of(figures.plane(flat, {"path": WALK}), form)) > 5000


def test_the_plane_is_square_and_reaches_as_far_as_it_is_told():
    flat = Readout(toy.walking(WALK, ROWS))
    ax = figures.plane(flat, {"path": WALK}, reach=4.0).axes[0]
    assert ax.get_xlim() == ax.get_ylim() == (-4.0, 4.0) and ax.get_aspect() == 1


def test_the_plane_cuts_what_lies_outside():
    flat = Readout(toy.walking(WALK, ROWS))
    texts_inside(figures.plane(flat, {"far": torch.tensor([[0.0, 0.0], [9.0, 9.0]]).double()}))


def test_a_readout_of_another_width_and_paths_of_other_shapes_are_refused():
    flat, wide = Readout(toy.walking(WALK, ROWS)), Readout(toy.llama(26, 64, 2, seed=0))
    with pytest.raises(IGLensError, match=r"plane: expected a readout of width d = 2 and paths \[P, 2\], got d = 64"):
        figures.plane(wide, {"path": WALK})
    for path in (torch.zeros(3, 3), torch.zeros(2), torch.zeros(3, 1, 2)):
        with pytest.raises(IGLensError, match=r"plane: expected .* paths \[P, 2\], got d = 2, \[\[4, 2\], \["):
            figures.plane(flat, {"path": WALK, "other": path})
    assert plt.get_fignums() == []


def test_a_refused_plane_leaves_no_figure_open():
    with pytest.raises(IGLensError, match="0 … 2, got"):
        figures.plane(Readout(toy.walking(WALK, ROWS)), {"path": WALK}, target=3)
    assert plt.get_fignums() == []


# ---------------------------------------------------------------------------------------------------------------------
# What the explorer shows
# ---------------------------------------------------------------------------------------------------------------------


def meshes_of(figure):
    return [ax.collections[0] for ax in figure.axes if ax.get_xlabel() == "layer" and ax.yaxis_inverted()]


def panes_of(figure):
    return figure.subfigs[0].subfigs


def charts_of(figure):
    return [ax for ax in figure.axes if ax.get_legend()]


@pytest.mark.parametrize("levels", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("selected", [0, 1, 5])
def test_explored_keeps_every_text_inside(levels, count, selected):
    results = [made(ODD[:8], k=30), made([" the", "cat"], k=30)][:count]
    titles = ["What is the capital of Vietnam? → The capital of Vietnam is Hanoi.", "$x$ → " + "W" * 40][:count]
    some = [(i % count, i % len(results[i % count].tokens)) for i in range(selected)]
    figure = figures.explored(results, titles, some, levels)
    shown = texts_inside(figure)
    assert {label for one in results for label in figures.token_labels(one)} <= set(shown)
    assert len(charts_of(figure)) == selected and len(meshes_of(figure)) == count


@pytest.mark.parametrize("k", [1, 30])
@pytest.mark.parametrize("title", ["word " * 60, "W" * 200, "日本🙂" * 40, "<b>$$\\frac{1}{2} $\n\t", ""])
def test_explored_keeps_long_and_odd_titles_inside(title, k):
    for results in ([made([" a"], k=k)], [made([" a"], k=k), made([" a", " b"], k=k)]):
        figure = figures.explored(results, [title] * len(results), [(0, 0)])
        texts_inside(figure)
        boxes = [pane.texts[0].get_window_extent() for pane in panes_of(figure)]
        assert len(boxes) == len(results)
        for one, other in itertools.pairwise(boxes):
            assert one.x1 <= other.x0 + 1  # a title does not run into its neighbour


def test_explored_maps_begin_at_one_height_whatever_their_titles():
    figure = figures.explored([made(k=3), made(k=3)], ["word " * 40, "short"])
    figure.canvas.draw()
    one, other = (mesh.axes.get_window_extent().y1 for mesh in meshes_of(figure))
    assert one == pytest.approx(other, abs=2)


def test_explored_shows_a_title_as_text():
    figure = figures.explored([made()], ["$x^{2$ ␣ <b> \\frac"])
    (title,) = panes_of(figure)[0].texts
    assert title.get_text() == "$x^{2$   <b> \\frac" and title.get_parse_math() is False
    assert len(bytes_of(figure, "svg")) > 5000


def test_explored_maps_share_one_scale_with_zero_in_the_middle():
    small, large = made(scale=0.1), made(scale=1.0)
    figure = figures.explored([small, large], ["a", "b"])
    limit = float(large.credits.abs().max())
    for mesh, one in zip(meshes_of(figure), (small, large), strict=True):
        assert mesh.get_clim() == (-limit, limit)
        np.testing.assert_array_equal(mesh.get_array().reshape(one.credits.shape), one.credits.numpy())
        assert np.array(mesh.cmap(mesh.norm(0.0))[:3]).min() > 0.95  # white


def test_explored_takes_the_limit_that_is_given():
    assert meshes_of(figures.explored([made()], ["a"], limit=0.7))[0].get_clim() == (-0.7, 0.7)
    assert meshes_of(figures.explored([made(scale=0)], ["a"]))[0].get_clim() == (-1, 1)


@pytest.mark.parametrize(("scalar", "whole"), [("prob", True), ("logit", False)])
def test_explored_levels_share_one_range(scalar, whole):
    results = [made(scale=0.1, scalar=scalar), made(scalar=scalar)]
    figure = figures.explored(results, ["a", "b"], levels=True, limit=0.1)
    ends = [float(end) for one in results for end in (one.levels.min(), one.levels.max())]
    for mesh, one in zip(meshes_of(figure), results, strict=True):
        assert mesh.get_clim() == ((0, 1) if whole else (min(ends), max(ends)))
        np.testing.assert_array_equal(mesh.get_array().reshape(one.levels.shape), one.levels.numpy())
    assert figure.axes[0].get_xticklabels()[0].get_text() == "base"


def test_explored_draws_the_selected_trajectories_in_order_on_one_axis():
    results = [made(ODD[:4]), made([" x", " y"])]
    some = [(1, 1), (0, 2), (0, 0)]
    charts = charts_of(figures.explored(results, ["a", "b"], some))
    for ax, (i, row) in zip(charts, some, strict=True):
        assert ax.get_title() == ("left: ", "right: ")[i] + figures.token_labels(results[i])[row]
        np.testing.assert_array_equal(ax.get_lines()[0].get_ydata(), results[i].levels[row].numpy())
        np.testing.assert_allclose([bar.get_height() for bar in ax.patches], results[i].credits[row].numpy())
    assert len({ax.get_ylim() for ax in charts}) == 1
    (alone,) = charts_of(figures.explored(results[:1], ["a"], [(0, 1)]))
    assert alone.get_title() == figures.token_labels(results[0])[1]


def test_explored_many_tokens_keep_their_last_layer_and_say_their_stride():
    figure = figures.explored([made([" the"] * 200, k=80)], ["a"])
    shown = texts_inside(figure)
    assert "80" in shown and any("is labelled" in text for text in shown)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([], []), "expected results and as many titles, got 0 and 0"),
        (([made()], []), "got 1 and 0"),
        (([made()], ["a", "b"]), "got 1 and 2"),
        (([made()], ["a"], [(0, 99)]), "expected a token of"),
        (([made()], ["a"], [(1, 0)]), "expected a result of 0 … 0"),
        (([made()], ["a"], [(-1, 0)]), "expected a result of 0 … 0"),
        (([made(), made(scalar="logit")], ["a", "b"]), "one scalar"),
        (([3], ["a"]), "expected Attributions"),
    ],
)
def test_explored_refuses_what_it_cannot_draw_and_leaves_no_figure(given, words):
    plt.close("all")
    with pytest.raises(IGLensError, match=words):
        figures.explored(*given)
    assert plt.get_fignums() == []


# ---------------------------------------------------------------------------------------------------------------------
# Of many prompts
# ---------------------------------------------------------------------------------------------------------------------


def bands(k=30, count=3):
    mean = np.linspace(-0.2, 0.6, k)
    return {f"drop {i}": np.array([mean + i, mean + i - 0.1, mean + i + 0.1]) for i in range(count)}


def test_profiles_draw_means_and_their_intervals():
    figure = figures.profiles(bands(), range(1, 31), "change of p")
    (ax,) = figure.axes
    lines = [line for line in ax.lines if len(line.get_xdata()) == 30]
    assert [line.get_ydata().tolist() for line in lines] == [band[0].tolist() for band in bands().values()]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(bands())
    for area, band in zip(ax.collections, bands().values(), strict=True):
        assert area.get_datalim(ax.transData).ymax == pytest.approx(band[2].max())
    assert ax.get_xlabel() == "block" and ax.get_ylabel() == "change of p"


def test_more_bands_than_colours_are_refused_and_not_left_out():
    with pytest.raises(IGLensError, match="profiles: expected at most 4"):
        figures.profiles(bands(count=5), range(1, 31), "p")


def test_a_forest_puts_every_estimate_beside_its_name_interval_and_null():
    rows = {"credit": [0.1, 0.0, 0.3, 0.05], "depth": [-0.2, -0.4, 0.1, -0.2]}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "low", "high", "null"])
    figure = figures.forest({"skip": frame, "resample": frame * 2}, "ρ")
    assert [ax.get_title() for ax in figure.axes] == ["skip", "resample"]
    labels = {text.get_text(): y for text, y in zip(figure.axes[0].get_yticklabels(), figure.axes[0].get_yticks())}  # noqa: B905
    for (name, (mean, low, high, null)), scale, ax in itertools.product(rows.items(), (1,), figure.axes[:1]):
        points = {(round(x, 6), y) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)}
        for value in (mean, low, high, null):
            assert (round(scale * value, 6), labels[name]) in points


def test_credits_and_drops_stand_side_by_side_by_block():
    layers, credits, drops = np.arange(1, 31), np.linspace(-0.1, 0.2, 30), np.linspace(0.5, -0.3, 30)
    (ax,) = figures.beside(layers, credits, drops, credits.cumsum(), "“$x^{2$” <b>").axes
    found = [[bar.get_height() for bar in bars] for bars in ax.containers]
    np.testing.assert_allclose(found, [credits, drops])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), credits.cumsum())
    assert all(a.get_x() + a.get_width() <= b.get_x() + 1e-9 for a, b in zip(*ax.containers, strict=True))
    assert ax.get_title() == "“$x^{2$” <b>" and not ax.title.get_parse_math()
