"""The interactive parts without a notebook: they redraw from traces, once a change, and leave nothing behind."""

import base64
import csv
import gc
import io
import itertools
import json
import logging
import random
import re
import shutil
import tracemalloc
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import ipywidgets
import matplotlib.pyplot as plt
import pandas as pd
import pytest
import tiny
import torch

from iglens_core import IGLensError, Readout, attribute, encode, read
from iglens_lab import explorer as module
from iglens_lab import figures, toy
from iglens_lab.explorer import SCALARS, Drops, Explorer, Segment, joined, merged
from iglens_lab.translators import Translators, fingerprint, fit

PROMPT, ANSWER = "the cat sat", " on the mat on the"
ODD = "<img src=x onerror=alert(1)> </script> $$x$$ \\frac 日本 🙂"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def deep(**options):
    """A tiny Llama of six blocks, so that there are layers to leave out."""
    given = {"vocab_size": tiny.WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "num_hidden_layers": 6}
    return tiny.shared("llama", **given, **options)


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    for one in list(Explorer._all):
        one.close()
    assert plt.get_fignums() == []


@pytest.fixture(scope="module")
def model():
    return deep()


@pytest.fixture
def explorer(model):
    return Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, chat=False)


@pytest.fixture(scope="module")
def translators(model):
    torch.manual_seed(0)
    shapes = (6, tiny.D, tiny.D), (6, tiny.D)
    return {
        ridge: Translators(torch.randn(shapes[0]) * 0.1, torch.randn(shapes[1]), fingerprint(model), 0, ridge)
        for ridge in (0.01, 1.0)
    }


def choose(explorer, **values):
    for name, value in values.items():
        getattr(explorer, name).value = value


def rows(explorer, pane=0):
    return explorer.view.data["panes"][pane]["rows"]


def labels(explorer, pane=0):
    return [row["label"] for row in rows(explorer, pane)]


def ask(explorer, message):
    """A message as the browser sends it."""
    explorer.view._handle_custom_msg(message, [])


@contextmanager
def passes(model):
    """Counts the runs of the model."""
    seen = []
    handle = tiny.blocks(model)[0].register_forward_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


@pytest.fixture
def asked(monkeypatch):
    """The rows that a Readout is asked for, one number a call."""
    seen = []
    for name in ("_read", "logits"):
        work = getattr(Readout, name)
        monkeypatch.setattr(
            Readout, name, lambda self, h, *given, _work=work: seen.append(len(h)) or _work(self, h, *given)
        )
    return seen


@pytest.fixture
def drawn(monkeypatch):
    """The explorers that drew, in order."""
    seen, draw = [], Explorer._draw
    monkeypatch.setattr(Explorer, "_draw", lambda self: seen.append(self) or draw(self))
    return seen


def same(one, other):
    """Two attributions of the same, to what float32 gives."""
    assert one.layers == other.layers and one.tokens == other.tokens
    for name in ("positions", "token_ids", "target_ids"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))
    for name in ("levels", "credits", "delta", "model_level"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=2e-5, rtol=1e-5, equal_nan=True)


def shows(explorer, *results):
    """Results and view alike hold these attributions."""
    assert len(explorer.results) == len(explorer.view.data["panes"]) == len(results)
    for pane, (found, expected) in enumerate(zip(explorer.results, results, strict=True)):
        same(found, expected)
        assert explorer.view.data["columns"] == ["base", *map(str, expected.layers)]
        for t, row in enumerate(rows(explorer, pane)):
            assert row["position"] == int(expected.positions[t])
            assert row["label"] == f"{row['position']} → {figures.visible(expected.tokens[t])}"
            for name in ("levels", "credits"):
                assert row[name] == pytest.approx(getattr(expected, name)[t].tolist(), rel=1e-3, abs=3e-5)


def expected(explorer, trace=None, **options):
    """What attribute gives for the trace that the explorer shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one step is rough
        return attribute(explorer._readout, explorer._panes[0].trace if trace is None else trace, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Running the model
# ---------------------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_run_and_run_runs(model):
    explorer = Explorer(model, tiny.tokenizer(), chat=False)
    with passes(model) as seen:
        choose(explorer, prompt="the", answer=" cat", other_prompt="on the", other_answer=" mat", max_new_tokens=3)
        choose(explorer, layers=(2, 4), show="levels", target="the", limit=0.5)
        assert seen == [] and explorer.results == [] and explorer.view.data["panes"] == []
        explorer.button.click()
        assert len(seen) == 2  # the answers are given: one pass each
        explorer.run()
        assert len(seen) == 4
    assert [pane["title"] for pane in explorer.view.data["panes"]] == ["the →  cat", "on the →  mat"]


def test_no_selection_runs_the_model(explorer, model, translators):
    explorer._translators = translators
    with passes(model) as seen:
        choose(explorer, prompt="another", answer=" one", other_answer="more", chat=False, max_new_tokens=2)
        choose(explorer, show="levels", layers=(2, 5), stride=2, single="1, 3", baseline="mean", scalar="logit")
        choose(explorer, path="translated", estimator="midpoint", steps=2, target="the", contrast=" cat", limit=1)
        explorer.view.selected = [[0, 1], [0, 3]]
        ask(explorer, {"top": [0, 3]})
        for kind in module.EXPORTS:
            explorer.export(kind)
        explorer._repr_mimebundle_()
    assert seen == [] and len(explorer.results) == 1


def test_an_example_fills_the_boxes_and_runs_nothing(model, drawn):
    explorer = Explorer(model, tiny.tokenizer(chat=True), PROMPT, answer=ANSWER, other_prompt="the mat")
    drawn.clear()
    for name, values in module.EXAMPLES.items():
        with passes(model) as seen:
            explorer.examples.value = name
        for box in ("prompt", "answer", "other_prompt", "other_answer"):
            assert getattr(explorer, box).value == values.get(box, "")
        assert explorer.chat.value is values["chat"] and seen == [] and drawn == []
    assert len(explorer.results) == 2  # still those of the run


def test_where_there_is_no_chat_template_none_is_used(model):
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER)
    assert explorer.chat.disabled and not explorer.chat.value
    explorer.examples.value = next(name for name, values in module.EXAMPLES.items() if values["chat"])
    assert explorer.chat.value is False
    choose(explorer, prompt=PROMPT, answer=ANSWER, other_prompt="", other_answer="")
    explorer.run()
    assert explorer._panes[0].trace.prompt_length == len(encode(tiny.tokenizer(), PROMPT))


def test_the_chat_template_is_used_where_it_is_ticked(model):
    tokenizer, counted = tiny.tokenizer(chat=True), []
    explorer = Explorer(model, tokenizer, PROMPT, answer=ANSWER)
    assert not explorer.chat.disabled
    for chat in (True, False):
        explorer.chat.value = chat
        explorer.run()
        counted.append(explorer._panes[0].trace.prompt_length)
        assert counted[-1] == read(model, tokenizer, PROMPT, answer=ANSWER, chat=chat).prompt_length
    assert counted[0] > counted[1]


def test_without_an_answer_the_model_speaks(model):
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, max_new_tokens=3)
    trace = read(model, tiny.tokenizer(), PROMPT, max_new_tokens=3)
    assert explorer._panes[0].trace.token_ids.tolist() == trace.token_ids.tolist()
    shows(explorer, attribute(explorer._readout, trace))


def test_a_warning_of_the_run_is_a_note_and_no_error(model, caplog):
    explorer = Explorer(model, tiny.tokenizer(), "the cat", answer="sat", chat=False)
    assert explorer.view.message.startswith("note: ") and "the answer starts with" in explorer.view.message
    assert explorer.error is None and explorer.view.badge["ok"] and rows(explorer)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_warnings_for_programmers_are_no_notes(explorer, monkeypatch):
    work = module.attribute

    def warns(*given, **options):
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        warnings.warn("a plain word", stacklevel=1)
        return work(*given, **options)

    monkeypatch.setattr(module, "attribute", warns)
    explorer.scalar.value = "logit"
    assert explorer.view.message == "note: a plain word"


def test_two_answers_stand_side_by_side_on_one_scale(explorer):
    explorer.other_answer.value = " mat"
    explorer.run()
    traces = [read(explorer._model, tiny.tokenizer(), PROMPT, answer=one, chat=False) for one in (ANSWER, " mat")]
    results = [attribute(explorer._readout, trace) for trace in traces]
    shows(explorer, *results)
    largest = [float(one.credits.abs().max()) for one in results]
    assert explorer.view.data["limit"] == pytest.approx(max(largest)) and largest[0] != pytest.approx(largest[1])
    choose(explorer, answer=" mat", other_answer=ANSWER)
    explorer.run()
    assert explorer.view.data["limit"] == pytest.approx(max(largest))  # whichever side it is on
    explorer.scalar.value = "logit"
    levels = torch.cat([attribute(explorer._readout, trace, scalar="logit").levels.flatten() for trace in traces])
    assert explorer.view.data["range"] == pytest.approx([float(levels.min()), float(levels.max())], rel=1e-4)


def test_the_prompt_beside_it_gets_an_answer_of_its_own(model):
    explorer = Explorer(model, tiny.tokenizer(), "the cat", answer=" sat", other_prompt="the mat", other_answer=" on")
    assert [pane["title"] for pane in explorer.view.data["panes"]] == ["the cat →  sat", "the mat →  on"]
    assert [pane["strip"][-1]["part"] for pane in explorer.view.data["panes"]] == ["answer", "answer"]
    explorer.other_prompt.value = explorer.other_answer.value = ""
    explorer.run()
    assert len(explorer.results) == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": ""}, "prompt: expected a text, got none"),
        ({"prompt": "the cat " * 200}, "this model's context is"),
        ({"other_prompt": "the cat " * 200}, "this model's context is"),
        ({"answer": "", "max_new_tokens": 500}, "this model's context is"),
    ],
)
def test_a_run_that_fails_leaves_the_model_as_it_was_and_the_button_enabled(explorer, model, caplog, values, words):
    choose(explorer, **values)
    with pytest.raises(IGLensError, match=words):
        explorer.run()
    assert words in explorer.view.message and words in str(explorer.error) and words in caplog.text
    assert tiny.hooks(model) == 0 and not explorer.button.disabled
    assert explorer.progress.layout.visibility == "hidden"
    assert explorer.results == [] and explorer.view.badge == {}
    assert all(pane["rows"] == [] for pane in explorer.view.data["panes"])
    choose(explorer, prompt=PROMPT, answer=ANSWER, other_prompt="", max_new_tokens=2)
    explorer.run()
    assert explorer.error is None and explorer.view.message == "" and len(explorer.results) == 1


def test_after_a_failed_run_its_message_stays_and_nothing_of_the_earlier_prompt_is_shown(explorer):
    explorer.prompt.value = "the cat " * 200
    with pytest.raises(IGLensError):
        explorer.run()
    said = explorer.view.message
    choose(explorer, layers=(2, 4), scalar="logit", target="the")  # nothing is there to be drawn
    explorer.view.selected = [[0, 1]]
    explorer.examples.value = "a line of code"
    assert explorer.view.message == said and str(explorer.error) == said
    assert explorer.view.data["panes"] == [] and explorer.results == []


def test_the_progress_bar_counts_the_tokens_of_a_run(model):
    explorer, seen = Explorer(model, tiny.tokenizer(), chat=False), []
    explorer.progress.observe(lambda change: seen.append((change.new, explorer.button.disabled)), "value")
    choose(explorer, prompt=PROMPT, max_new_tokens=4)
    explorer.run()
    made = len(explorer.results[0].tokens)
    assert seen == [(count, True) for count in range(1, made + 2)] and explorer.progress.max == 5


# ---------------------------------------------------------------------------------------------------------------------
# What is shown is what attribute gives
# ---------------------------------------------------------------------------------------------------------------------

LAYERS = (
    ({}, None),
    ({"layers": (2, 4)}, [2, 3, 4, 6]),
    ({"layers": (1, 6), "stride": 2}, [1, 3, 5, 6]),
    ({"single": "2, 5"}, [2, 5, 6]),
    ({"single": "6"}, [6]),
)
CONTRASTS = ("prob", "logit")


@pytest.mark.parametrize("estimator", ["observed", "midpoint", "gauss-legendre"])
@pytest.mark.parametrize("baseline", ["embedding", "mean", "zero"])
def test_every_choice_shows_what_attribute_gives_for_it(explorer, baseline, estimator):
    tokenizer = tiny.tokenizer()
    steps = 1 if estimator == "observed" else 2
    given = {"baseline": baseline, "estimator": estimator, "steps": steps}
    choose(explorer, baseline=baseline, estimator=estimator, steps=2)
    one, two = encode(tokenizer, " cat")[0], encode(tokenizer, " on")[0]
    for controls, layers in LAYERS:
        choose(explorer, **{"contrast": "", "target": "", "layers": (0, 6), "stride": 1, "single": ""} | controls)
        lowest = 1 if baseline == "embedding" else 0
        layers = layers or list(range(lowest, 7))
        for _, scalar in SCALARS:
            explorer.scalar.value = scalar
            shows(explorer, expected(explorer, layers=layers, scalar=scalar, **given))
        choose(explorer, scalar="prob", target="␣cat", contrast="␣on")
        for kind in CONTRASTS:
            explorer.scalar.value = kind
            shows(explorer, expected(explorer, layers=layers, scalar=(kind, one, two), targets=one, **given))


@pytest.mark.parametrize("baseline", ["embedding", "mean", "zero"])
def test_the_translated_path_shows_what_attribute_gives_with_its_translators(model, translators, baseline):
    given = {"answer": ANSWER, "path": "translated", "baseline": baseline, "ridge": 1.0}
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, translators=translators, **given)
    for ridge in (1.0, 0.01):
        explorer.ridge.value = ridge
        for controls, layers in LAYERS[1:]:
            choose(explorer, **{"layers": (0, 6), "stride": 1, "single": ""} | controls)
            shows(explorer, expected(explorer, layers=layers, baseline=baseline, translators=translators[ridge]))
    choose(explorer, path="plain", single="", layers=(2, 6))
    shows(explorer, expected(explorer, layers=range(2, 7), baseline=baseline))


def test_without_translators_of_its_own_the_projects_are_used(explorer, model, monkeypatch):
    text, used = ["the cat sat on the mat and said so. " * 6], []

    def for_model(*given):
        used.append(given[2])
        return fit(*given[:2], text, ridge=given[2], progress=False)

    monkeypatch.setattr(module, "for_model", for_model)
    explorer.path.value = "translated"
    shows(explorer, expected(explorer, translators=fit(model, tiny.tokenizer(), text, ridge=0.01, progress=False)))
    explorer.ridge.value = 1.0
    shows(explorer, expected(explorer, translators=fit(model, tiny.tokenizer(), text, ridge=1.0, progress=False)))
    assert set(used) == {0.01, 1.0}


def test_translators_of_another_model_are_refused_in_words(explorer, translators):
    explorer._translators = {ridge: module.replace(one, model="another") for ridge, one in translators.items()}
    explorer.ridge.value = 0.01
    with pytest.raises(IGLensError, match="fitted on another model"):
        explorer.path.value = "translated"
    assert "fitted on another model" in explorer.view.message and rows(explorer) == []
    explorer.path.value = "plain"
    shows(explorer, expected(explorer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_read_and_checked(dtype):
    model = tiny.cast(deep(), dtype)
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, single="2, 4")
    shows(explorer, expected(explorer, layers=[2, 4, 6]))
    assert explorer.view.badge["ok"], explorer.view.badge
    assert str(dtype).removeprefix("torch.") in explorer.page()
    json.dumps(explorer.view.data, allow_nan=False)


def test_fewer_layers_are_sums_of_all(explorer):
    whole = expected(explorer, baseline="zero")
    for layers in ((6,), (0, 6), (2, 3, 6), (1, 2, 3, 4, 5, 6)):
        same(merged(whole, layers), expected(explorer, baseline="zero", layers=layers))
    assert merged(whole, whole.layers) is whole


def test_joined_rows_keep_their_numbers_and_errors(explorer):
    whole = expected(explorer)
    parts = [expected(explorer, module._part(explorer._panes[0].trace, int(position))) for position in whole.positions]
    once = joined(parts)
    assert once.tokens == whole.tokens and once.layers == whole.layers
    torch.testing.assert_close(once.levels, whole.levels, atol=1e-6, rtol=0)
    assert once.completeness_error == max(part.completeness_error for part in parts)
    assert joined([whole, *parts]).faithfulness_error == whole.faithfulness_error  # parts were not compared: NaN
    assert joined([whole]).check() and joined([*parts, whole]).check()


# ---------------------------------------------------------------------------------------------------------------------
# Work that is not done
# ---------------------------------------------------------------------------------------------------------------------


def test_known_levels_are_not_read_again(explorer, asked):
    explorer.view.selected = [[0, 0], [0, 1], [0, 4]]  # two of the prompt, one of the answer
    choose(explorer, baseline="zero", scalar="logit")
    choose(explorer, baseline="embedding", scalar="prob")
    asked.clear()
    choose(explorer, layers=(2, 5), stride=2)
    explorer.stride.value = 1
    explorer.single.value = "3, 5"
    choose(explorer, single="", show="levels", limit=0.4, steps=9, ridge=1.0)
    choose(explorer, scalar="logit", baseline="zero", layers=(0, 6), show="credits", limit=0)
    explorer.view.selected = [[0, 1]]
    explorer.view.selected = [[0, 1], [0, 3], [0, 0]]
    choose(explorer, scalar="prob", baseline="embedding")
    assert asked == []
    explorer.scalar.value = "entropy"
    assert asked != []


def test_the_mean_of_the_lowest_layer_is_read_once_for_each(explorer, asked):
    choose(explorer, layers=(2, 6), baseline="mean")
    asked.clear()
    choose(explorer, layers=(2, 4), stride=2)
    assert asked == []
    explorer.layers.value = (3, 4)
    assert asked != []
    asked.clear()
    choose(explorer, layers=(2, 6))
    assert asked == []


def test_a_token_more_of_a_long_prompt_costs_its_own_rows_only(asked):
    model = deep(max_position_embeddings=1024)
    prompt = "the cat sat on x mat" * 80
    explorer = Explorer(model, tiny.tokenizer(), prompt, answer=" on", chat=False)
    assert len(explorer.view.data["panes"][0]["strip"]) >= 400
    with passes(model) as seen:
        for count, position in enumerate((5, 300, 17), 1):
            asked.clear()
            explorer.view.selected = [*explorer.view.selected, [0, position]]
            assert sum(asked) <= 6 + 1 + 2  # the path's points, and its two ends apart
            assert len(rows(explorer)) == count + len(explorer._panes[0].trace.tokens)
        asked.clear()
        explorer.view.selected = explorer.view.selected[:2]
        assert asked == [] and seen == []


def test_however_many_tokens_are_selected_only_the_new_one_is_read(asked):
    model = deep(max_position_embeddings=1024)
    explorer = Explorer(model, tiny.tokenizer(), "the cat" * 60, answer=" on", chat=False)
    explorer.target.value = "␣cat"
    explorer.view.selected = [[0, position] for position in range(100)]
    asked.clear()
    explorer.stride.value = 2
    assert asked == []
    explorer.view.selected = [*explorer.view.selected, [0, 100]]
    assert sum(asked) <= 2 * (6 + 1 + 2)  # of the target, and of the token that stands there
    kept = len(explorer._panes[0].known)
    explorer.view.selected = []
    for scalar in ("logit", "log_prob", "entropy") * 3:
        explorer.scalar.value = scalar
    assert kept >= 200 and len(explorer._panes[0].known) <= module.KEPT  # and is given back


# ---------------------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------------------


def test_selected_tokens_of_the_prompt_become_rows(explorer):
    trace = read(explorer._model, tiny.tokenizer(), PROMPT, answer=ANSWER, chat=False, scope="all")
    whole = expected(explorer, trace, layers=[2, 4, 6], baseline="zero", scalar="log_prob")
    choose(explorer, single="2, 4", baseline="zero", scalar="log_prob")
    answer = explorer._panes[0].trace.positions.tolist()
    for selected in ([0], [1, 0], [], answer[1:3], [1, answer[0]]):
        explorer.view.selected = [[0, position] for position in selected]
        wanted = sorted({*selected, *answer})
        assert [row["position"] for row in rows(explorer)] == wanted
        torch.testing.assert_close(explorer.results[0].levels, whole.levels[wanted], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(explorer.results[0].delta, whole.delta[wanted].float(), atol=2e-5, rtol=1e-5)
        assert explorer.results[0].tokens == tuple(trace.tokens[position] for position in wanted)
        assert explorer.view.badge["ok"]


def test_the_strip_names_every_token_and_the_position_that_predicts_it(explorer):
    strip, trace = explorer.view.data["panes"][0]["strip"], explorer._panes[0].trace
    assert [token["position"] for token in strip] == list(range(-1, len(trace.input_ids) - 1))
    assert [token["text"] for token in strip] == [figures.visible(text) for text in trace.input_tokens]
    assert [token["part"] for token in strip] == ["prompt"] * trace.prompt_length + ["answer"] * len(trace.tokens)


def test_repeated_tokens_are_told_apart(explorer):
    assert explorer.results[0].tokens == (" on", " the", " mat", " on", " the")
    assert len(set(labels(explorer))) == 5


def test_selected_rows_are_preset_and_kept_for_the_next_run(model):
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, selected=[1, 3], chat=False)
    positions = explorer._panes[0].trace.positions.tolist()
    assert explorer.view.selected == [[0, positions[1]], [0, positions[3]]]
    explorer.answer.value = " on the"
    explorer.run()
    assert explorer.view.selected == [[0, positions[1]]]  # the fourth token is not there
    explorer.answer.value = " on"
    explorer.run()
    assert explorer.view.selected == [[0, positions[0]]]
    assert Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, selected=2).view.selected == [[0, positions[2]]]


@pytest.mark.parametrize("stale", [[0, -1], [0, 99], [0, 7], [1, 3], [-1, 3], [-1, 0], [7, 0]])
def test_a_stale_selection_shows_no_row(explorer, stale):
    before, count = explorer.view.data, len(explorer._panes[0].trace.input_ids)
    stale = [stale[0], count - 1] if stale == [0, 7] else stale  # the last token predicts none
    explorer.view.selected = [stale]
    assert explorer.view.data == before and explorer.error is None and explorer.view.message == ""
    explorer.view.selected = [[0, 0], stale]
    assert [row["position"] for row in rows(explorer)] == [0, *explorer._panes[0].trace.positions.tolist()]


def test_a_stale_selection_is_in_no_figure(explorer):
    explorer.view.selected = [[0, 0], [0, -1], [0, 99], [1, 3], [-1, 3], [7, 0]]
    figure = explorer.figure()
    charts = [ax for ax in figure.axes if ax.get_legend()]
    assert [ax.get_title() for ax in charts] == [labels(explorer)[0]]
    plt.close(figure)


def test_what_was_noted_of_a_choice_stays_while_its_rows_are_selected(explorer):
    explorer.target.value = "zebra"
    note = explorer.view.message
    assert note.startswith("note: ")
    for position in explorer._panes[0].trace.positions.tolist():
        explorer.view.selected = [[0, position]]
        assert explorer.view.message == note
    explorer.view.selected = [[0, 0]]  # this one draws
    assert explorer.view.message == note


@pytest.mark.parametrize(
    ("typed", "meant"), [(" cat", " cat"), ("␣cat", " cat"), ("cat", "cat"), ("␣the", " the"), ("</s>", "</s>")]
)
def test_a_target_is_typed_as_text(explorer, typed, meant):
    explorer.target.value = typed
    (token,) = encode(tiny.tokenizer(), meant)
    shows(explorer, expected(explorer, targets=token))
    own = expected(explorer)
    for t, row in enumerate(rows(explorer)):
        assert row["own"]["levels"] == pytest.approx(own.levels[t].tolist(), rel=1e-3, abs=1e-5)
        assert row["own"]["label"].endswith(figures.visible(own.tokens[t]))
    explorer.target.value = ""
    assert all(row["own"] is None for row in rows(explorer))


def test_a_target_is_typed_as_an_id(explorer):
    for typed in ("id 42", "  id 42 "):
        explorer.target.value = typed
        shows(explorer, expected(explorer, targets=42))
        assert explorer.view.message == ""


def test_a_target_of_several_tokens_stands_for_its_first_and_says_so_once(explorer):
    explorer.view.selected = [[0, 0], [0, 1], [0, 2]]
    choose(explorer, target="zebra", contrast=" catty")
    ids = [encode(tiny.tokenizer(), text)[0] for text in ("zebra", " catty")]
    assert explorer.results[0].scalar == ("prob", *ids)
    notes = explorer.view.message.splitlines()
    assert len(notes) == 2 and "'zebra' is 5 tokens; its first, z, is taken" in notes[0] and "␣cat" in notes[1]


def test_a_target_without_its_space_is_noted(explorer):
    explorer.target.value = "cat"
    assert "type ␣cat" in explorer.view.message and explorer.error is None
    explorer.target.value = "␣cat"
    assert explorer.view.message == ""


@pytest.mark.parametrize("typed", ["id 273", "id 99999", "id 99999999999999999999999"])
@pytest.mark.parametrize("control", ["target", "contrast"])
def test_an_unknown_id_is_said_raised_and_logged_and_the_next_choice_draws(explorer, caplog, control, typed):
    explorer.target.value = "␣the"
    caplog.clear()
    with pytest.raises(IGLensError, match="expected"):
        choose(explorer, **{control: typed})
    assert "expected" in explorer.view.message and typed[3:12] in explorer.view.message
    assert isinstance(explorer.error, IGLensError) and explorer.results == []
    assert rows(explorer) == [] and explorer.view.badge == {}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info[1] is explorer.error
    choose(explorer, **{control: "␣cat"})
    assert explorer.error is None and explorer.view.message == "" and len(rows(explorer)) == 5
    assert explorer.view.badge["ok"]


def test_a_contrast_needs_a_target_and_a_scalar_that_has_one(explorer):
    with pytest.raises(IGLensError, match="minus: expected a target to take it from"):
        explorer.contrast.value = "␣cat"
    explorer.target.value = "␣on"
    assert explorer.error is None and explorer.results[0].scalar[0] == "prob"
    for scalar in ("entropy", "log_prob"):
        with pytest.raises(IGLensError, match="probability or logit"):
            explorer.scalar.value = scalar
    explorer.scalar.value = "logit"
    assert explorer.error is None and explorer.results[0].scalar[0] == "logit"


@pytest.mark.parametrize("values", [{"contrast": "␣cat"}, {"scalar": "entropy"}])
def test_what_is_the_same_for_every_target_has_no_second_line(explorer, values):
    choose(explorer, target="␣the", **values)
    assert all(row["own"] is None for row in rows(explorer))


@pytest.mark.parametrize(
    ("typed", "words"),
    [("x", "single: expected layers such as"), ("1, 9", "layers of 1 … 6"), ("0", "layers of 1 … 6"), ("-1", "of 1")],
)
def test_layers_that_are_not_there_are_said(explorer, typed, words):
    with pytest.raises(IGLensError, match=words):
        explorer.single.value = typed
    assert words in explorer.view.message and rows(explorer) == []
    explorer.single.value = " 3 5,1 "
    assert explorer.results[0].layers == (1, 3, 5, 6) and explorer.view.message == ""


# ---------------------------------------------------------------------------------------------------------------------
# Badge, colours, words
# ---------------------------------------------------------------------------------------------------------------------


def test_the_badge_is_green_for_observed_credits_and_red_for_a_rough_sum(model):
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, max_new_tokens=4, baseline="zero", single="6")
    assert explorer.view.badge["ok"] and explorer.view.badge["text"].startswith("✓ checked · sum off by ")
    choose(explorer, steps=1, estimator="midpoint")
    error = explorer.results[0].completeness_error
    assert error > 1e-2
    assert explorer.view.badge["ok"] is False and explorer.view.badge["text"].startswith("✗ the credits do not sum")
    assert f"sum off by {error:.0e}".replace("e-", "e−") in explorer.view.badge["text"]
    assert "more steps may help" in explorer.view.message and explorer.error is None
    explorer.estimator.value = "observed"
    assert explorer.view.badge["ok"]


def test_one_bad_prompt_of_two_makes_the_badge_red(explorer, monkeypatch):
    explorer.other_answer.value = " mat"
    work, wrong = module.attribute, []

    def tampered(readout, trace, **options):
        made = work(readout, trace, **options)
        if trace.tokens == (" mat",):
            wrong.append(1)
            return module.replace(made, levels=made.levels + 0.3)
        return made

    monkeypatch.setattr(module, "attribute", tampered)
    explorer.run()
    assert wrong and explorer.view.badge["ok"] is False
    text = explorer.view.badge["text"]
    assert text.startswith("✗ the readout is not the model's own") and text.endswith("model's own logits by 3e−01")


def test_a_readout_that_is_not_the_models_is_refused(explorer, monkeypatch):
    work = Readout._read
    monkeypatch.setattr(Readout, "_read", lambda self, h, ids, *given: work(self, h * 1.5 + 1, ids, *given))
    with pytest.raises(IGLensError, match="off the model's own"):
        explorer.scalar.value = "logit"
    assert "off the model's own" in explorer.view.message and rows(explorer) == [] and explorer.view.badge == {}


def test_the_colours_range_is_preset_and_changed(model):
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, limit=0.25)
    assert explorer.view.data["limit"] == 0.25 and explorer.view.data["range"] == [0, 1]
    figure = explorer.figure()
    assert figure.axes[0].collections[0].get_clim() == (-0.25, 0.25)
    plt.close(figure)
    explorer.limit.value = 0
    assert explorer.view.data["limit"] == pytest.approx(float(explorer.results[0].credits.abs().max()))


def test_levels_that_are_all_equal_have_a_range_and_a_limit(model):
    flat = tiny.cast(model, torch.float32)
    with torch.no_grad():
        flat.lm_head.weight.zero_()
    explorer = Explorer(flat, tiny.tokenizer(), PROMPT, answer=ANSWER, scalar="logit")
    assert explorer.view.data["limit"] == 1 and explorer.view.data["range"] == [0, 1]
    assert all("No layer moves it." in row["words"] and row["onset"] == -1 for row in rows(explorer))
    json.dumps(explorer.view.data, allow_nan=False)
    explorer.export("PNG")


@pytest.mark.parametrize("name", ["levels", "credits"])
def test_what_is_not_finite_is_said_and_not_sent(explorer, monkeypatch, name):
    work = module.attribute

    def overflows(*given, **options):
        made = work(*given, **options)
        return module.replace(made, **{name: getattr(made, name) * torch.inf})

    monkeypatch.setattr(module, "attribute", overflows)
    with pytest.raises(IGLensError, match="logit is not finite on this path; choose another scalar, path or baseline"):
        explorer.scalar.value = "logit"
    assert rows(explorer) == [] and explorer.view.message.startswith("logit is not finite")
    explorer.scalar.value = "prob"
    assert len(rows(explorer)) == 5


def test_a_next_token_without_a_probability_is_left_out(explorer, monkeypatch):
    work = Readout.topk
    monkeypatch.setattr(Readout, "topk", lambda self, h, k: (work(self, h, k)[0] * torch.nan, work(self, h, k)[1]))
    ask(explorer, {"top": [0, rows(explorer)[0]["position"]]})
    assert list(explorer.view.top.values()) == [{str(layer): [] for layer in range(7)}]


def test_translators_that_are_not_finite_are_said(model, translators):
    broken = {1.0: module.replace(translators[1.0], shifts=translators[1.0].shifts * torch.nan)}
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, translators=broken)
    with pytest.raises(IGLensError, match="expected finite"):
        explorer.path.value = "translated"
    assert rows(explorer) == [] and "finite" in explorer.view.message


def test_words_say_no_infinite_number(explorer):
    result = explorer.results[0]
    still = module.replace(result, delta=result.delta * 0)
    assert "|Δ|: ∞, it goes up and down" in module._words(still, 0)
    nearly = module.replace(result, delta=result.delta * 0 + 1e-9)
    assert re.search(r"\|Δ\|: \de\+\d\d, it goes up and down", module._words(nearly, 0))
    nothing = module.replace(still, credits=result.credits * 0)
    assert module._words(nothing, 0).endswith("No layer moves it.")


def test_words_say_level_change_and_onset(explorer):
    result = explorer.results[0]
    for t, row in enumerate(rows(explorer)):
        delta, ends = float(result.delta[t]), [float(result.levels[t, j]) for j in (0, -1)]
        assert row["words"].startswith(f"Δ = {module._number(delta, '+')}: p goes from {module._number(ends[0])} to ")
        assert f"layer {int(result.onset()[t])}." in row["words"]
        assert result.layers[row["onset"] - 1] == int(result.onset()[t])


# ---------------------------------------------------------------------------------------------------------------------
# What the lens reads
# ---------------------------------------------------------------------------------------------------------------------


def best(explorer, states):
    p, ids = explorer._readout.topk(states, module.TOP)
    texts = [[figures.visible(module.token_text(tiny.tokenizer(), i)) for i in row] for row in ids.tolist()]
    return {
        str(layer): [
            [text, pytest.approx(one, abs=6e-4)] for text, one in zip(texts[layer], p[layer].tolist(), strict=True)
        ]
        for layer in range(len(states))
    }


def test_the_most_probable_tokens_are_those_of_the_readout(model, translators):
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, translators=translators, ridge=0.01)
    stream, positions = explorer._panes[0].trace.stream, explorer._panes[0].trace.positions.tolist()
    ask(explorer, {"top": [0, positions[1]]})
    ask(explorer, {"top": [0, positions[2]]})
    assert explorer.view.top == {f"0:{one}": best(explorer, stream[:, one]) for one in positions[1:3]}
    explorer.path.value = "translated"
    assert explorer.view.top == {}  # they were read on another path
    ask(explorer, {"top": [0, positions[1]]})
    moved = translators[0.01](stream[:, [positions[1]]], range(7))[:, 0]
    assert explorer.view.top == {f"0:{positions[1]}": best(explorer, moved)}
    explorer.ridge.value = 1.0
    assert explorer.view.top == {}
    ask(explorer, {"top": [0, positions[1]]})
    explorer.scalar.value = "logit"  # reads no other path
    assert len(explorer.view.top) == 1
    explorer.run()
    assert explorer.view.top == {}


@pytest.mark.parametrize("message", [{"top": [1, 4]}, {"top": [0, 99]}, {"top": [0, 0]}, {"top": [7, 0]}])
def test_a_question_about_an_earlier_prompt_is_ignored(explorer, message, asked):
    explorer.target.value = "zebra"
    said = explorer.view.message
    asked.clear()
    ask(explorer, message)
    assert explorer.view.top == {} and asked == [] and explorer.error is None and explorer.view.message == said


def test_a_question_after_an_error_is_ignored_and_the_error_stays(explorer):
    with pytest.raises(IGLensError):
        explorer.target.value = "id 9999"
    said = explorer.view.message
    ask(explorer, {"top": [0, int(explorer._panes[0].trace.positions[0])]})
    assert explorer.view.top == {} and explorer.view.message == said and str(explorer.error) == said


# ---------------------------------------------------------------------------------------------------------------------
# Presets
# ---------------------------------------------------------------------------------------------------------------------


def test_every_preset_arrives_at_its_control(model, translators):
    given = {
        "prompt": PROMPT, "answer": ANSWER, "other_prompt": "the mat", "other_answer": " sat", "chat": False,
        "max_new_tokens": 3, "show": "levels", "layers": [1, 5], "stride": 2, "path": "translated", "ridge": 1.0,
        "baseline": "zero", "estimator": "gauss-legendre", "steps": 3, "scalar": "logit", "target": "␣the",
        "contrast": "␣cat", "limit": 0.5,
    }  # fmt: skip
    explorer = Explorer(model, tiny.tokenizer(), translators=translators, **given)
    for name, value in given.items():
        assert getattr(explorer, name).value == (tuple(value) if isinstance(value, list) else value)
    assert len(explorer.results) == 2 and explorer.results[0].layers == (1, 3, 5, 6)
    assert set(given) | {"single"} == set(module.PRESETTABLE)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"colour": 1}, "expected presets of prompt, answer, .*limit, got 'colour'"),
        ({"view": 1}, "expected presets of"),
        ({"selected": "ab"}, "expected rows of the answer, from 0, as selected, got 'ab'"),
        ({"selected": [-1]}, "expected rows of the answer"),
        ({"selected": [True]}, "expected rows of the answer"),
        ({"prompt": 5}, "prompt: expected a text, got 5"),
        ({"prompt": None}, "prompt: expected a text, got None"),
        ({"single": 4}, "single: expected a text, got 4"),
        ({"chat": "yes"}, "chat: expected True or False, got 'yes'"),
        ({"chat": True}, "chat=True: this tokenizer has no chat template; pass chat=False"),
        ({"show": "both"}, "show: expected one of credits, levels, got 'both'"),
        ({"baseline": None}, "baseline: expected one of embedding, mean, zero, got None"),
        ({"scalar": "logits"}, "scalar: expected one of prob, log_prob, logit, entropy, got 'logits'"),
        ({"ridge": 0.5}, "ridge: expected one of 0.0001, 0.01, 0.1, 1.0, got 0.5"),
        ({"layers": (5, 2)}, r"layers: expected two numbers of 0 … 6, the lower first, got \(5, 2\)"),
        ({"layers": (0, 9)}, "layers: expected two numbers of 0 … 6"),
        ({"layers": 3}, "layers: expected two numbers of 0 … 6"),
        ({"stride": 0}, "stride: expected a number of 1 … 6, got 0"),
        ({"stride": "x"}, "stride: expected a number of 1 … 6, got 'x'"),
        ({"steps": 1.5}, "steps: expected a number of 1 … 256, got 1.5"),
        ({"max_new_tokens": 513}, "max_new_tokens: expected a number of 1 … 512, got 513"),
        ({"limit": -1}, "limit: expected a number of 0 … "),
        ({"limit": float("nan")}, "limit: expected a number of 0 … "),
        ({"translators": {}}, "expected translators by their ridge, a dict, got {}"),
        ({"translators": [1]}, "expected translators by their ridge"),
    ],
)
def test_presets_that_do_not_fit_are_refused_with_what_is_expected(model, given, words):
    with pytest.raises(IGLensError, match=f"Explorer: {words}"):
        Explorer(model, tiny.tokenizer(), **given)


def test_a_preset_that_cannot_be_shown_fails_at_once(model):
    with pytest.raises(IGLensError, match="targets: expected ids"):
        Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, target="id 9999")


# ---------------------------------------------------------------------------------------------------------------------
# Taking it away
# ---------------------------------------------------------------------------------------------------------------------


def test_the_table_holds_what_is_shown(explorer):
    choose(explorer, single="2, 4", other_answer=" mat")
    explorer.run()
    frame = pd.read_csv(io.BytesIO(explorer.export("CSV")), keep_default_na=False)
    assert frame.columns[0] == "prompt" and set(frame.layer) == {2, 4, 6}
    for (title, position), part in frame.groupby(["prompt", "position"]):
        pane = [one.title for one in explorer._panes].index(title)
        result = explorer.results[pane]
        row = result.positions.tolist().index(position)
        assert part.credit.sum() == pytest.approx(float(result.delta[row]), abs=1e-5)
        assert set(part.token) == {result.tokens[row]}
    assert len(frame) == 3 * (5 + 1)


def test_any_text_survives_in_the_table(model):
    explorer = Explorer(model, tiny.tokenizer(), ODD, answer=' "on",\n\r the\t=1 é')
    reader = list(csv.DictReader(io.StringIO(explorer.export("CSV").decode(), newline="")))
    assert {row["prompt"] for row in reader} == {explorer._panes[0].title}
    assert [row["token"] for row in reader[::6]] == list(explorer.results[0].tokens)
    assert explorer._panes[0].title.startswith(ODD)


def state_of(page):
    """The state that a page holds, as JSON."""
    return re.search(r"^const state = (\{.*\}), listening = \{\};$", page, re.MULTILINE)[1]


@pytest.mark.parametrize(
    "prompt", [ODD, "<img src=x onerror=alert(1)>", "</script><b>", "$$x", "日本 🙂", "<!--", "\u2028{}"]
)
def test_a_page_holds_any_text_as_data(model, prompt):
    explorer = Explorer(model, tiny.tokenizer(), prompt, answer=f" on {prompt}", chat=False, single="3")
    page = explorer.export("HTML").decode()
    state = state_of(page)
    assert "<" not in state
    found = json.loads(state)
    assert found["data"] == explorer.view.data and found["live"] is False
    assert found["badge"] == explorer.view.badge and found["selected"] == explorer.view.selected
    assert found["data"]["panes"][0]["title"].startswith(figures.visible(prompt).replace("␣", " "))
    assert page.count("<script") == page.count("</script") == 1
    assert set(re.findall(r"\w+://[^\s\"'`]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_page_holds_the_tokens_that_the_lens_reads(explorer):
    explorer.view.selected = [[0, 0]]
    stream = explorer._panes[0].trace.stream
    top = json.loads(state_of(explorer.page()))["top"]
    assert set(top) == {f"0:{row['position']}" for row in rows(explorer)}
    assert top["0:0"] == best(explorer, stream[:, 0])
    assert explorer.view.top == {}


@pytest.mark.parametrize("show", ["credits", "levels"])
def test_pictures_are_exported_and_no_figure_stays_open(explorer, show):
    plt.close("all")
    choose(explorer, show=show, other_answer=" mat")
    explorer.run()
    explorer.view.selected = [[0, 0], [0, 3], [1, 2]]
    assert explorer.export("PNG").startswith(b"\x89PNG")
    svg = explorer.export("SVG").decode()
    assert svg.startswith("<?xml") and "<svg" in svg and "<script" not in svg
    assert plt.get_fignums() == []


def test_a_picture_that_would_be_too_large_has_fewer_dots(explorer, monkeypatch):
    tall = plt.figure(figsize=(2, 1000))
    monkeypatch.setattr(explorer, "figure", lambda: tall)
    assert explorer.export("PNG").startswith(b"\x89PNG")


def test_an_export_that_fails_is_said_and_leaves_the_map(explorer, monkeypatch):
    def fails(*given, **options):
        raise MemoryError("no room")

    before = explorer.view.data
    monkeypatch.setattr(figures, "explored", fails)
    explorer.exports[0].click()  # ipywidgets logs what a button's callback raises
    assert explorer.view.message == "MemoryError: no room" and explorer.view.data == before
    assert isinstance(explorer.error, MemoryError) and len(explorer.results) == 1
    explorer.show.value = "levels"
    assert explorer.error is None and explorer.view.message == ""


def test_every_download_sends_one_file(explorer, monkeypatch):
    sent = []
    monkeypatch.setattr(explorer.view, "send", lambda message, buffers: sent.append((message, buffers)))
    explorer.target.value = "zebra"
    note = explorer.view.message
    for button in explorer.exports:
        button.click()
    assert [message["download"] for message, _ in sent] == [f"iglens.{kind}" for kind in ("svg", "png", "csv", "html")]
    assert [message["type"] for message, _ in sent] == list(module.EXPORTS.values())
    assert all(len(buffers) == 1 and buffers[0] for _, buffers in sent)
    assert explorer.view.message == note  # they leave it standing


def test_before_a_run_there_is_nothing_to_take_away(model):
    explorer = Explorer(model, tiny.tokenizer())
    for button in explorer.exports:
        explorer.error = None
        button.click()
        assert explorer.view.message == str(explorer.error) == "nothing is shown yet: type a prompt and press Run"
        with pytest.raises(IGLensError, match="nothing is shown yet"):
            explorer.export(button.description)
    assert "image/png" not in explorer._repr_mimebundle_()


def test_an_unknown_kind_of_file_is_refused(explorer):
    with pytest.raises(IGLensError, match="expected one of SVG, PNG, CSV, HTML, got 'PDF'"):
        explorer.export("PDF")


def test_where_widgets_do_not_run_there_is_a_picture(explorer):
    bundle = explorer._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.model_id
    assert plt.get_fignums() == []


def test_its_text_form_does_not_change_from_run_to_run(model):
    one, two = (Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER) for _ in range(2))
    assert repr(one) == repr(two) == "Explorer(prompts=1, layers=6)" and repr(one.view) == repr(two.view) == "View()"


# ---------------------------------------------------------------------------------------------------------------------
# Staying one, staying small, failing in the open
# ---------------------------------------------------------------------------------------------------------------------


def other(control):
    """Another value that the control takes."""
    if control.description in ("target", "minus", "or single"):
        return {"target": "␣the", "minus": "␣cat", "or single": "2"}[control.description]
    if hasattr(control, "options"):
        values = [one[1] if isinstance(one, tuple) else one for one in control.options]
        return next(value for value in values if value != control.value)
    return (2, 4) if isinstance(control.value, tuple) else 2


def test_every_control_draws_once_and_only_its_own_explorer(model, translators, drawn):
    made = [Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER, translators=translators) for _ in range(3)]
    for explorer in made[::-1]:
        for control in (*explorer._selecting, explorer.button):
            drawn.clear()
            if control is explorer.scalar:
                control.value = "logit"
            elif control is explorer.button:
                control.click()
            else:
                control.value = other(control)
            assert drawn == [explorer], control.description
        drawn.clear()
        explorer.view.selected = [[0, 0]]
        assert drawn == [explorer]
        explorer.view.selected = [[0, 0], [0, 3]]  # a row that is there: the browser marks it
        assert drawn == [explorer]


def cell(monkeypatch, name, run):
    parent = {"metadata": {"cellId": name} if name else {}, "header": {"msg_id": run}}
    monkeypatch.setattr(module, "get_ipython", lambda: SimpleNamespace(get_parent=lambda: parent))


def open_widgets():
    gc.collect()
    return len(ipywidgets.widgets.widget._instances)


def test_a_cell_that_is_run_again_takes_the_place_of_its_earlier_explorer(model, monkeypatch):
    build = lambda: Explorer(model, tiny.tokenizer(), PROMPT, answer=ANSWER)  # noqa: E731
    before = open_widgets()
    cell(monkeypatch, "a", 1)
    first, beside = build(), build()  # two of one cell
    count = (open_widgets() - before) // 2
    cell(monkeypatch, "b", 2)
    elsewhere = build()
    assert open_widgets() == before + 3 * count
    cell(monkeypatch, "a", 3)
    again = build()
    assert open_widgets() == before + 2 * count
    assert first.comm is None and beside.view.comm is None and first._panes == [] and first.results == []
    assert elsewhere.comm is not None and len(elsewhere.results) == 1
    assert Explorer._all == [elsewhere, again]
    elsewhere.show.value = "levels"
    assert elsewhere.view.data["mode"] == "levels"
    for one in (elsewhere, again):
        one.close()
        one.close()  # twice does no harm
    assert open_widgets() == before and Explorer._all == []


def test_where_cells_have_no_name_every_explorer_stays(model, monkeypatch):
    for run in (1, 2):
        cell(monkeypatch, None, run)
        Explorer(model, tiny.tokenizer())
    assert len(Explorer._all) == 2


def wander(explorer, seed, count):
    """Random choices of every kind; those that cannot be shown fail in words."""
    chance, n = random.Random(seed), explorer._readout.n  # noqa: S311
    choices = {
        "show": ["credits", "levels"], "stride": [1, 2, 3], "single": ["", "", "2, 4", "9", "x"],
        "path": ["plain", "translated"],
        "ridge": [0.01, 1.0], "baseline": ["embedding", "mean", "zero"], "steps": [1, 2], "limit": [0, 0.5],
        "estimator": ["observed", "observed", "midpoint", "gauss-legendre"], "scalar": [kind for _, kind in SCALARS],
        "target": ["", "", "␣the", "zebra", "id 7", "id 999"], "contrast": ["", "", "", "␣cat", "id 5000"],
        "prompt": [PROMPT, "the mat", "x" * 300], "answer": [ANSWER, " sat", ""], "other_answer": ["", " cat"],
    }  # fmt: skip
    for _ in range(count):
        kind = chance.choice([*choices, "layers", "selected", "selected", "top", "run"])
        try:
            if kind == "layers":
                explorer.layers.value = sorted(chance.sample(range(n + 1), 2))
            elif kind == "selected":
                explorer.view.selected = [[chance.randrange(-1, 3), chance.randrange(-2, 12)] for _ in range(3)]
            elif kind == "top":
                ask(explorer, {"top": [chance.randrange(3), chance.randrange(12)]})
            elif kind == "run":
                explorer.run()
            else:
                choose(explorer, **{kind: chance.choice(choices[kind])})
        except IGLensError:
            assert str(explorer.error) == explorer.view.message
        data = explorer.view.data
        assert len(data["panes"]) == len(explorer._panes)
        assert bool(explorer.results) != bool(explorer.view.message and not explorer.view.message.startswith("note: "))
        json.dumps([data, explorer.view.badge, explorer.view.top], allow_nan=False)


def test_hundreds_of_choices_leave_widgets_caches_and_memory_flat(model, translators, caplog):
    caplog.set_level(logging.CRITICAL + 1, "iglens_lab.explorer")
    given = {"answer": ANSWER, "max_new_tokens": 3, "chat": False}
    explorer = Explorer(model, tiny.tokenizer(), PROMPT, translators=translators, **given)
    wander(explorer, 0, 100)
    before = open_widgets()
    tracemalloc.start()
    try:
        wander(explorer, 1, 100)
        gc.collect()
        start = tracemalloc.get_traced_memory()[0]
        wander(explorer, 2, 200)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert open_widgets() == before and grown < 2_000_000
    assert all(len(pane.known) <= module.KEPT + 2 * len(explorer.view.selected) for pane in explorer._panes)
    assert tiny.hooks(model) == 0 and plt.get_fignums() == []


@pytest.mark.parametrize("kind", [ZeroDivisionError, RuntimeError, KeyError, KeyboardInterrupt])
def test_whatever_goes_wrong_is_said_logged_kept_and_raised(explorer, monkeypatch, caplog, kind):
    def fails(*given):
        raise kind("on purpose")

    monkeypatch.setattr(figures, "level_range", fails)
    with pytest.raises(kind):
        explorer.show.value = "levels"
    assert type(explorer.error) is kind and explorer.results == [] and rows(explorer) == []
    assert explorer.view.message.startswith(f"{kind.__name__}: ") and "on purpose" in explorer.view.message
    assert caplog.records[-1].exc_info[1] is explorer.error
    monkeypatch.undo()
    explorer.show.value = "credits"
    assert explorer.error is None and explorer.view.message == "" and len(rows(explorer)) == 5


def test_an_interrupted_run_leaves_nothing_of_the_earlier_prompt(explorer, model):
    def stop(*given):
        raise KeyboardInterrupt

    handle = tiny.blocks(model)[2].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        explorer.button.click()
    handle.remove()
    assert explorer.view.data["panes"] == [] and "KeyboardInterrupt" in explorer.view.message
    assert tiny.hooks(model) == 0 and not explorer.button.disabled
    explorer.button.click()
    assert len(explorer.results) == 1


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


def test_the_default_model_is_explored(smol):
    model, tokenizer, _ = smol
    given = {"answer": " Paris, café é 🙂", "chat": False, "single": "10, 20", "max_new_tokens": 4}
    explorer = Explorer(model, tokenizer, "The capital of France is", **given)
    assert not explorer.chat.disabled and explorer.view.badge["ok"]
    trace = explorer._panes[0].trace
    same(explorer.results[0], attribute(explorer._readout, trace, layers=[10, 20, 30]))
    frame = pd.read_csv(io.BytesIO(explorer.export("CSV")), keep_default_na=False)
    assert list(frame.token[::3]) == list(trace.tokens) and any("é" in token for token in trace.tokens)
    top = json.loads(state_of(explorer.page()))["top"]
    assert top["0:4"]["30"][0][0] == "␣Paris"


# ---------------------------------------------------------------------------------------------------------------------
# The browser's half, in a browser where there is one, with a model of our own in place of the kernel's
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def shown(chromium):
    """shown(explorer): its view as in a notebook; what it sends is in `sent`, what goes wrong fails the test."""
    page, wrong = chromium.new_page(viewport={"width": 900, "height": 700}), []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append("a prompt was run as HTML"))

    def show(explorer):
        listening = "window.model = model; window.sent = []; model.send = (one) => sent.push(one); render("
        text = explorer.page().replace('"live": false', '"live": true').replace('"top": {', '"top": {}, "_": {')
        page.set_content(text.replace("\nrender(", "\n" + listening))
        page.locator("svg.map").first.wait_for()
        return page

    yield show
    odd = "(node) => [...node.attributes].some((one) => /NaN|undefined|Infinity/.test(one.value))"
    assert page.evaluate(f"[...document.querySelectorAll('#view *')].filter({odd}).map((node) => node.outerHTML)") == []
    page.close()
    assert wrong == []


def give(page, **traits):
    """What the kernel would set."""
    page.evaluate("(traits) => { for (const name in traits) model.set(name, traits[name]); }", traits)


def test_a_pinned_cell_keeps_its_layer_and_goes_with_it(explorer, shown):
    explorer.view.selected = [[0, 3]]
    page, whole = shown(explorer), explorer.view.data
    page.locator("[data-cell='3,4']").click()
    pinned = page.locator(".pinned")
    assert "layer 4\n" in pinned.inner_text()
    said = pinned.inner_text()
    explorer.single.value = "4, 5"
    give(page, data=explorer.view.data)
    assert "layer 4\n" in pinned.inner_text()
    explorer.single.value = "5"
    give(page, data=explorer.view.data)  # no layer 4, and not as many columns
    assert pinned.inner_text() == "" and page.locator("[data-cell]").count() == 2 * 5
    give(page, data=whole)
    assert pinned.inner_text() == said


def test_what_the_lens_reads_is_asked_for_again_where_it_got_no_answer(explorer, shown):
    page, where = shown(explorer), "[data-cell='3,4']"
    for count in (1, 2):
        page.mouse.move(0, 0)
        page.locator(where).hover()
        page.locator("[data-cell='3,5']").hover()
        assert page.evaluate("sent") == [{"top": [0, 3]}] * count
        assert page.locator(".tip").inner_text().endswith("the lens reads  …")
        give(page, data={**explorer.view.data, "limit": count})


@pytest.mark.parametrize("baseline", ["embedding", "zero"])
def test_at_the_embedding_the_lens_reads_layer_0(explorer, shown, baseline):
    choose(explorer, show="levels", baseline=baseline)
    page = shown(explorer)
    ask(explorer, {"top": [0, 3]})
    give(page, top=explorer.view.top)
    page.locator("[data-cell='3,base']").hover()
    said = page.locator(".tip").inner_text()
    best = explorer.view.top["0:3"]["0"][0]
    assert (f"the lens reads  {best[0]} {best[1]:.2f}" in said) == (baseline == "embedding") and "baseline" in said


def test_the_strip_stays_where_the_reader_left_it(shown):
    explorer = Explorer(
        deep(max_position_embeddings=1024), tiny.tokenizer(), "the cat sat on a mat " * 60, answer=" on", chat=False
    )
    page = shown(explorer)
    strip = page.locator(".strip")
    end = strip.evaluate("(one) => one.scrollTop")
    assert end > 0  # at first, at the answer
    strip.evaluate("(one) => one.scrollTop = 0")
    page.locator(".strip button").nth(3).click()
    explorer.view.selected = page.evaluate("model.get('selected')")
    give(page, data=explorer.view.data)
    assert strip.evaluate("(one) => one.scrollTop") == 0
    assert page.evaluate("document.activeElement.dataset.position") == "2"
    explorer.prompt.value = "on " + explorer.prompt.value
    explorer.run()
    give(page, data=explorer.view.data)
    assert strip.evaluate("(one) => one.scrollTop") > 0


def test_flat_and_extreme_levels_are_drawn(explorer, shown):
    page, data = shown(explorer), explorer.view.data
    for value, mode in itertools.product((0, 1e-30, -3e30), ("credits", "levels")):
        row = {**rows(explorer)[0], "levels": [value] * 7, "credits": [0] * 5 + [value], "onset": -1}
        pane = {**data["panes"][0], "rows": [row]}
        low, high = min(value, 0), max(value, 0)
        given = {"panes": [pane], "limit": abs(value) or 1, "range": [low, high if high > low else low + 1]}
        give(page, data={**data, **given, "mode": mode}, selected=[[0, row["position"]]])
        assert page.locator(".chart").count() == 1 and page.locator("svg.map").count() == 1


def test_the_browser_shows_text_as_text_and_stale_selections_as_nothing(model, shown):
    explorer = Explorer(model, tiny.tokenizer(), ODD, answer=" on <b>", chat=False)
    page = shown(explorer)
    give(page, selected=[[0, 999], [3, 1], [-1, 0]], message=f"note: {ODD}", badge={"text": ODD, "ok": False})
    assert page.locator(".chart").count() == 0
    assert page.locator("#view img, #view b, #view script").count() == 0
    assert "<img src=x onerror=alert(1)> </script> $$x$$" in page.locator(".title").first.inner_text()
    assert "onerror" in page.locator("[role=alert]").inner_text()
    give(page, data={"columns": [], "panes": []})
    assert page.locator("svg").count() == 0


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


def test_a_readout_of_another_width_is_said_in_the_widget(model):
    widget = Segment(Readout(model), START, END)
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


# ---------------------------------------------------------------------------------------------------------------------
# Drops: credits and ablations of a prompt
# ---------------------------------------------------------------------------------------------------------------------

MEASURED = pd.DataFrame(
    [
        {"prompt": prompt, "token": token, "p": 0.5, "layer": layer, "credit": layer, "level": layer, "skip_last": drop}
        for prompt, token, drops in ((3, " a", (0.1, 0.4, 0.2, 0.3)), (8, "<b>$x$", (0.3, 0.2, 0.1, 0.9)))
        for layer, drop in enumerate(drops, 1)
    ]
)  # fmt: skip
MEASURED["skip_all"] = 1
ASKED = {3: "the cat", 8: "<img src=x onerror=alert(1)> $$x$$"}


def test_drops_shows_the_chosen_prompt_and_ablation_and_no_other():
    widget = Drops(MEASURED, ASKED)
    assert widget.says.value == "without the last block: ρ = 0.50; largest drop at block 2"
    drawn = widget.picture.value
    widget.prompt.value = 8
    assert widget.says.value == "without the last block: ρ = −1.00; largest drop at block 4"
    assert widget.picture.value != drawn
    widget.prompt.value, widget.condition.value = 3, "skip_all"
    assert widget.says.value == "without the last block: ρ is not defined; all drops are the same"
    assert plt.get_fignums() == [] and repr(widget) == "Drops(2 prompts)"


def test_drops_begins_with_what_was_chosen_and_offers_all_ablations():
    widget = Drops(MEASURED, ASKED, prompt=8, condition="skip_all")
    assert (widget.prompt.value, widget.condition.value) == (8, "skip_all")
    assert widget.condition.options == ("skip_last", "skip_all")
    assert [text for text, _ in widget.prompt.options] == ["the␣cat", "<img␣src=x␣onerror=alert(1)>␣$$x$$"]
