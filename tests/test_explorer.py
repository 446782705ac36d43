"""The interactive part without a browser: it redraws from the trace, once a change, and leaves nothing behind."""

import re

import matplotlib.pyplot as plt
import pytest
import tiny
import torch

from iglens_core import IGLensError, Readout, attribute, read
from iglens_lab import figures, toy
from iglens_lab.explorer import Segment, TokenLayers
from iglens_lab.translators import Translators, fingerprint


@pytest.fixture(scope="module")
def read_once():
    model, tokenizer = tiny.speaker(), tiny.tokenizer()
    return model, Readout(model), read(model, tokenizer, "the cat", answer=" sat on", chat=False)


def test_selection_never_runs_the_model(read_once):
    model, readout, trace = read_once
    widget, runs = TokenLayers(readout, trace), []
    handle = tiny.blocks(model)[0].register_forward_hook(lambda *_: runs.append(1))
    widget.token.value, widget.layers.value = 1, (2, 3)
    handle.remove()
    assert runs == []


def test_what_it_says_is_the_attribution(read_once):
    _, readout, trace = read_once
    widget = TokenLayers(readout, trace)
    widget.token.value, widget.layers.value = 1, (2, 2)
    result = attribute(readout, trace, layers=[2])
    assert f"change of p: {float(result.delta[1]):.4f}, onset at layer {int(result.onset()[1])}" in widget.says.value
    assert f"layers 2 … 2, and {readout.n}" in widget.says.value


def test_the_path_is_switched_between_plain_and_translated_by_ridge(read_once):
    model, readout, trace = read_once
    shapes = (readout.n, readout.d, readout.d), (readout.n, readout.d)
    torch.manual_seed(0)
    made = {
        ridge: Translators(torch.randn(shapes[0]) * ridge, torch.randn(shapes[1]), fingerprint(model), 0, ridge)
        for ridge in (0.1, 1.0)
    }
    widget, runs = TokenLayers(readout, trace, translators=made), []
    handle = tiny.blocks(model)[0].register_forward_hook(lambda *_: runs.append(1))
    said, drawn = [widget.says.value], [widget.picture.value]
    for control, value in ((widget.path, "translated"), (widget.ridge, 1.0), (widget.layers, (2, readout.n))):
        control.value = value
        said.append(widget.says.value)
        drawn.append(widget.picture.value)
    widget.path.value, widget.layers.value = "plain", (1, readout.n)
    handle.remove()
    assert runs == [] and len(set(drawn)) == 4
    assert widget.says.value == said[0] and widget.picture.value == drawn[0]
    result = attribute(readout, trace, translators=made[0.1])
    assert f"change of p: {float(result.delta[0]):.4f}, onset at layer {int(result.onset()[0])}" in said[1]


def test_without_translators_there_is_no_switch(read_once):
    _, readout, trace = read_once
    widget = TokenLayers(readout, trace)
    assert widget.path not in widget.children and widget.ridge not in widget.children


def test_many_moves_leave_one_picture_and_no_open_figure(read_once):
    _, readout, trace = read_once
    plt.close("all")
    widget, pictures = TokenLayers(readout, trace), set()
    for move in range(25):
        widget.layers.value = (1 + move % 2, 3 - move % 3 % 2)
        pictures.add(widget.picture.value)
    assert plt.get_fignums() == []
    assert len(pictures) > 1 and bytes(widget.picture.value).startswith(b"\x89PNG")


def test_a_widget_built_again_draws_once_a_change(read_once, monkeypatch):
    _, readout, trace = read_once
    widgets = [TokenLayers(readout, trace) for _ in range(3)]
    drawn, draw = [], figures.trajectory
    monkeypatch.setattr(figures, "trajectory", lambda *given: drawn.append(1) or draw(*given))
    widgets[-1].token.value = 1
    assert len(drawn) == 1


def test_an_error_is_shown_in_the_widget(read_once):
    _, readout, trace = read_once
    widget = TokenLayers(readout, trace, baseline="nothing like it")
    assert "cannot be drawn" in widget.says.value and "nothing like it" in widget.says.value
    assert bytes(widget.picture.value) == b""


@pytest.mark.parametrize(
    ("given", "words"),
    [({"token": 9}, "a row of it, got Trace, 9"), ({"layers": 3}, "layers cannot be given"), ({"token": "x"}, "'x'")],
)
def test_bad_input_is_refused_before_anything_is_shown(read_once, given, words):
    _, readout, trace = read_once
    with pytest.raises(IGLensError, match=words):
        TokenLayers(readout, trace, **given)


def test_its_text_form_does_not_change_from_run_to_run(read_once):
    _, readout, trace = read_once
    assert repr(TokenLayers(readout, trace)) == repr(TokenLayers(readout, trace))
    assert "object at" not in repr(TokenLayers(readout, trace))


def test_a_baseline_for_each_token_and_other_scalars_are_drawn(read_once):
    _, readout, trace = read_once
    baseline = torch.randn(len(trace.tokens), readout.d)
    widget = TokenLayers(readout, trace, token=1, baseline=baseline, scalar="log_prob")
    result = attribute(readout, trace, baseline=baseline, scalar="log_prob")
    assert f"change of log p (nats): {float(result.delta[1]):.4f}" in widget.says.value


# ---------------------------------------------------------------------------------------------------------------------
# A segment of a path on the plane
# ---------------------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[0.0, 2.0], [-1.7, -1.0], [1.7, -1.0]], dtype=torch.float64)
START, END = torch.tensor([-1.4, -1.2], dtype=torch.float64), torch.tensor([0.4, 1.6], dtype=torch.float64)


@pytest.fixture(scope="module")
def flat():
    return Readout(toy.walking(torch.stack([START, END]), ROWS))


@pytest.fixture
def segment(flat):
    return Segment(flat, START, END)


def numbers(widget) -> dict[str, float]:
    """What the line of text says: the name of each way and its number."""
    assert re.match(r"\d+ steps: ", widget.says.value), widget.says.value
    return {name: float(value) for name, value in re.findall(r"([a-z][a-z -]*[a-z]) (-?\d\.\d{4})", widget.says.value)}


def p(h, target=0):
    return float((torch.as_tensor(h, dtype=torch.float64) @ ROWS.T).softmax(0)[target])


def midpoint(start, end, steps):
    """The midpoint rule for p(a) of a plain softmax, by hand."""
    total = 0.0
    for step in range(steps):
        h = start + (end - start) * (step + 0.5) / steps
        q = (h @ ROWS.T).softmax(0)
        total += float(q[0] * ((ROWS[0] - q @ ROWS) @ (end - start))) / steps
    return total


def test_the_text_names_the_estimators_and_says_what_they_find(segment):
    found = numbers(segment)
    assert list(found) == ["observed", "midpoint", "gauss-legendre", "along the bent curve"]
    change = p(END) - p(START)
    assert found["observed"] == pytest.approx(change, abs=6e-5)
    assert found["along the bent curve"] == pytest.approx(change, abs=6e-5)
    assert found["midpoint"] == pytest.approx(midpoint(START, END, 4), abs=6e-5)
    assert segment.says.value.startswith("4 steps: ")


def test_bending_the_path_changes_the_picture_and_no_number(segment):
    before, picture = segment.says.value, segment.picture.value
    segment.bend.value = -0.9
    assert segment.says.value == before and segment.picture.value != picture


def test_more_steps_change_the_sampled_numbers_only(segment):
    before = numbers(segment)
    segment.steps.value = 1
    after = numbers(segment)
    assert segment.says.value.startswith("1 steps: ")
    assert after["midpoint"] == pytest.approx(midpoint(START, END, 1), abs=6e-5) and after != before
    segment.steps.value = 32
    assert numbers(segment)["gauss-legendre"] == pytest.approx(before["observed"], abs=6e-5)
    assert after["observed"] == before["observed"] == numbers(segment)["observed"]


def test_moving_an_end_is_seen_by_every_way(segment):
    before = numbers(segment)
    segment.ends[3].value = -0.4
    after = numbers(segment)
    assert all(after[name] != before[name] for name in before)
    assert after["observed"] == pytest.approx(p([0.4, -0.4]) - p(START), abs=6e-5)


def test_every_slider_draws_once_a_change_and_leaves_no_figure_open(flat, monkeypatch):
    other, widget = (Segment(flat, START, END) for _ in range(2))  # one was built before, as when a cell runs again
    drawn, draw, untouched = [], figures.plane, other.picture.value
    monkeypatch.setattr(figures, "plane", lambda *given, **options: drawn.append(1) or draw(*given, **options))
    seen = {(widget.says.value, bytes(widget.picture.value))}
    for count, control in enumerate((widget.bend, widget.steps, *widget.ends), 1):
        control.value = control.max
        control.value = control.max  # no change
        control.disabled = True  # nor is this one of its value
        seen.add((widget.says.value, bytes(widget.picture.value)))
        assert len(drawn) == count == len(seen) - 1, control.description
        assert plt.get_fignums() == [] and bytes(widget.picture.value).startswith(b"\x89PNG")
    assert other.picture.value == untouched


def test_a_path_without_length_changes_nothing(flat):
    segment = Segment(flat, [2.5, -2.5], [2.5, -2.5])
    assert {abs(value) for value in numbers(segment).values()} == {0.0}
    assert bytes(segment.picture.value).startswith(b"\x89PNG")
    assert plt.get_fignums() == []


@pytest.mark.parametrize("norm", [False, True])
def test_the_farthest_ends_are_drawn(norm):
    widget = Segment(Readout(toy.walking(torch.stack([START, END]), ROWS, norm=norm)), [-2.5, -2.5], [2.5, 2.5])
    for bend in (-1.0, 1.0):
        widget.bend.value = bend
        assert list(numbers(widget)) == ["observed", "midpoint", "gauss-legendre", "along the bent curve"]


def test_many_moves_of_a_segment_leave_one_picture_and_no_open_figure(segment):
    plt.close("all")
    pictures = set()
    for move in range(25):
        (*segment.ends, segment.bend)[move % 5].value = -1 + 0.3 * (move % 4)
        pictures.add(bytes(segment.picture.value))
    assert plt.get_fignums() == []
    assert len(pictures) > 10 and bytes(segment.picture.value).startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said_in_place_of_the_picture_and_the_next_move_draws(segment, monkeypatch):
    draw = figures.plane

    def refuses(*given, **options):
        raise IGLensError("no plane today")

    monkeypatch.setattr(figures, "plane", refuses)
    segment.bend.value = 0.9
    assert segment.says.value == "cannot be drawn: no plane today" and bytes(segment.picture.value) == b""
    monkeypatch.setattr(figures, "plane", draw)
    segment.bend.value = 0.8
    assert numbers(segment) and bytes(segment.picture.value).startswith(b"\x89PNG")


@pytest.mark.parametrize("given", [{"target": 3}, {"target": -1}, {"target": "a"}])
def test_a_target_that_is_not_there_is_said_in_the_widget(flat, given):
    widget = Segment(flat, START, END, **given)
    assert widget.says.value.startswith("cannot be drawn: targets: expected")
    assert bytes(widget.picture.value) == b""
    plt.close("all")


def test_a_readout_of_another_width_is_said_in_the_widget(read_once):
    widget = Segment(read_once[1], START, END)
    assert "expected a readout of width d = 2" in widget.says.value and bytes(widget.picture.value) == b""
    assert plt.get_fignums() == []


def test_a_segment_that_cannot_be_drawn_leaves_no_figure_open(flat):
    plt.close("all")
    Segment(flat, START, END, target=3)
    assert plt.get_fignums() == []


@pytest.mark.parametrize(
    ("start", "end"),
    [([2.6, 0], [0, 0]), ([0, 0], [0, -3]), ([float("nan"), 0], [0, 0]), ([0, 0, 0], [0, 0]), ([], [])],
)
def test_ends_that_the_sliders_cannot_show_are_refused(flat, start, end):
    with pytest.raises(IGLensError, match=r"Segment: expected two points of two coordinates, −2\.5 … 2\.5, got"):
        Segment(flat, start, end)


def test_the_text_form_of_a_segment_does_not_change_from_run_to_run(flat):
    assert repr(Segment(flat, START, END)) == repr(Segment(flat, START, END)) == "Segment(d = 2)"
