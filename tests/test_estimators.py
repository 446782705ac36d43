"""Gradient estimators against Captum, against the exact change, and where they fail."""

import warnings

import pytest
import tiny
import torch
from captum.attr import IntegratedGradients

from iglens_core import IGLensError, Readout, attribute, path_credits, read, residual_path

FAMILIES = ["llama", "gpt2", "gemma2"]
CAPTUM = {"midpoint": "riemann_middle", "gauss-legendre": "gausslegendre"}


def made(name="llama"):
    """A readout, a trace of a tiny model, and the states and targets of its path."""
    model = tiny.build(name, vocab_size=tiny.WORDS, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    readout, trace = Readout(model), read(model, tiny.tokenizer(), "the cat", answer=" sat on the mat", chat=False)
    targets = readout.logits(trace.stream[-1, trace.positions]).argmax(-1)  # p far from 0
    return readout, trace, residual_path(trace)[0], targets


@pytest.mark.parametrize("steps", [2, 5, 32])
@pytest.mark.parametrize("estimator", CAPTUM)
@pytest.mark.parametrize("name", FAMILIES)
def test_segments_are_those_of_captum(name, estimator, steps):
    readout, _, states, targets = made(name)
    credits, _ = path_credits(readout, states, targets, estimator=estimator, steps=steps)
    begin, end = (part.transpose(0, 1).flatten(0, 1) for part in (states[:-1], states[1:]))
    ids = targets.repeat_interleave(len(states) - 1)
    captum = IntegratedGradients(lambda h, target: readout.prob(h, target), multiply_by_inputs=True)
    parts = captum.attribute(end, begin, additional_forward_args=(ids,), n_steps=steps, method=CAPTUM[estimator])
    torch.testing.assert_close(credits.flatten().double(), parts.sum(1).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("estimator", CAPTUM)
@pytest.mark.parametrize("name", FAMILIES)
def test_more_steps_come_closer_to_the_exact_change(name, estimator):
    readout, _, states, targets = made(name)
    exact, levels = path_credits(readout, states, targets)
    errors = []
    for steps in (1, 8, 64, 256):
        credits, same = path_credits(readout, states, targets, estimator=estimator, steps=steps)
        torch.testing.assert_close(same, levels)
        errors.append(float((credits - exact).abs().max()))
    assert errors[0] > 1e-3 and errors[2] < errors[0] / 5
    assert errors[3] < 1e-3


@pytest.mark.parametrize("scalar", ["log_prob", "logit", "entropy", ("prob", 5, 7), ("logit", 5, 7)])
def test_every_scalar_has_its_gradient(scalar):
    readout, _, states, targets = made()
    exact, _ = path_credits(readout, states, targets, scalar=scalar)
    credits, _ = path_credits(readout, states, targets, scalar=scalar, estimator="gauss-legendre", steps=200)
    torch.testing.assert_close(credits, exact, atol=2e-3, rtol=1e-3)


def test_the_sum_is_reported_as_it_is_and_never_rescaled():
    readout, trace, _, targets = made()
    with pytest.warns(UserWarning, match=r"'midpoint' with 1 steps miss delta by \d\.\de-0[12]"):
        result = attribute(readout, trace, targets=targets, estimator="midpoint", steps=1)
    missing = (result.credits.double().sum(1) - result.delta.double()).abs().max()
    assert result.completeness_error == pytest.approx(float(missing)) and missing > 1e-2
    assert result.faithfulness_error < 1e-6  # the ends are still read exactly


def test_a_sum_that_is_close_gives_no_warning_and_passes_the_check():
    readout, trace, *_ = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = attribute(readout, trace, estimator="gauss-legendre", steps=64).check()
    with pytest.raises(IGLensError, match="do not sum to delta"):
        result.check(1e-9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("estimator", ["observed", "midpoint"])
def test_the_callers_grad_mode_changes_nothing(estimator, mode):
    readout, trace, *_ = made()
    plain = attribute(readout, trace, estimator=estimator, steps=64)
    with mode():
        result = attribute(readout, trace, estimator=estimator, steps=64)
        again = read(readout.model, tiny.tokenizer(), "the cat", answer=" sat on the mat", chat=False)
        other = attribute(readout, again, estimator=estimator, steps=64)
    assert torch.equal(result.credits, plain.credits)
    torch.testing.assert_close(other.credits, plain.credits)
    assert not result.credits.requires_grad
    assert all(parameter.grad is None for parameter in readout.model.parameters())


def test_states_that_require_a_gradient_leave_no_graph_behind():
    readout, trace, states, targets = made()
    credits, levels = path_credits(readout, states.clone().requires_grad_(), targets, estimator="midpoint", steps=4)
    assert not credits.requires_grad and not levels.requires_grad
    lens = torch.nn.Linear(tiny.D, tiny.D, bias=False)
    torch.nn.init.eye_(lens.weight)
    result = attribute(readout, trace, estimator="midpoint", steps=64, translators=lambda states, layers: lens(states))
    assert len(result.to_frame()) == result.credits.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_points_of_a_half_precision_model_are_not_rounded_together(dtype):
    readout = Readout(tiny.build("llama").to(dtype))
    states = torch.randn(3, 2, tiny.D, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact, _ = path_credits(readout, states, [1, 2], scalar="log_prob")
    credits, _ = path_credits(readout, states, [1, 2], scalar="log_prob", estimator="midpoint", steps=64)
    torch.testing.assert_close(credits, exact, atol=0.15, rtol=0)


def test_the_memory_budget_changes_nothing():
    readout, _, states, targets = made()
    small = path_credits(readout, states, targets, estimator="midpoint", steps=7, memory_mb=0.02)
    large = path_credits(readout, states, targets, estimator="midpoint", steps=7)
    torch.testing.assert_close(small[0], large[0], atol=1e-6, rtol=0)


def test_float64_models_are_integrated_in_float64():
    model = tiny.build("llama").double()
    readout, states = Readout(model), torch.randn(3, 2, tiny.D, dtype=torch.float64)
    exact, _ = path_credits(readout, states, [1, 2])
    credits, _ = path_credits(readout, states, [1, 2], estimator="gauss-legendre", steps=300)
    assert credits.dtype == torch.float64
    torch.testing.assert_close(credits, exact, atol=1e-8, rtol=0)


def test_from_the_zero_state_midpoint_sees_almost_nothing_and_observed_everything(smol):
    model, tokenizer, readout = smol
    trace = read(model, tokenizer, "The capital of France is", answer=" Paris", chat=False)
    options = {"layers": 1, "baseline": "zero"}  # one segment, from 0 to the last state
    assert float(attribute(readout, trace, **options).check().credits.sum()) == pytest.approx(0.7725, abs=1e-3)
    with pytest.warns(UserWarning, match="miss delta by 7"):  # a normed state jumps within a hair of 0
        missed = attribute(readout, trace, estimator="midpoint", steps=64, **options)
    assert float(missed.credits.sum()) == pytest.approx(0.0, abs=1e-3)


def test_quantised_weights_without_a_gradient_are_refused_and_observed_works():
    model = tiny.build("llama")
    model.lm_head = torch.ao.nn.quantized.dynamic.Linear.from_float(_observed_linear(model.lm_head))
    readout, states = Readout(model), torch.randn(3, 2, tiny.D)
    with pytest.raises(IGLensError, match=r"no gradient goes through LlamaForCausalLM's head .*; use 'observed'"):
        path_credits(readout, states, [1, 2], estimator="midpoint")
    credits, levels = path_credits(readout, states, [1, 2])
    torch.testing.assert_close(credits.sum(1), levels[:, -1] - levels[:, 0])


def _observed_linear(linear):
    linear.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return linear
