"""Many prompts, and parameters that arrive as strings."""

import pytest
import tiny
import torch

from iglens_core import IGLensError, explain
from iglens_lab.batch import explain_many, parameters


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("model", None, None),
        ("model", "None", None),
        ("model", "some/model", "some/model"),
        ("answer", "None", None),
        ("answer", " Paris", " Paris"),
        ("prompt", "12", "12"),
        ("prompt", "None", "None"),
        ("layers", None, None),
        ("layers", "None", None),
        ("layers", "[0,5]", [0, 5]),
        ("layers", "0, 5", [0, 5]),
        ("layers", (0, 5), [0, 5]),
        ("layers", "12", 12),
        ("layers", 12, 12),
        ("max_new_tokens", "12", 12),
        ("baseline", "mean", "mean"),
    ],
)
def test_parameters_are_understood_as_text_or_value(name, value, expected):
    assert getattr(parameters(**{name: value}), name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", None),
        ("prompt", 12),
        ("prompt", True),
        ("prompt", ["a", "b"]),
        ("answer", 7),
        ("answer", 1.5),
        ("baseline", None),
        ("model", 3),
        ("layers", "all"),
        ("layers", "range(3)"),
        ("layers", "[]"),
        ("layers", []),
        ("layers", [True]),
        ("layers", [1.0]),
        ("layers", "1.5"),
        ("layers", True),
        ("layers", "__import__('os')"),
        ("layers", "-" * 5000),
        ("kinds", 3),
        ("kinds", []),
        ("kinds", "[1, 2]"),
        ("interventions", None),
        ("interventions", "[]"),
        ("interventions", ["skip", 1]),
        ("n_prompts", 0),
        ("n_prompts", "all"),
        ("max_new_tokens", "many"),
        ("max_new_tokens", "1.5"),
        ("max_new_tokens", None),
        ("max_new_tokens", True),
    ],
)
def test_parameters_that_could_be_misread_are_refused_by_name(name, value):
    with pytest.raises(IGLensError, match=f"^{name}: expected"):
        parameters(**{name: value})


@pytest.mark.parametrize("value", ["capital", "['capital']", ["capital"], ("capital",)])
def test_one_name_stands_with_or_without_its_brackets(value):
    assert parameters(kinds=value, interventions=value).interventions == ["capital"] == parameters(kinds=value).kinds
    assert parameters(kinds=None).kinds is None is parameters(kinds="None").kinds


def test_explain_many_gives_what_explain_gives():
    model, tokenizer = tiny.speaker(), tiny.tokenizer()
    prompts, options = ["the cat", "a mat"], {"answer": " sat", "chat": False, "layers": 2}
    for prompt, result in zip(prompts, explain_many(model, tokenizer, prompts, **options), strict=True):
        torch.testing.assert_close(result.credits, explain(model, tokenizer, prompt, **options).credits)


def test_explain_many_keeps_the_place_of_a_prompt_that_fails():
    model, tokenizer = tiny.speaker(), tiny.tokenizer()
    with pytest.warns(UserWarning, match="prompt 1 failed: prompt: expected at least one character"):
        results = list(explain_many(model, tokenizer, ["the", "", "cat"], answer=" sat", chat=False))
    assert [result is None for result in results] == [False, True, False]


def test_explain_many_stops_at_a_failure_when_asked():
    model, tokenizer = tiny.speaker(), tiny.tokenizer()
    with pytest.raises(IGLensError, match=r"^prompt 1: "):
        list(explain_many(model, tokenizer, ["the", ""], answer=" sat", chat=False, stop=True))


@pytest.mark.parametrize("prompts", ["the cat", b"the cat", None, 3])
def test_explain_many_refuses_what_is_no_list_at_once(prompts):
    with pytest.raises(IGLensError, match="expected a list of prompts"):
        explain_many(tiny.speaker(), tiny.tokenizer(), prompts)


def test_parameters_that_no_notebook_has_are_refused():
    with pytest.raises(IGLensError, match="got nope"):
        parameters(nope=3)
