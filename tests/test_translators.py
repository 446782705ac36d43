"""Translators: the closed form against independent solutions, and the path that goes through what they make."""

import copy
import dataclasses
import json
import math
import os
import random
from functools import cache
from pathlib import Path

import accelerate
import pytest
import tiny
import torch
from safetensors.torch import save_file
from tiny import WORDS, D, N
from torch import Tensor, nn

from iglens_core import (
    FaithfulnessError,
    IGLensError,
    Readout,
    attribute,
    explain,
    read,
    residual_path,
    residual_stream,
)
from iglens_lab import toy, translators
from iglens_lab.translators import Moments, Translators, fit, for_model, moments, reading, sample

OPTIONS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
NAMES = ("llama_tied", "gpt2", "gemma2", "opt_350m", "bloom", "cohere")
SCALARS = ("prob", "log_prob", "logit", "entropy", ("prob", 40, 41), ("logit", 40, 41))
RIDGES = (1e-4, 1e-2, 1.0, 100.0)


def letters(seed: int, alphabet: str, count: int, weights=None) -> str:
    return "".join(random.Random(seed).choices(alphabet, weights, k=count))  # noqa: S311


def texts(count: int = 20, length: int = 25, seed: int = 0) -> list[str]:
    return [letters(100 * seed + i, "the cat sat on mats; dogs ran, Ükf?", length) for i in range(count)]


def model_of(name: str) -> nn.Module:
    return tiny.speaker() if name == "llama" else tiny.shared(name, vocab_size=WORDS, **OPTIONS)


@cache
def fitted(name: str = "llama", ridge: float = 1e-2) -> Translators:
    return measured(name).solve(ridge)


@cache
def measured(name: str = "llama", dtype: torch.dtype = torch.float32) -> Moments:
    return moments(tiny.cast(model_of(name), dtype), tiny.tokenizer(), texts(), progress=False)


def ask(model, **options):
    return explain(model, tiny.tokenizer(), "the cat", answer=" sat on the mat", **options)


def counting(model: nn.Module) -> tuple[nn.Module, list]:
    """A copy, and a list that gets an entry at every run of it."""
    model, runs = copy.deepcopy(model), []
    model.register_forward_hook(lambda *_: runs.append(1))
    return model, runs


def still(n: int = N, d: int = D, model=None) -> Translators:
    """Maps and shifts of zero."""
    key = translators.fingerprint(tiny.speaker() if model is None else model)
    return Translators(torch.zeros(n, d, d), torch.zeros(n, d), key, 1, 0.0)


def by_hand(fitted: Translators, states: Tensor, layer: int) -> Tensor:
    """What the translator of a layer makes of its states [·, d], in float64."""
    h = states.double()
    if layer == len(fitted.maps):
        return h
    return h + torch.einsum("ij,rj->ri", fitted.maps[layer].double(), h) + fitted.shifts[layer].double()


def states_of(model, some: list[str]) -> Tensor:
    """[n + 1, R, d], the states of all texts but each one's first, float64."""
    ids = [torch.tensor(tiny.tokenizer()(text)["input_ids"]) for text in some]
    return torch.cat([tiny.stream(model, one)[:, 1:] for one in ids], 1).double()


def ridge_regression(states: Tensor, layer: int, ridge: float) -> tuple[Tensor, Tensor]:
    """The map [d, d] and the shift [d] of a layer by least squares on the raw states, the penalty as further rows."""
    x, y = states[layer], states[-1] - states[layer]
    flat, rows = x - x.mean(0), y - y.mean(0)
    weight = (ridge * flat.square().mean() * len(x)) ** 0.5
    left = torch.cat([flat, weight * torch.eye(x.shape[1], dtype=x.dtype)])
    right = torch.cat([rows, torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)])
    made = torch.linalg.lstsq(left, right, driver="gelsd").solution
    return made.T, y.mean(0) - x.mean(0) @ made


def moments_of(states: Tensor) -> Moments:
    """Moments of given states [n + 1, R, d]."""
    count = states.shape[1]
    gram = torch.einsum("lri,lrj->lij", states, states) / count
    cross = torch.einsum("lri,rj->lij", states, states[-1]) / count
    return Moments(gram, cross, states.mean(1), "by hand", count)


def near(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> bool:
    """Within the tolerance, relative to the largest entry where that is above 1."""
    return a.shape == b.shape and float((a.double() - b.double()).abs().max()) <= tolerance * max(
        1, float(b.abs().max())
    )


def same(a: Translators, b: Translators) -> bool:
    labels = all(getattr(a, name) == getattr(b, name) for name in ("model", "tokens", "ridge"))
    return labels and torch.equal(a.maps, b.maps) and torch.equal(a.shifts, b.shifts)


# ---------------------------------------------------------------------------------------------------------------------
# The closed form
# ---------------------------------------------------------------------------------------------------------------------


def affine_states(count: int = 60, d: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """States of three layers, each an affine function of the one before: [3, R, d], and h_2 = h_0 + A h_0 + b."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(count, d, generator=generator, dtype=torch.float64) * 2 + 1
    one, two = torch.randn(2, d, d, generator=generator, dtype=torch.float64) / 2
    shift, other = torch.randn(2, d, generator=generator, dtype=torch.float64)
    second = first @ one.T + shift
    states = torch.stack([first, second, second @ two.T + other])
    eye = torch.eye(d, dtype=torch.float64)
    return states, torch.stack([two @ one - eye, two - eye]), torch.stack([two @ shift + other, other])


def test_an_affine_relation_is_recovered():
    states, maps, shifts = affine_states()
    found = moments_of(states).solve(ridge=0)
    assert found.maps.shape == (2, 6, 6) and found.shifts.shape == (2, 6)
    assert near(found.maps, maps) and near(found.shifts, shifts)
    made = found(states, (0, 1, 2))
    assert torch.allclose(made, states[2].expand(3, -1, -1), rtol=0, atol=1e-5)


class Affine(nn.Module):
    """A block that is an affine map."""

    def __init__(self, d: int):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(d, d, generator=generator) / d**0.5)
        self.bias = nn.Parameter(torch.randn(d, generator=generator))

    def forward(self, hidden_states, **options):
        return hidden_states @ self.weight.T + self.bias


def test_an_affine_last_block_is_found_in_a_model():
    model = copy.deepcopy(tiny.speaker())
    model.model.layers[-1] = last = Affine(D)
    found = moments(model.double(), tiny.tokenizer(), texts(), progress=False).solve(0)
    assert near(found.maps[-1], last.weight.detach() - torch.eye(D)) and near(found.shifts[-1], last.bias.detach())
    assert not near(found.maps[-2], last.weight.detach() - torch.eye(D), 0.1)


def test_layers_below_silent_blocks_need_no_translation():
    model = toy.random_model(4, silent=(2, 4))
    some = [letters(i, toy.ALPHABET, 20) for i in range(20)]
    found = moments(model, toy.tokenizer(), some, progress=False)
    for ridge in (0.0, 0.01, 1.0, math.inf):
        made = found.solve(ridge)
        assert made.maps[3].abs().max() <= 1e-6 and made.shifts[3].abs().max() <= 1e-6
        assert torch.equal(made.maps[1], made.maps[2]) and torch.equal(made.shifts[1], made.shifts[2])
        assert made.shifts[2].abs().max() > 0.01


@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt_350m"])
def test_it_solves_the_least_squares_on_the_raw_states(name, ridge):
    states = states_of(tiny.cast(model_of(name), torch.float64), texts())
    found = measured(name, torch.float64).solve(ridge)
    assert found.ridge == ridge and found.tokens == states.shape[1]
    for layer in range(N):
        linear, shift = ridge_regression(states, layer, ridge)
        assert linear.abs().max() > 1e-3
        assert near(found.maps[layer], linear) and near(found.shifts[layer], shift)


def test_an_infinite_ridge_leaves_the_mean_shift():
    states, found = states_of(tiny.speaker(), texts()), measured().solve(math.inf)
    assert found.ridge == math.inf and not found.maps.any()
    assert near(found.shifts, (states[-1] - states[:-1]).mean(1))
    assert near(found(states.float(), range(N + 1)).mean(1), states[-1].mean(0).expand(N + 1, -1), 1e-5)


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_a_rank_gives_the_best_maps_of_that_rank(rank):
    whole = measured("llama", torch.float64)
    full, found = whole.solve(0.01), whole.solve(0.01, rank)
    states = states_of(tiny.cast(tiny.speaker(), torch.float64), texts())
    for layer in range(N):
        size = torch.linalg.svdvals(found.maps[layer].double())
        assert size[rank - 1] > 1e-3 * size[0] and (size[rank:] <= 1e-5 * size[0]).all()
        x = states[layer] - states[layer].mean(0)
        metric = x.T @ x / len(x) + 0.01 * x.square().mean() * torch.eye(D, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(metric)
        root, back = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
        u, s, v = torch.linalg.svd(root @ ridge_regression(states, layer, 0.01)[0].T)
        best = (back @ (u[:, :rank] * s[:rank]) @ v[:rank]).T
        assert near(found.maps[layer], best, 1e-5)
        assert not near(found.maps[layer], full.maps[layer], 1e-3)
    assert near(found(states[:-1].float(), range(N)).mean(1), states[-1].mean(0).expand(N, -1), 1e-4)


def test_the_full_rank_changes_nothing():
    full, found = measured().solve(0.01), measured().solve(0.01, D)
    assert near(found.maps, full.maps) and near(found.shifts, full.shifts)


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("ridge", [0.0, 0.01])
def test_states_that_never_vary_have_a_solution(ridge, rank):
    one = torch.arange(1.0, 7, dtype=torch.float64).expand(50, 6)
    found = moments_of(torch.stack([one * 0, one, one * 3])).solve(ridge, rank)
    states = torch.stack([one[:1] * 0, one[:1]]).float()
    assert near(found(states, (0, 1)), 3 * one[:1].expand(2, 1, 6), 1e-5)


def test_more_ridge_makes_smaller_maps():
    sizes = torch.stack([measured().solve(ridge).maps.norm(dim=(1, 2)) for ridge in (0, *RIDGES, math.inf)])
    assert (sizes.diff(dim=0) < 0).all()


def test_the_ridge_is_in_units_of_the_states_own_variance():
    states, *_ = affine_states()
    small, large = (moments_of(states * size).solve(0.3) for size in (1e-3, 1e3))
    assert near(small.maps, large.maps) and near(small.shifts * 1e6, large.shifts, 1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# The pass over the texts
# ---------------------------------------------------------------------------------------------------------------------


def test_moments_are_means_over_every_position_but_each_texts_first():
    some = ["the cat", "", "a", *texts(8)]
    found, states = moments(tiny.speaker(), tiny.tokenizer(), some, progress=False), states_of(tiny.speaker(), some[3:])
    states = torch.cat([states_of(tiny.speaker(), some[:1]), states], 1)
    expected = moments_of(states)
    assert found.tokens == states.shape[1] and found.model == translators.fingerprint(tiny.speaker())
    for name in ("gram", "cross", "mean"):
        value = getattr(found, name)
        assert value.dtype == torch.float64 and near(value, getattr(expected, name))


def test_the_order_of_the_texts_does_not_matter():
    other = moments(tiny.speaker(), tiny.tokenizer(), iter(texts()[::-1]), progress=False).solve(1e-4)
    assert near(other.maps, fitted(ridge=1e-4).maps) and near(other.shifts, fitted(ridge=1e-4).shifts)


def test_a_long_text_is_read_in_windows(monkeypatch):
    monkeypatch.setattr(translators, "WINDOW", 50)
    model, seen = tiny.cast(tiny.speaker(), torch.float32), []
    model.register_forward_pre_hook(lambda m, a, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    text = letters(1, "xyzXYZ.,:;", 120)  # no merges: a token a character
    found = moments(model, tiny.tokenizer(), [text], progress=False)
    assert max(shape[1] for shape in seen) <= 50
    parts = moments(model, tiny.tokenizer(), [text[:50], text[50:100], text[100:]], progress=False)
    assert found.tokens == parts.tokens == 117
    assert near(found.gram, parts.gram, 1e-12) and near(found.cross, parts.cross, 1e-12)


def test_a_text_with_its_own_special_tokens_gets_no_others():
    made = tiny.tokenizer(bos=True)
    count = {text: moments(tiny.speaker(), made, [text * 9], progress=False).tokens for text in ("xyzwvu", "<s>xyzwv")}
    assert count == {"xyzwvu": 54, "<s>xyzwv": 53}


def test_the_model_is_left_as_it_was():
    model = tiny.cast(tiny.speaker(), torch.float32).train()
    model.model.layers[1].eval()
    modes, before = [m.training for m in model.modules()], copy.deepcopy(model.state_dict())
    fit(model, tiny.tokenizer(), texts(), progress=False).suits(model)
    sample(model, tiny.tokenizer(), texts(2))
    assert [m.training for m in model.modules()] == modes and tiny.hooks(model) == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_fit_is_moments_and_solve(capsys):
    assert same(fit(tiny.speaker(), tiny.tokenizer(), texts(), progress=False), measured().solve(translators.RIDGE))
    assert capsys.readouterr().err == ""
    assert same(fit(tiny.speaker(), tiny.tokenizer(), texts(), ridge=0.5), measured().solve(0.5))
    assert "fitting translators" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# What they make of states
# ---------------------------------------------------------------------------------------------------------------------


def test_every_layer_gets_its_own_map_and_the_last_none():
    states = torch.randn(5, 7, D, generator=torch.Generator().manual_seed(0))
    kept = states.clone()
    made = fitted()(states, (2, 0, 3, 1, 0))
    for row, layer in enumerate((2, 0, 3, 1, 0)):
        assert near(made[row], by_hand(fitted(), states[row], layer))
    assert torch.equal(made[2], states[2]) and torch.equal(states, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_states_keep_their_dtype(dtype):
    states = torch.randn(2, 7, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = fitted("gpt2")(states, (1, N))
    assert made.dtype == dtype and torch.equal(made[1], states[1])
    assert near(
        made[0], by_hand(fitted("gpt2"), states[0], 1), {torch.float64: 1e-12}.get(dtype, torch.finfo(dtype).eps * 2)
    )


@pytest.mark.parametrize(
    ("shape", "layers"),
    [((2, 4, D), (0,)), ((1, 4, D), (0, 1)), ((1, 4, D - 1), (0,)), ((4, D), (0, 1, 2, 3)), ((1, 4, D), (N + 1,)),
     ((1, 4, D), (-1,)), ((1, 4, D), (0.5,)), ((2, 4, D), (True, False)), ((1, 4, D), ("0",))],
)  # fmt: skip
def test_states_of_another_shape_or_layers_out_of_range_are_refused(shape, layers):
    with pytest.raises(IGLensError, match=rf"expected floats \[{len(layers)}, T, {D}\] of layers within 0 … {N}, got"):
        fitted()(torch.zeros(shape), layers)


@pytest.mark.parametrize("states", [torch.zeros(1, 4, D, dtype=torch.long), [[[0.0] * D]], None])
def test_states_that_are_no_floats_are_refused(states):
    with pytest.raises(IGLensError, match=r"expected floats \[1, T, "):
        fitted()(states, (0,))


# ---------------------------------------------------------------------------------------------------------------------
# The path through them
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["embedding", "mean", "zero", "tensor"])
@pytest.mark.parametrize("kind", ["maps of zero", "a function"])
def test_the_identity_gives_the_plain_path_to_the_bit(baseline, kind):
    one = {"maps of zero": still(), "a function": lambda states, layers: states.clone()}[kind]
    given = torch.linspace(-1, 1, D) if baseline == "tensor" else baseline
    plain, moved = (ask(tiny.speaker(), baseline=given, translators=each) for each in (None, one))
    for name in ("credits", "levels", "delta", "model_level"):
        assert torch.equal(getattr(plain, name), getattr(moved, name))
    assert plain.layers == moved.layers


def test_a_function_is_given_the_states_and_layers_of_the_path():
    seen = []

    def double(states, layers):
        seen.append((tuple(states.shape), tuple(layers)))
        return torch.stack([h if layer == N else 2 * h for h, layer in zip(states, layers, strict=True)])

    trace = read(tiny.speaker(), tiny.tokenizer(), "the cat", answer=" sat on the mat")
    path, layers = residual_path(trace, layers=[1], translators=double)
    plain, _ = residual_path(trace, layers=[1])
    assert layers == (1, N) and torch.equal(path, plain * torch.tensor([2.0, 2.0, 1.0])[:, None, None])
    assert sorted(seen) == [((1, 4, D), (0,)), ((2, 4, D), (1, N))]


@pytest.mark.parametrize(
    ("bad", "message"),
    [(5, "expected a function"), ("x", "expected a function"), (lambda states, layers: states[:1], "expected states"),
     (lambda states, layers: None, "expected states"), (lambda states, layers: states * math.nan, "finite")],
    ids=["number", "text", "shape", "nothing", "NaN"],
)  # fmt: skip
def test_what_makes_no_states_is_refused(bad, message):
    with pytest.raises(IGLensError, match=message):
        ask(tiny.speaker(), translators=bad)


def test_a_function_that_moves_the_last_layer_is_unfaithful():
    trace = read(tiny.speaker(), tiny.tokenizer(), "the cat", answer=" sat on the mat")
    with pytest.raises(FaithfulnessError, match="translators must leave the last layer as it is"):
        attribute(Readout(tiny.speaker()), trace, scalar="log_prob", translators=lambda states, layers: states + 1)


@pytest.mark.parametrize("name", ["llama", *NAMES])
def test_levels_are_the_heads_reading_of_what_they_make(name):
    model = tiny.cast(model_of(name), torch.float64)
    result = ask(model, translators=fitted(name)).check()
    ids = torch.tensor(tiny.tokenizer().encode("the cat sat on the mat"))
    stream = tiny.stream(model, ids)
    for layer in range(N + 1):
        logits = tiny.oracle(model, by_hand(fitted(name), stream[layer], layer), ids)
        expected = tiny.log_probs(logits)[result.positions, result.target_ids].exp()
        assert torch.allclose(result.levels[:, layer], expected, rtol=1e-9, atol=1e-12)
    plain = ask(model)
    assert (result.levels[:, :-1] - plain.levels[:, :-1]).abs().max() > 1e-4


@pytest.mark.parametrize("scalar", SCALARS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_sum_stays_exact_and_the_end_the_models_own(name, dtype, allowed, scalar):
    model = model_of(name) if dtype == torch.float32 else doubled(name)
    plain, moved = (ask(model, scalar=scalar, translators=one).check() for one in (None, fitted(name)))
    size = max(1.0, float(moved.levels.abs().max()))  # logits have larger rounding errors than probabilities
    assert moved.completeness_error <= allowed * size and moved.faithfulness_error <= allowed * size
    ends = moved.levels[:, -1] - moved.levels[:, 0]
    assert torch.allclose(moved.credits.sum(1), ends, rtol=0, atol=allowed * size)
    assert torch.equal(moved.levels[:, -1], plain.levels[:, -1]) and torch.equal(moved.model_level, plain.model_level)
    assert not torch.allclose(moved.levels[:, :-1], plain.levels[:, :-1], rtol=1e-2, atol=0)


@cache
def doubled(name: str) -> nn.Module:
    return tiny.cast(model_of(name), torch.float64)


@pytest.mark.parametrize("estimator", ["midpoint", "gauss-legendre"])
def test_gradient_estimators_come_to_the_same_credits(estimator):
    exact = ask(tiny.speaker(), translators=fitted(), scalar="logit")
    rough = ask(tiny.speaker(), translators=fitted(), scalar="logit", estimator=estimator, steps=400)
    assert torch.allclose(rough.credits, exact.credits, rtol=0, atol=1e-2 * float(exact.credits.abs().max()))


def test_answer_and_onset_work_on_the_translated_path():
    result = ask(tiny.speaker(), translators=fitted())
    whole = result.answer().check()
    assert torch.allclose(whole.levels[0], result.levels.double().prod(0), rtol=1e-5, atol=0)
    assert whole.baseline == "embedding (translated)" and torch.equal(whole.credits, whole.levels.diff())
    logs = ask(tiny.speaker(), translators=fitted(), scalar="log_prob").answer(log=True).check()
    assert torch.allclose(logs.levels[0].exp(), whole.levels[0], rtol=1e-4, atol=0)
    shares = result.credits.double().abs().cumsum(1) / result.credits.double().abs().sum(1, keepdim=True)
    assert result.onset().tolist() == [next(j for j in range(N) if row[j] >= 0.5) + 1 for row in shares]


def test_the_embedding_baseline_alone_is_translated():
    model, one = doubled("llama_tied"), fitted("llama_tied")
    stream = tiny.stream(model, torch.tensor(tiny.tokenizer().encode("the cat sat on the mat")))
    states = by_hand(one, stream[0], 0)
    baselines = {"embedding": "embedding (translated)", "zero": "zero", "mean": "mean", "tensor": "tensor"}
    for baseline, label in baselines.items():
        given = torch.linspace(-1, 1, D) if baseline == "tensor" else baseline
        plain, moved = (ask(model, baseline=given, translators=each) for each in (None, one))
        assert (plain.baseline, moved.baseline) == (baseline, label)
        assert torch.equal(plain.levels[:, 0], moved.levels[:, 0]) == (baseline != "embedding")
        expected = tiny.log_probs(tiny.oracle(model, states))[moved.positions, moved.target_ids].exp()
        at = 0 if baseline == "embedding" else 1  # any other baseline has layer 0 after it
        assert moved.layers[0] == 1 - at and torch.allclose(moved.levels[:, at], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("layers", [[0], [1], [2], [3], [1, 2], [0, 2], 2])
def test_a_layer_is_read_through_its_own_translator_whatever_the_others(layers):
    model, one = doubled("gpt2"), fitted("gpt2")
    result = ask(model, layers=layers, translators=one).check()
    trace = read(model, tiny.tokenizer(), "the cat", answer=" sat on the mat")
    path, chosen = residual_path(trace, layers=layers, translators=one)
    assert result.layers == chosen and set(chosen) >= {N}
    for states, layer in zip(path, (0, *chosen), strict=True):
        assert near(states, by_hand(one, trace.stream[layer, trace.positions], layer), 1e-12)
    whole = ask(model, baseline="zero", translators=one)  # layers 0 … n
    assert torch.allclose(result.levels, whole.levels[:, [1, *(layer + 1 for layer in chosen)]], rtol=1e-9, atol=0)


def test_long_texts_are_translated_in_every_part():
    text = letters(3, "xyzXYZ.,:;", 150)
    result = explain(tiny.speaker(), tiny.tokenizer(), text, answer=";", scope="all", translators=fitted()).check()
    ids = torch.tensor(tiny.tokenizer().encode(text + ";"))
    states = by_hand(fitted(), tiny.stream(tiny.speaker(), ids)[1], 1).float()
    expected = tiny.log_probs(tiny.oracle(tiny.speaker(), states, ids))[torch.arange(150), ids[1:]].exp()
    assert len(result.levels) == 150 and torch.allclose(result.levels[:, 1].double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_half_precision_models_are_fitted_and_translated(name, dtype):
    model = tiny.cast(model_of(name), dtype)
    one = fit(model, tiny.tokenizer(), texts(), progress=False)
    assert one.maps.dtype == torch.float32 and near(one.maps, fitted(name).maps, 0.1)
    plain, moved = (ask(model, translators=each).check() for each in (None, one))
    assert torch.equal(moved.levels[:, -1], plain.levels[:, -1])
    ids = torch.tensor(tiny.tokenizer().encode("the cat sat on the mat"))
    wide = doubled(name)
    states = by_hand(one, tiny.stream(model, ids)[1], 1)
    expected = tiny.log_probs(tiny.oracle(wide, states, ids))[moved.positions, moved.target_ids].exp()
    assert torch.allclose(moved.levels[:, 1].double(), expected, rtol=0, atol=2e-2)


# ---------------------------------------------------------------------------------------------------------------------
# Which model they are for
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tuned(part: str) -> nn.Module:
    model = copy.deepcopy(tiny.speaker())
    weight = model.get_submodule(part).weight
    weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_an_ablated_head_makes_another_model():
    model = tiny.cast(tiny.shared("llama"), torch.float32)
    known = translators.fingerprint(model)
    with torch.no_grad():  # the columns of one head in one block
        tiny.blocks(model)[1].self_attn.o_proj.weight[:, 8:16] = 0
    assert translators.fingerprint(model) != known


def test_every_column_of_the_default_models_matrices_may_be_looked_at():
    for rows, columns in ((49152, 576), (576, 1536), (1536, 576), (192, 576), (576, 576)):
        seen = {int(place) % columns for place in translators._places(rows * columns)}
        assert len(seen) > 0.4 * columns and {column * 8 // columns for column in seen} == set(range(8))


def test_reading_a_long_text_does_not_make_another_model():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny.build("llama", max_position_embeddings=64, rope_parameters=rope)
    known = translators.fingerprint(model)
    residual_stream(model, torch.arange(120) % 90)
    assert translators.fingerprint(model) == known


def test_offloaded_weights_are_refused_with_the_reason():
    offloaded = accelerate.cpu_offload(tiny.cast(tiny.speaker(), torch.float32))
    with pytest.raises(IGLensError, match="weights are offloaded; load it whole"):
        fitted().suits(offloaded)


def test_texts_are_cut_to_a_context_shorter_than_the_window():
    model = tiny.build("gpt2", n_positions=64, vocab_size=WORDS)
    found = moments(model, tiny.tokenizer(), ["xyzXYZ.,:;" * 20], progress=False)
    assert found.tokens == 3 * 63 + 7  # 200 tokens in parts of 64, without each one's first


@pytest.mark.parametrize("some", [["\ud800" * 40], ["the cat \udfff"]])
def test_texts_that_no_tokenizer_can_encode_are_refused(some):
    with pytest.raises(IGLensError, match="the tokenizer cannot encode"):
        fit(tiny.speaker(), tiny.tokenizer(), some, progress=False)


def test_characters_outside_the_vocabulary_are_refused():
    with pytest.raises(IGLensError, match="the tokenizer cannot encode"):
        fit(toy.random_model(2), toy.tokenizer(), ["é" * 60], progress=False)


def test_maps_of_any_layout_are_saved(tmp_path):
    one = dataclasses.replace(fitted(), maps=fitted().maps.mT)
    one.save(tmp_path / "one.safetensors")
    assert torch.equal(Translators.load(tmp_path / "one.safetensors").maps, one.maps)


@pytest.mark.parametrize("path", [None, 3])
def test_what_is_no_path_is_refused(path):
    with pytest.raises(IGLensError, match="save: expected a path"):
        fitted().save(path)


@pytest.mark.parametrize("part", ["model.layers.1.mlp.up_proj", "model.norm", "lm_head", "model.embed_tokens"])
def test_a_tuned_copy_is_refused(part):
    with pytest.raises(IGLensError, match="on other weights than this LlamaForCausalLM has; fit them anew"):
        ask(tuned(part), translators=fitted())


@pytest.mark.parametrize(
    "options", [{"seed": 1}, {"hidden_size": 64}, {"num_hidden_layers": 2}], ids=["weights", "width", "depth"]
)
def test_another_model_is_refused(options):
    other = tiny.build("llama", vocab_size=WORDS, **OPTIONS, **options)
    with pytest.raises(IGLensError, match=rf"fitted on another model \(n = {N} blocks, d = {D}\)"):
        ask(other, translators=fitted())
    trace = read(other, tiny.tokenizer(), "the cat", answer=" sat")
    with pytest.raises(IGLensError, match="fitted on another model"):
        attribute(Readout(other), trace, translators=fitted())


@pytest.mark.parametrize("change", ["a row", "a column", "the order of two blocks", "eps"])
def test_a_small_change_of_the_same_model_is_noticed(change):
    model = copy.deepcopy(tiny.speaker())
    fitted().suits(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        if change == "a row":
            weight[3] += 0.1
        elif change == "a column":
            weight[:, 3] += 0.1
        elif change == "eps":
            model.model.norm.variance_epsilon *= 10
        else:
            model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    with pytest.raises(IGLensError, match="fitted on another model"):
        fitted().suits(model)


def test_the_dtype_makes_no_other_model():
    for dtype in (torch.bfloat16, torch.float64):
        other = tiny.cast(tiny.speaker(), dtype)
        fitted().suits(other)
        assert ask(other, translators=fitted()).check().baseline == "embedding (translated)"
    fitted().suits(copy.deepcopy(tiny.speaker()).train())


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [-0.1, 2e6, 10**400, -math.inf, math.nan, "x", True, None, [0.1]])
def test_what_is_no_ridge_is_refused(ridge):
    with pytest.raises(IGLensError, match="ridge: expected a number, 0 … 1e6, or inf, got"):
        measured().solve(ridge)
    model, runs = counting(tiny.speaker())
    with pytest.raises(IGLensError, match="ridge: expected a number"):
        fit(model, tiny.tokenizer(), texts(), ridge=ridge, progress=False)
    assert not runs  # refused before the texts are read


@pytest.mark.parametrize("rank", [0, -1, D + 1, True, 1.5, "3", math.inf])
def test_what_is_no_rank_is_refused(rank):
    with pytest.raises(IGLensError, match=f"rank: expected None or a whole number of 1 … {D}, got"):
        measured().solve(rank=rank)


@pytest.mark.parametrize(
    ("given", "message"),
    [("the cat sat on the mat" * 9, "expected a list of texts, got 'the cat"), (b"the cat", "expected a list of texts"),
     (None, "expected a list of texts, got 'None'"), (5, "expected a list of texts, got '5'"),
     ([1, 2], "expected texts, got '1'"), (["the cat", None], "expected texts, got 'None'"),
     ([["the cat"]], "expected texts, got"), ([], "positions, got 0; add text"),
     (["", ""], "positions, got 0; add text"), (["a", "b"] * 40, "positions, got 0; add text"),
     (["xyz"], f"more than {D} positions, got 2; add text")],
)  # fmt: skip
def test_what_is_no_text_to_fit_on_is_refused(given, message):
    with pytest.raises(IGLensError, match=f"^texts: .*{message}"):
        fit(tiny.speaker(), tiny.tokenizer(), given, progress=False)


def test_more_positions_than_the_width_are_needed():
    made = letters(0, "xyzXYZ.,:;", D + 2)
    with pytest.raises(IGLensError, match=f"expected more than {D} positions, got {D}; add text"):
        fit(tiny.speaker(), tiny.tokenizer(), [made[:-1]], progress=False)
    assert fit(tiny.speaker(), tiny.tokenizer(), [made], progress=False).tokens == D + 1


def test_states_that_are_not_finite_are_refused():
    model = copy.deepcopy(tiny.speaker())
    model.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.nan
    with pytest.raises(IGLensError, match=r"residual stream at layer \[2\] is not finite"):
        fit(model, tiny.tokenizer(), texts(), progress=False)


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.01, math.inf])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_gives_back_what_was_saved(tmp_path, kind, ridge):
    fitted(ridge=ridge).save(kind(tmp_path / "one.safetensors"))
    back = Translators.load(kind(tmp_path / "one.safetensors"))
    assert same(back, fitted(ridge=ridge)) and back.maps.dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]
    a, b = (ask(tiny.speaker(), translators=one) for one in (back, fitted(ridge=ridge)))
    assert torch.equal(a.credits, b.credits)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(IGLensError, match=r"the folder .*nowhere does not exist; make it first"):
        fitted().save(tmp_path / "nowhere" / "one.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, step):
    def full(*args):
        if step == "write":
            open(args[0], "wb").close()  # half of a file is there when the disk is full
        raise OSError("no space left")

    path = tmp_path / "one.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(*((Path, "write_bytes") if step == "write" else (os, "replace")), full)
        with pytest.raises(IGLensError, match=r"cannot write .*no space left; choose another place"):
            fitted().save(path)
        assert list(tmp_path.iterdir()) == []
    fitted().save(path)
    monkeypatch.setattr(*((Path, "write_bytes") if step == "write" else (os, "replace")), full)
    with pytest.raises(IGLensError, match="cannot write"):
        fitted(ridge=1.0).save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["one.safetensors"]
    assert same(Translators.load(path), fitted())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    fitted().save(tmp_path / "one")
    whole = (tmp_path / "one").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(IGLensError, match=r"load: .*cut is not a file written by Translators\.save"):
        Translators.load(tmp_path / "cut")


KEPT = {"model": "a", "tokens": 9, "ridge": 0.1}
LABELS = json.dumps(KEPT)
WRONG = (
    {"model": 5}, {"model": None}, {"tokens": "9"}, {"tokens": 9.0}, {"tokens": True}, {"tokens": None},
    {"ridge": "0.1"}, {"ridge": None}, {"ridge": True}, {"ridge": [0.1]}, {"ridge": -0.1}, {"ridge": -math.inf},
    {"ridge": math.nan},
)  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "labels"),
    [({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, None),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, {"iglens": LABELS}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, {"translators": "nonsense"}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, {"translators": "{}"}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, {"translators": "[1]"}),
     ({"maps": torch.zeros(N, D, D)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D + 1), "shifts": torch.zeros(N, D)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N + 1, D)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N)}, {"translators": LABELS}),
     ({"maps": torch.full((N, D, D), math.nan), "shifts": torch.zeros(N, D)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.full((N, D), math.inf)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D).long(), "shifts": torch.zeros(N, D)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D).bool()}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D).to(torch.float8_e4m3fn), "shifts": torch.zeros(N, D)}, {"translators": LABELS}),
     ({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, {"translators": json.dumps(KEPT | {"kind": "a"})}),
     *(({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, {"translators": json.dumps(KEPT | one)})
       for one in WRONG)],
    ids=["no labels", "other labels", "no JSON", "empty", "a list", "no shifts", "not square", "other depth",
         "one axis", "NaN", "infinity", "whole numbers", "truth values", "float8", "one label more",
         *map(str, WRONG)],
)  # fmt: skip
def test_a_foreign_file_is_refused(tmp_path, tensors, labels):
    save_file(tensors, tmp_path / "one", labels)
    with pytest.raises(IGLensError, match=r"load: .*one is not a file written by Translators\.save"):
        Translators.load(tmp_path / "one")


def test_the_foreign_files_differ_from_a_good_one_in_one_thing(tmp_path):
    save_file({"maps": torch.zeros(N, D, D), "shifts": torch.zeros(N, D)}, tmp_path / "one", {"translators": LABELS})
    assert Translators.load(tmp_path / "one").tokens == 9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"maps": torch.full((N, D, D), math.nan)}, "maps or shifts are not finite"),
     ({"shifts": torch.full((N, D), math.inf)}, "maps or shifts are not finite"),
     ({"shifts": torch.zeros(N, D).long()}, r"maps or shifts are not floats of .* but torch\.float32, torch\.int64"),
     ({"shifts": torch.zeros(D)}, rf"maps \[{N}, {D}, {D}\] do not fit shifts \[{D}\]"),
     *((one, "no model, tokens and ridge: ") for one in WRONG)],
    ids=["NaN", "infinity", "whole numbers", "one axis", *map(str, WRONG)],
)  # fmt: skip
def test_what_load_refuses_is_not_written(tmp_path, wrong, message):
    with pytest.raises(IGLensError, match=f"^save: {message}.*; fit them anew, on other text or with a larger ridge$"):
        dataclasses.replace(fitted(), **wrong).save(tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def test_no_file_and_a_folder_are_refused(tmp_path):
    result = ask(tiny.speaker())
    result.save(tmp_path / "attribution")
    for path in (tmp_path / "none", tmp_path, tmp_path / "attribution"):
        with pytest.raises(IGLensError, match="is not a file written by"):
            Translators.load(path)


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A cache folder of its own, and a short text."""
    (tmp_path / "text.json").write_text(json.dumps({"fit": texts()}), encoding="utf-8")
    monkeypatch.setattr(translators, "TEXT", tmp_path / "text.json")
    monkeypatch.setenv("IGLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*.safetensors"))


def test_a_model_is_fitted_once(place, capsys):
    model, runs = counting(tiny.speaker())
    first = for_model(model, tiny.tokenizer())
    assert str(place) in capsys.readouterr().err and len(runs) == len(texts())
    assert same(first, measured().solve(translators.RIDGE))
    again = for_model(model, tiny.tokenizer())
    assert len(runs) == len(texts()) and capsys.readouterr().err == "" and same(again, first)
    assert len(files(place)) == len(translators.RIDGES) and not list(place.glob("*.part"))
    assert same(for_model(tiny.cast(model, torch.bfloat16), tiny.tokenizer()), first)  # the same weights


def test_every_ridge_comes_from_the_one_pass(place):
    model, runs = counting(tiny.speaker())
    for ridge in translators.RIDGES:
        assert same(for_model(model, tiny.tokenizer(), ridge), measured().solve(ridge))
    assert len(runs) == len(texts()) and translators.RIDGE in translators.RIDGES
    for ridge in (0.5, True, "0.01", None):
        with pytest.raises(IGLensError, match=r"ridge: expected one of .*, got .*; for others use fit"):
            for_model(model, tiny.tokenizer(), ridge)


def test_another_model_or_another_text_gets_other_files(place):
    for_model(tiny.speaker(), tiny.tokenizer())
    other = for_model(tuned("model.layers.1.mlp.up_proj"), tiny.tokenizer())
    assert len(files(place)) == 2 * len(translators.RIDGES) and not same(other, fitted())
    translators.TEXT.write_text(json.dumps({"fit": texts(seed=1)}), encoding="utf-8")
    moved = for_model(tiny.speaker(), tiny.tokenizer())
    assert len(files(place)) == 3 * len(translators.RIDGES) and not same(moved, fitted())


@pytest.mark.parametrize("damage", ["missing", "truncated", "another model's", "another ridge's"])
def test_a_file_that_is_not_the_right_one_is_made_again(place, damage):
    for_model(tiny.speaker(), tiny.tokenizer())
    before = files(place)
    for path in before:
        if damage == "missing":
            path.unlink()
        elif damage == "truncated":
            path.write_bytes(path.read_bytes()[:-9])
        else:
            measured("gpt2" if "model" in damage else "llama").solve(0.5).save(path)
    model, runs = counting(tiny.speaker())
    for _ in range(2):
        assert same(for_model(model, tiny.tokenizer()), measured().solve(translators.RIDGE))
    assert len(runs) == len(texts()) and files(place) == before


def test_a_text_that_is_too_short_leaves_no_file(place):
    translators.TEXT.write_text(json.dumps({"fit": ["the cat"]}), encoding="utf-8")
    with pytest.raises(IGLensError, match="add text"):
        for_model(tiny.speaker(), tiny.tokenizer())
    assert files(place) == []


def test_the_projects_text_is_there():
    text = translators.text()
    assert {"fit", "held out", "public domain"} <= set(text)
    assert len(text["fit"]) >= 40 and not set(text["fit"]) & {*text["held out"], *text["public domain"].values()}
    assert any(one.startswith("<|im_start|>") for one in text["fit"])


# ---------------------------------------------------------------------------------------------------------------------
# How well the head reads
# ---------------------------------------------------------------------------------------------------------------------


def test_a_sample_is_spread_over_the_texts():
    some = ["xyzXYZ.,:;", "a", "XXYYZZ::"]
    states, following = sample(tiny.speaker(), tiny.tokenizer(), some)
    rows = [torch.tensor(tiny.tokenizer().encode(one)) for one in (some[0], some[2])]
    assert torch.equal(following, torch.cat([ids[2:] for ids in rows]))
    assert torch.equal(states, torch.cat([tiny.stream(tiny.speaker(), ids)[:, 1:-1] for ids in rows], 1))
    few, ids = sample(tiny.speaker(), tiny.tokenizer(), some, count=5)
    at = torch.linspace(0, len(following) - 1, 5).round().long()
    assert few.shape == (N + 1, 5, D) and torch.equal(few, states[:, at]) and torch.equal(ids, following[at])


@pytest.mark.parametrize(
    ("given", "count"), [("the cat", 5), (None, 5), (["a", "b"], 5), ([], 5), (texts(2), 0), (texts(2), 1.5)]
)
def test_what_gives_no_sample_is_refused(given, count):
    with pytest.raises(IGLensError, match=r"^sample: expected"):
        sample(tiny.speaker(), tiny.tokenizer(), given, count)


@pytest.mark.parametrize("layers", [[N + 1], [0, -1]])
def test_layers_that_are_not_there_are_not_read(layers):
    held = sample(tiny.speaker(), tiny.tokenizer(), texts(2), 5)
    with pytest.raises(IGLensError, match=r"^reading: expected .* layers of 0 … n"):
        reading(Readout(tiny.speaker()), *held, layers)
    with pytest.raises(IGLensError, match=r"^reading: expected states \[n \+ 1, R, d\], next ids \[R\]"):
        reading(Readout(tiny.speaker()), held[0], held[1][1:], [0])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_reading_measures_what_the_head_makes_of_states(name, moved):
    model, one = model_of(name), fitted(name) if moved else None
    states, following = sample(model, tiny.tokenizer(), texts(3, seed=5), count=40)
    frame = reading(Readout(model), states, following, range(N + 1), one)
    assert frame.index.tolist() == list(range(N + 1)) and frame.index.name == "layer"
    assert frame.columns.tolist() == ["kl", "cross_entropy", "top1"]
    assert frame.loc[N, "kl"] == 0 and frame.loc[N, "top1"] == 1
    wide = doubled(name)
    final = tiny.log_probs(tiny.oracle(wide, states[-1].double()))
    for layer in range(N + 1):
        h = by_hand(one, states[layer], layer) if moved else states[layer].double()
        log_p = tiny.log_probs(tiny.oracle(wide, h))
        expected = [
            (final.exp() * (final - log_p)).sum(-1).mean(),
            -log_p[torch.arange(40), following].mean(),
            (log_p.argmax(-1) == final.argmax(-1)).double().mean(),
        ]
        assert torch.allclose(
            torch.tensor(frame.loc[layer].tolist()), torch.stack(expected).float(), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_translated_lens_reads_held_out_states_better(name):
    model = model_of(name)
    held = sample(model, tiny.tokenizer(), texts(4, seed=9))
    plain, moved = (reading(Readout(model), *held, range(N), one) for one in (None, fitted(name, 0.01)))
    assert (moved["kl"] < plain["kl"]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Where the truth is known: block 2 fetches a mark that no head row reads, block 4 makes it the answer
# ---------------------------------------------------------------------------------------------------------------------


def strings(seed: int, often: bool = False) -> list[str]:
    """Random strings of few letters, so that each is seen often; every 60th is the source, or every second string's."""
    weights = [1, *[4] * 15]
    some = [letters(1000 * seed + i, toy.SOURCE + "aho?xyzABCDEFGH", 4 + i % 5, weights) for i in range(500)]
    return [toy.SOURCE + one[1:] if often and i % 2 else one for i, one in enumerate(some)]


def messenger(seed: int) -> nn.Module:
    """Blocks 1 and 3 are the identity, block 5 writes at random."""
    return toy.fetched(2, 4, logit=8.0, blocks=5, silent=(1, 3), seed=seed)


@cache
def taught(seed: int, often: bool = False) -> Translators:
    return fit(messenger(seed), toy.tokenizer(), strings(seed, often), progress=False)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_translation_credits_the_block_that_fetches(seed):
    model = messenger(seed)
    plain, moved = (
        explain(model, toy.tokenizer(), toy.PROMPT, answer=toy.ANSWER, translators=one).check()
        for one in (None, taught(seed))
    )
    assert plain.levels[0, 0] < 0.05 and moved.levels[0, 0] < 0.05
    assert plain.credits[0, 1].abs() < 0.05 and plain.credits[0, 3] > 0.9
    assert moved.credits[0, 1] > 0.85 and moved.credits[0, 3].abs() < 0.2
    assert moved.credits[0, 4].abs() < 0.3  # a block that writes at random lowers the answer's level a little
    for result in (plain, moved):
        assert result.credits[0, [0, 2]].abs().max() <= 1e-6
        assert result.completeness_error <= 1e-6 and result.faithfulness_error <= 1e-6


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("prompt", ["aho?", "xyz"])
def test_without_the_source_token_no_block_is_credited(seed, prompt):
    for one in (None, taught(seed)):
        result = explain(messenger(seed), toy.tokenizer(), prompt, answer=toy.ANSWER, translators=one)
        assert result.credits.abs().max() < 0.05 and result.levels.max() < 0.05


def test_translators_expect_what_their_text_is_full_of():
    result = explain(
        messenger(0), toy.tokenizer(), "aho?", answer=toy.ANSWER, translators=taught(0, often=True)
    ).check()
    assert result.levels[0, 0] > 0.7 and result.levels[0, -1] < 0.05
    assert result.credits[0, 1] < -0.7


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def default(smol):
    torch.set_num_threads(1)  # short texts: a second thread mostly waits where others compute, too
    model, tokenizer, readout = smol
    return model, tokenizer, readout, for_model(model, tokenizer)


def test_the_default_models_states_are_read_better(default):
    model, tokenizer, readout, one = default
    text = translators.text()
    assert one.maps.shape == (30, 576, 576) and one.ridge == translators.RIDGE and one.tokens > 5000
    some = [*text["held out"][:2], text["public domain"]["Melville, Moby-Dick, 1851"]]
    states, following = sample(model, tokenizer, some, 60)
    assert states.shape == (31, 60, 576) and following.shape == (60,)
    layers = [5, 15, 25, 29]
    plain, moved = (reading(readout, states, following, layers, each) for each in (None, one))
    assert (moved["kl"] < 0.6 * plain["kl"]).all()
    assert (moved["cross_entropy"] < plain["cross_entropy"]).all() and (moved["top1"] >= plain["top1"]).all()
    with torch.no_grad():
        norm, head = model.model.norm, model.lm_head.weight.double()
        both = torch.stack([states[-1].double(), by_hand(one, states[25], 25)])
        both = both * (both.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()
        final, log_p = (both @ head.T).log_softmax(-1)
    assert moved.loc[25, "kl"] == pytest.approx(float((final.exp() * (final - log_p)).sum(-1).mean()), abs=1e-4)
    expected = -float(log_p[torch.arange(60), following].mean())
    assert moved.loc[25, "cross_entropy"] == pytest.approx(expected, abs=1e-4)


def test_the_default_model_knows_paris_before_its_last_block(default):
    model, tokenizer, readout, one = default
    trace = read(model, tokenizer, "The capital of France is", answer=" Paris", chat=False)
    plain, moved = (attribute(readout, trace, translators=each).check() for each in (None, one))
    assert plain.onset().tolist() == [30] and moved.onset().tolist() in ([24], [25])
    assert plain.credits[0, -1] > 0.5 and moved.credits[0, -1] < -0.1
    assert moved.completeness_error <= 1e-5 and moved.faithfulness_error <= 1e-5
    assert torch.equal(plain.levels[:, -1], moved.levels[:, -1])
    assert (plain.baseline, moved.baseline) == ("embedding", "embedding (translated)")
