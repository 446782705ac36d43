"""The interactive part without a browser: it redraws from the trace, once a change, and leaves nothing behind."""

import matplotlib.pyplot as plt
import pytest
import tiny
import torch

from iglens_core import IGLensError, Readout, attribute, read
from iglens_lab import figures
from iglens_lab.explorer import TokenLayers


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
