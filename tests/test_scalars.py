"""Scalars other than one probability, and whole answers."""

import math

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis.strategies import floats, integers

from iglens_core import IGLensError, Readout, attribute, explain, path_credits, read, token_id

A, B = 264, 268
SCALARS = ["prob", "log_prob", "logit", "entropy", ("prob", A, B), ("logit", A, B)]


@pytest.fixture(scope="module")
def spoken():
    model = tiny.speaker()
    return Readout(model), read(model, tiny.tokenizer(), "the cat", answer=" sat on the mat", chat=False)


def reference(logits, target, scalar):
    """In float64, from the definition, with torch's own softmax."""
    p = logits.double().softmax(-1)
    if isinstance(scalar, tuple):
        values = p if scalar[0] == "prob" else logits.double()
        return values[..., scalar[1]] - values[..., scalar[2]]
    if scalar == "entropy":
        return torch.distributions.Categorical(probs=p).entropy()
    return {"prob": p, "log_prob": p.log(), "logit": logits.double()}[scalar][..., target]


@pytest.mark.parametrize("scalar", SCALARS, ids=str)
def test_levels_are_the_scalar_of_the_overwritten_models_logits(spoken, scalar):
    readout, trace = spoken
    result = attribute(readout, trace, scalar=scalar).check()
    for j, layer in enumerate(result.layers, 1):
        logits = tiny.oracle(readout.model, trace.stream[layer], trace.input_ids)[trace.positions]
        for t, target in enumerate(trace.token_ids.tolist()):
            assert float(result.levels[t, j]) == pytest.approx(float(reference(logits[t], target, scalar)), abs=1e-4)


@pytest.mark.parametrize("scalar", SCALARS, ids=str)
@pytest.mark.parametrize("baseline", ["embedding", "mean", "zero"])
def test_credits_sum_to_the_change_of_every_scalar(spoken, scalar, baseline):
    result = attribute(*spoken, scalar=scalar, baseline=baseline).check()
    torch.testing.assert_close(result.credits.sum(1), result.delta, atol=1e-4, rtol=0)
    assert result.faithfulness_error < 1e-4


@pytest.fixture(scope="module")
def biased():
    """A readout whose head has a bias, to be moved by a constant."""
    return Readout(tiny.build("phi").double())


@pytest.mark.parametrize("scalar", SCALARS, ids=str)
@given(constant=floats(-30, 30).filter(lambda c: abs(c) > 0.1), seed=integers(0, 2**16))
@settings(max_examples=10, deadline=None)
def test_a_constant_added_to_all_logits_changes_nothing_but_the_logit(biased, scalar, constant, seed):
    scalar = scalar if isinstance(scalar, str) else (scalar[0], 5, 9)
    states = torch.randn(4, 3, tiny.D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    head = biased.model.lm_head
    before = path_credits(biased, states, [1, 2, 3], scalar=scalar)
    with torch.no_grad():
        head.bias.add_(constant)
        after = path_credits(biased, states, [1, 2, 3], scalar=scalar)
        head.bias.sub_(constant)
    torch.testing.assert_close(before[0], after[0], atol=1e-10, rtol=0)
    assert torch.allclose(before[1], after[1], atol=1e-10) == (scalar != "logit")


@pytest.mark.parametrize("shift", [0.0, -60.0, -100.0])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_entropy_keeps_its_digits_in_float32(shift, scale):
    model = tiny.build("phi")
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        model.lm_head.bias.add_(shift)
    readout, states = Readout(model), torch.randn(4, 3, tiny.D, generator=torch.Generator().manual_seed(0))
    _, levels = path_credits(readout, states, [1, 2, 3], scalar="entropy")
    logits = readout.logits(states.transpose(0, 1).flatten(0, 1))
    expected = reference(logits, None, "entropy").view(3, 4)
    torch.testing.assert_close(levels.double(), expected, atol=5e-5, rtol=0)
    assert (levels >= 0).all()


def test_entropy_of_ordinary_text_passes_the_check(smol):
    model, tokenizer, readout = smol
    text = "def f(x):\n    return x\n\n\ndef g(x):\n    return"
    trace = read(model, tokenizer, text, answer="\n", scope="all")
    result = attribute(readout, trace, scalar="entropy").check()
    assert (result.levels >= 0).all()
    assert float(result.levels.max()) <= math.log(readout.V) + 1e-4


@pytest.mark.parametrize("kind", ["prob", "logit"])
def test_a_contrast_is_the_difference_of_its_two_targets(spoken, kind):
    both = attribute(*spoken, scalar=(kind, A, B))
    one, two = (attribute(*spoken, targets=target, scalar=kind) for target in (A, B))
    torch.testing.assert_close(both.credits, one.credits - two.credits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.delta, one.delta - two.delta, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scalar", ["entropy", ("prob", A, B)], ids=str)
def test_entropy_and_contrasts_ignore_the_targets(spoken, scalar):
    assert torch.equal(attribute(*spoken, scalar=scalar).credits, attribute(*spoken, scalar=scalar, targets=7).credits)


def test_texts_in_a_contrast_keep_their_leading_space(spoken):
    tokenizer = tiny.tokenizer()
    ids = token_id(tokenizer, " cat"), token_id(tokenizer, "cat")
    assert ids[0] != ids[1]
    assert attribute(*spoken, scalar=("logit", " cat", "cat")).scalar == ("logit", *ids)
    options = {"answer": " sat", "chat": False}
    result = explain(tiny.speaker(), tokenizer, "the cat", scalar=("prob", " cat", ids[1]), **options)
    assert result.scalar == ("prob", *ids)


@pytest.mark.parametrize("scalar", SCALARS, ids=str)
def test_every_scalar_survives_saving(spoken, scalar, tmp_path):
    result = attribute(*spoken, scalar=scalar)
    result.save(tmp_path / "x")
    again = type(result).load(tmp_path / "x").check()
    assert again.scalar == scalar and torch.equal(again.credits, result.credits)
    assert set(result.to_frame()["scalar"]) == {str(scalar)}


def test_slices_of_the_vocabulary_give_what_the_whole_head_gives(spoken, monkeypatch):
    import iglens_core

    readout, trace = spoken
    whole = {scalar: attribute(readout, trace, scalar=scalar) for scalar in SCALARS}
    monkeypatch.setattr(iglens_core, "SLICE", 50)  # 273 rows: the last slice is narrower
    for scalar, result in whole.items():
        sliced = attribute(readout, trace, scalar=scalar)
        torch.testing.assert_close(sliced.levels, result.levels, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("scalar", ["prob", "log_prob"])
@pytest.mark.parametrize("log", [False, True])
def test_a_whole_answer_is_the_product_over_its_tokens(spoken, scalar, log):
    readout, trace = spoken
    result = attribute(readout, trace, scalar=scalar).answer(log=log).check()
    logits = [tiny.oracle(readout.model, trace.stream[layer], trace.input_ids) for layer in range(readout.n + 1)]
    products = torch.stack([_product(one, trace) for one in logits])
    expected = products.log() if log else products
    torch.testing.assert_close(result.levels[0], expected, atol=1e-4 if log else 1e-6, rtol=1e-4 if log else 1e-5)
    torch.testing.assert_close(result.credits.sum(1), result.delta, atol=1e-4 if log else 1e-6, rtol=0)


def _product(logits, trace):
    p = logits[trace.positions].double().softmax(-1)
    return p.gather(1, trace.token_ids[:, None]).prod()


def test_a_long_answer_keeps_its_digits_in_log_form(smol):
    model, tokenizer, _ = smol
    words = " Paris, and it is known for its food and its museums"
    options = {"answer": words, "chat": False}
    result = explain(model, tokenizer, "The capital of France is", scalar="log_prob", **options)
    whole = result.answer(log=True).check()
    assert torch.isfinite(whole.levels).all()
    assert float(whole.levels[0, -1]) == pytest.approx(float(result.model_level.double().sum()), abs=1e-4)
    assert math.exp(float(whole.levels[0, -1])) == pytest.approx(float(result.answer().levels[0, -1]), rel=1e-6)
    plain = explain(model, tokenizer, "The capital of France is", **options)
    with pytest.raises(IGLensError, match="use scalar='log_prob'"):
        plain.answer(log=True)
    assert float(plain.answer().levels[0, -1]) == pytest.approx(float(result.answer().levels[0, -1]), abs=1e-6)


def test_the_reykjavik_answer_is_exact(smol):
    model, tokenizer, _ = smol
    result = explain(model, tokenizer, "The capital of Iceland is", answer=" Reykjavik", chat=False).check()
    assert float(result.answer().check().levels[0, -1]) == pytest.approx(0.4101, abs=5e-5)
    assert float(result.answer().credits.sum()) == pytest.approx(float(result.answer().delta), abs=5e-6)
