"""The path and its credits, against the oracle's probabilities at every layer."""

import dataclasses
import math
from functools import cache

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import IDS, D, N, V

from iglens_core import (
    IGLensError,
    Readout,
    Trace,
    attribute,
    explain,
    path_credits,
    read,
    residual_path,
    residual_stream,
)

CHAT = {"chat": False, "scope": "all"}
SEED = torch.Generator().manual_seed(11)
VECTOR = torch.randn(D, generator=SEED)
BASELINES = {
    "embedding": "embedding",
    "mean": "mean",
    "zero": "zero",
    "vector": VECTOR,
    "one for each": torch.randn(len(IDS) - 1, D, generator=SEED),
}


@cache
def readout(name="llama"):
    return Readout(tiny.shared(name))


@cache
def trace(name="llama"):
    """All tokens of IDS after the first, explained."""
    return read(tiny.shared(name), tiny.tokenizer(), IDS[:3].tolist(), answer=IDS[3:].tolist(), scope="all")


@cache
def oracle_levels(name="llama") -> torch.Tensor:
    """[T, n + 1], the oracle's probability of each token, layer 0 first."""
    rows = [tiny.levels(tiny.shared(name), IDS, t, int(IDS[t + 1])) for t in range(len(IDS) - 1)]
    return torch.stack(rows)


def oracle_at(states: torch.Tensor, targets, name="llama") -> torch.Tensor:
    """[T], the oracle's probability of targets [T] where the last block gives states [T, d]."""
    rows = torch.arange(len(states))
    return tiny.log_probs(tiny.oracle(tiny.shared(name), states)).exp()[rows, targets]


def close(a, b, tolerance=1e-6):
    return torch.allclose(torch.as_tensor(a).double(), torch.as_tensor(b).double(), rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Credits
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "opt_350m", "gemma2", "cohere", "bloom"])
def test_credits_are_the_changes_of_the_oracles_probability_from_layer_to_layer(name):
    result, expected = attribute(readout(name), trace(name)), oracle_levels(name)
    assert result.layers == tuple(range(1, N + 1))
    assert close(result.levels, expected)
    assert close(result.credits, expected[:, 1:] - expected[:, :-1])
    assert close(result.delta, expected[:, -1] - expected[:, 0])
    assert close(result.model_level, expected[:, -1])
    assert (result.credits < 0).any()
    assert (result.credits > 0).any()


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("layers", [None, 1, 2, [1], [0, 2]])
def test_credits_sum_to_delta(baseline, layers):
    result = attribute(readout(), trace(), baseline=BASELINES[baseline], layers=layers)
    assert close(result.credits.double().sum(1), result.delta)
    assert close(result.credits.double().sum(1), result.levels[:, -1].double() - result.levels[:, 0].double(), 1e-7)
    assert result.completeness_error <= 1e-6
    assert result.faithfulness_error <= 1e-6
    assert result.check(1e-6) is result


def test_delta_ends_at_the_models_own_probability_so_that_completeness_can_fail():
    own, best = trace().logits.clone(), trace().logits.argmax(-1)
    level = attribute(readout(), trace(), targets=best).levels[:, -1]
    row = int((level - 0.5).abs().argmin())  # where a logit moves its probability most
    own[row, best[row]] += 2e-5
    shift = 2e-5 * float(level[row] * (1 - level[row]))
    assert shift > 3e-6
    result = attribute(readout(), dataclasses.replace(trace(), logits=own), targets=best)
    assert result.completeness_error == pytest.approx(shift, rel=0.2)
    assert result.faithfulness_error == pytest.approx(shift, rel=0.2)


def test_float64_models_get_float64_credits():
    model = tiny.cast(tiny.shared("llama"), torch.float64)
    result = explain(model, tiny.tokenizer(), IDS[:3].tolist(), answer=IDS[3:].tolist())
    assert result.credits.dtype == result.levels.dtype == torch.float64
    assert result.dtype == "float64"
    expected = torch.stack([tiny.levels(model, IDS, t, int(IDS[t + 1])) for t in range(2, len(IDS) - 1)])
    assert close(result.levels, expected, 1e-12)
    result.check(1e-12)


@pytest.mark.parametrize("steps", [4, 64])
def test_the_number_of_steps_changes_nothing(steps):
    one, more = attribute(readout(), trace(), steps=1), attribute(readout(), trace(), steps=steps)
    assert torch.equal(one.credits, more.credits)
    assert (one.steps, more.steps) == (1, steps)
    assert close(more.credits, oracle_levels().diff(dim=1))


@pytest.mark.parametrize("steps", [1, 4, 64])
def test_the_number_of_steps_does_not_change_the_cost(steps):
    sizes = rows_of_the_head(lambda: path_credits(readout(), *path(), steps=steps))
    assert sum(sizes) == 15


def path(seed: int = 3):
    """States [3, 5, d] and targets [5]: 15 rows, that is 7 + 7 + 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, D, generator=generator) * 3, torch.randint(V, (5,), generator=generator)


def rows_of_the_head(call) -> list[int]:
    """How many states the head was given in each call."""
    sizes = []
    handle = tiny.shared("llama").lm_head.register_forward_hook(lambda m, args, out: sizes.append(out[..., 0].numel()))
    call()
    handle.remove()
    return sizes


def budget(rows: int) -> float:
    """MB in which so many rows of logits and states and their copies fit, and half a row more."""
    return 4 * (4 * V + 6 * D) * (rows + 0.5) / 2**20


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1] * 15), (7, [7, 7, 1]), (14, [14, 1]), (15, [15]), (4096, [15])])
def test_the_result_does_not_depend_on_the_chunks(rows, sizes):
    states, targets = path()
    got = []
    call = lambda: got.extend(path_credits(readout(), states, targets, memory_mb=budget(rows)))  # noqa: E731
    assert rows_of_the_head(call) == sizes
    expected = torch.stack([oracle_at(point, targets) for point in states], 1)
    assert close(got[1], expected)
    assert close(got[0], expected.diff(dim=1))


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_attribution_does_not_depend_on_the_chunks(rows):
    result = attribute(readout(), trace(), memory_mb=budget(rows))
    assert close(result.levels, oracle_levels())
    result.check(1e-6)


def test_path_credits_of_one_segment_and_one_token():
    states, targets = path()
    credits, levels = path_credits(readout(), states[:2, :1], targets[:1])
    assert (list(credits.shape), list(levels.shape)) == ([1, 1], [1, 2])
    assert close(credits[0, 0], levels[0, 1] - levels[0, 0])


def test_order_of_the_tokens_permutes_the_rows_only():
    states, targets = path()
    order = torch.tensor([3, 0, 4, 1, 2])
    plain = path_credits(readout(), states, targets)
    permuted = path_credits(readout(), states[:, order], targets[order])
    assert close(permuted[0], plain[0][order])
    assert close(permuted[1], plain[1][order])
    assert not close(permuted[0], plain[0], 1e-2)


def test_repeated_tokens_get_a_row_each():
    result = explain(tiny.speaker(), tiny.tokenizer(), "the", answer=" the cat sat on the mat", **CHAT)
    assert result.tokens == (" the", " cat", " sat", " on", " the", " mat")
    assert result.credits.shape == (6, N)
    ids = torch.tensor(tiny.tokenizer().encode("the the cat sat on the mat"))
    expected = torch.stack([tiny.levels(tiny.speaker(), ids, t, int(ids[t + 1])) for t in range(6)])
    assert close(result.levels, expected)
    assert not close(result.credits[0], result.credits[4], 1e-3)


def test_targets_other_than_the_tokens():
    targets = torch.tensor([41, 0, V - 1, 41, 7, 8, 9])
    result = attribute(readout(), trace(), targets=targets).check(1e-6)
    expected = torch.stack([tiny.levels(tiny.shared("llama"), IDS, t, int(targets[t])) for t in range(7)])
    assert close(result.levels, expected)
    assert close(result.model_level, expected[:, -1])
    assert torch.equal(result.target_ids, targets)
    assert torch.equal(result.token_ids, IDS[1:])
    assert torch.equal(result.positions, torch.arange(7))


def test_one_target_for_all_tokens():
    one, each = attribute(readout(), trace(), targets=41), attribute(readout(), trace(), targets=[41] * 7)
    assert torch.equal(one.credits, each.credits)
    assert one.target_ids.tolist() == [41] * 7


def test_targets_as_texts_in_explain():
    options = {"answer": " sat on", "chat": False}
    model, tokenizer = tiny.speaker(), tiny.tokenizer()
    one = explain(model, tokenizer, "the cat", targets=" mat", **options)
    assert one.tokens == (" mat", " mat")
    assert one.target_ids.tolist() == tokenizer.encode(" mat") * 2
    each = explain(model, tokenizer, "the cat", targets=[" mat", 41], **options)
    assert each.target_ids.tolist() == [*tokenizer.encode(" mat"), 41]
    assert torch.equal(each.credits[0], one.credits[0])
    trace = read(model, tokenizer, "the cat", **options)
    assert torch.equal(attribute(Readout(model), trace, targets=[" mat", 41]).credits, each.credits)


def test_a_state_that_was_zeroed_on_its_way_is_noticed():
    stream = trace().stream.clone()
    stream[-1, 3] = 0
    with pytest.raises(IGLensError, match="the model's own"):
        attribute(readout(), dataclasses.replace(trace(), stream=stream))


# ---------------------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "baseline", "expected"),
    [
        (None, "embedding", (1, 2, 3)),
        (None, "zero", (0, 1, 2, 3)),
        (None, "mean", (0, 1, 2, 3)),
        (None, VECTOR, (0, 1, 2, 3)),
        (1, "embedding", (3,)),
        (2, "embedding", (2, 3)),  # round(1.5) is 2
        (3, "zero", (1, 2, 3)),
        ([2], "embedding", (2, 3)),
        ([3], "embedding", (3,)),
        ([2, 1, 2, 1], "embedding", (1, 2, 3)),
        ((0, 2), "zero", (0, 2, 3)),
        ([0], "embedding", (0, 3)),
        (range(2), "zero", (0, 1, 3)),
        ({1, 3}, "mean", (1, 3)),
        (iter([1]), "zero", (1, 3)),
        (torch.tensor([1, 2]), "zero", (1, 2, 3)),
        (torch.tensor(3), "zero", (1, 2, 3)),
    ],
)
def test_chosen_layers(layers, baseline, expected):
    states, chosen = residual_path(trace(), layers=layers, baseline=baseline)
    assert chosen == expected
    assert states.shape == (len(expected) + 1, 7, D)
    for point, layer in zip(states[1:], expected, strict=True):
        assert torch.equal(point, trace().stream[layer, :7])


def test_an_integer_spreads_the_layers_evenly():
    deep = dataclasses.replace(trace(), stream=torch.arange(31.0)[:, None, None].expand(31, len(IDS), D))
    assert residual_path(deep, layers=4)[1] == tuple(round(30 * j / 4) for j in (1, 2, 3, 4)) == (8, 15, 22, 30)
    assert residual_path(deep, layers=30)[1] == tuple(range(1, 31))


@pytest.mark.parametrize("baseline", ["embedding", "zero", "vector", "one for each"])
@pytest.mark.parametrize("layers", [[1], [2], [1, 2], [0], []])
def test_dropping_a_layer_adds_its_credit_to_the_next(baseline, layers):
    baseline = BASELINES[baseline]
    full = attribute(readout(), trace(), layers=[0, 1, 2, 3], baseline=baseline)
    part = attribute(readout(), trace(), layers=[*layers, 3], baseline=baseline)
    chosen = [*layers, 3]
    below = -1
    for j, layer in enumerate(chosen):
        merged = full.credits[:, below + 1 : layer + 1].double().sum(1)
        assert close(part.credits[:, j], merged, 5e-7)
        below = layer
    assert torch.equal(part.delta, full.delta)


# ---------------------------------------------------------------------------------------------------------------------
# Baselines and translators
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["embedding", "zero", "vector", "one for each"])
def test_path_starts_at_the_baseline(baseline):
    rows = trace().stream[0, :7]
    expected = {"embedding": rows, "zero": rows * 0, "vector": VECTOR.expand(7, D)}.get(baseline, BASELINES[baseline])
    states, _ = residual_path(trace(), baseline=BASELINES[baseline], layers=[2])
    assert torch.equal(states[0], expected)
    result = attribute(readout(), trace(), baseline=BASELINES[baseline], layers=[2])
    assert result.baseline == (baseline if baseline in ("embedding", "zero") else "tensor")
    assert close(result.levels[:, 0], oracle_at(expected, IDS[1:]))


@pytest.mark.parametrize(("layers", "lowest"), [(None, 0), ([0], 0), ([1], 1), ([3, 2], 2), (1, 3)])
def test_mean_baseline_is_the_mean_of_the_lowest_layer_up_to_the_position(layers, lowest):
    states, _ = residual_path(trace(), baseline="mean", layers=layers)
    for t in range(7):
        expected = trace().stream[lowest, : t + 1].double().mean(0)
        assert close(states[0, t], expected, 1e-6)


def test_mean_baseline_does_not_see_later_positions():
    stream = trace().stream.clone()
    stream[:, 4:] += 1e3
    later = dataclasses.replace(trace(), stream=stream)
    plain, changed = residual_path(trace(), baseline="mean")[0], residual_path(later, baseline="mean")[0]
    assert torch.equal(plain[:, :4], changed[:, :4])
    assert not close(plain[0, 4], changed[0, 4], 1)


def test_each_token_of_a_long_text_starts_at_its_own_baseline():
    ids = torch.tensor([3 + 7 * i % 90 for i in range(131)])
    long = read(tiny.shared("llama"), tiny.tokenizer(), ids[:1], answer=ids[1:])
    base = torch.randn(130, D, generator=torch.Generator().manual_seed(1))
    result = attribute(readout(), long, baseline=base, layers=[1]).check(1e-6)
    assert close(result.levels[:, 0], oracle_at(base, ids[1:]))
    assert close(result.levels[:, 1], oracle_at(long.stream[1, :130], ids[1:]))


def left_padded(model, tokenizer, ids: torch.Tensor, pads: int, token: int) -> Trace:
    """A trace of the last token of a left-padded sequence, from the public stream alone."""
    full = torch.cat([torch.full((pads,), token), ids])
    mask = (torch.arange(len(full)) >= pads).long()
    return Trace(
        input_ids=full,
        attention_mask=mask,
        stream=residual_stream(model, full, mask),
        positions=torch.arange(pads, len(full) - 1),
        token_ids=full[pads + 1 :],
        tokens=tuple(f"id {i}" for i in full[pads + 1 :].tolist()),
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mean_baseline_leaves_pads_out(name):
    padded = left_padded(tiny.shared(name), None, IDS, 5, 7)
    expected, _ = residual_path(trace(name), baseline="mean")
    got, _ = residual_path(padded, baseline="mean")
    assert close(got, expected, 2e-5)
    everything = padded.stream[0, :6].double().mean(0)
    assert not close(got[0, 0], everything, 0.1)
    a, b = attribute(readout(name), padded, baseline="mean"), attribute(readout(name), trace(name), baseline="mean")
    assert close(a.credits, b.credits, 1e-5)


def test_mean_baseline_at_a_pad_is_refused():
    padded = left_padded(tiny.shared("llama"), None, IDS, 5, 7)
    at_pad = dataclasses.replace(padded, positions=padded.positions - 1)
    with pytest.raises(IGLensError, match="padding position"):
        residual_path(at_pad, baseline="mean")


def test_default_model_leaves_five_pads_out_of_the_mean(smol):
    model, tokenizer, own = smol
    ids = torch.tensor(tokenizer.encode("The capital of France is Paris"))
    plain = read(model, tokenizer, ids[:5].tolist(), answer=ids[5:].tolist(), scope="all")
    padded = left_padded(model, tokenizer, ids, 5, tokenizer.pad_token_id)
    expected = attribute(own, plain, baseline="mean", layers=[0])
    got = attribute(own, padded, baseline="mean", layers=[0])
    assert close(got.levels, expected.levels, 1e-5)
    base = plain.stream[0, :5].double().mean(0)
    assert close(residual_path(padded, baseline="mean", layers=[0])[0][0, -1], base, 1e-5)


def test_identity_translators_change_no_bit():
    for baseline in BASELINES.values():
        plain = attribute(readout(), trace(), baseline=baseline)
        same = attribute(readout(), trace(), baseline=baseline, translators=lambda states, layers: states)
        assert torch.equal(plain.credits, same.credits)
        assert torch.equal(plain.levels, same.levels)
        assert torch.equal(plain.delta, same.delta)


def test_translators_are_told_the_layers_and_move_the_embedding_baseline_only():
    shift = torch.linspace(-1, 1, D)

    def translators(states, layers):
        assert len(states) == len(layers)
        return states + shift * (3 - torch.tensor(layers))[:, None, None]

    states, chosen = residual_path(trace(), layers=[1], translators=translators)
    assert chosen == (1, 3)
    stream = trace().stream[:, :7]
    assert torch.equal(states, torch.stack([stream[0] + 3 * shift, stream[1] + 2 * shift, stream[3]]))
    for baseline, expected in (("zero", stream[0] * 0), (VECTOR, VECTOR.expand(7, D))):
        assert torch.equal(residual_path(trace(), baseline=baseline, translators=translators)[0][0], expected)
    result = attribute(readout(), trace(), layers=[1], translators=translators).check(1e-6)
    assert result.baseline == "embedding (translated)"
    expected = torch.stack([oracle_at(point, IDS[1:]) for point in states], 1)
    assert close(result.levels, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Onset and non-monotonicity
# ---------------------------------------------------------------------------------------------------------------------


def handwritten(credits, delta=None, layers=(1, 2, 3)):
    credits = torch.tensor(credits)
    delta = credits.sum(1) if delta is None else torch.tensor(delta)
    return dataclasses.replace(attribute(readout(), trace()), credits=credits, delta=delta, layers=layers)


@pytest.mark.parametrize(
    ("credits", "mass", "layer"),
    [
        ([0.1, 0.2, 0.7], 0.5, 9),
        ([0.5, 0.25, 0.25], 0.5, 2),
        ([0.25, 0.25, 0.5], 0.5, 5),
        ([0.0, 0.0, 0.3], 0.5, 9),
        ([-0.6, 0.2, 0.2], 0.5, 2),
        ([0.2, -0.6, 0.9], 0.4, 5),
        ([0.1, 0.2, 0.7], 0.05, 2),
        ([0.1, 0.2, 0.7], 1, 9),
        ([0.1, 0.2, 0.0], 1, 5),
        ([0.1, 0.2, 0.3], 1.0, 9),
        ([0.0, 0.0, 0.0], 0.5, -1),
        ([1e-30, 0.0, 0.0], 0.5, 2),
    ],
)
def test_onset_is_the_first_layer_at_which_the_mass_is_reached(credits, mass, layer):
    result = handwritten([credits, [0.0, 1.0, 0.0]], layers=(2, 5, 9))
    assert result.onset(mass).tolist() == [layer, 5]


def test_onset_takes_half_the_mass_by_default():
    result = handwritten([[0.4, 0.2, 0.4]])
    assert result.onset().tolist() == [2] == result.onset(0.5).tolist()


def test_non_monotonicity_is_the_way_over_the_distance():
    result = handwritten(
        [[0.1, 0.2, 0.3], [-0.1, -0.2, -0.3], [0.5, -0.25, 0.25], [0.25, 0.0, -0.25], [0.0, 0.0, 0.0]],
        delta=[0.6, -0.6, 0.5, 0.0, 0.0],
    )
    index = result.non_monotonicity().tolist()
    assert index[:3] == pytest.approx([1, 1, 2], rel=1e-6)
    assert index[3] == math.inf
    assert math.isnan(index[4])


# ---------------------------------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------------------------------

_TARGETS = st.lists(st.integers(0, V - 1), min_size=7, max_size=7)
_LAYERS = st.sets(st.integers(0, N - 1))


def _vector(seed: int, scale: float) -> torch.Tensor:
    return torch.randn(D, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=60, deadline=None)
@given(
    targets=_TARGETS,
    layers=_LAYERS,
    baseline=st.sampled_from(["embedding", "mean", "zero"]) | st.builds(_vector, st.integers(0, 99), st.floats(0, 50)),
    rows=st.integers(1, 40),
)
def test_property_credits_sum_to_delta(targets, layers, baseline, rows):
    result = attribute(
        readout(), trace(), targets=targets, layers=[*layers, N], baseline=baseline, memory_mb=budget(rows)
    )
    states, _ = residual_path(trace(), layers=[*layers, N], baseline=baseline)
    change = oracle_at(states[-1], targets) - oracle_at(states[0], targets)
    assert close(result.credits.double().sum(1), change)
    result.check(1e-6)


@settings(max_examples=30, deadline=None)
@given(targets=_TARGETS, order=st.permutations(range(7)), rows=st.integers(1, 40))
def test_property_order_of_the_tokens_permutes_the_rows(targets, order, rows):
    states, targets = residual_path(trace())[0], torch.tensor(targets)
    plain = path_credits(readout(), states, targets)
    permuted = path_credits(readout(), states[:, order], targets[order], memory_mb=budget(rows))
    assert close(permuted[0], plain[0][order])
    assert close(permuted[1], plain[1][order])


@settings(max_examples=60, deadline=None)
@given(targets=_TARGETS, coarse=_LAYERS, more=_LAYERS, seed=st.integers(0, 99), scale=st.floats(0, 50))
def test_property_coarse_credits_are_sums_of_fine_ones(targets, coarse, more, seed, scale):
    options = {"targets": targets, "baseline": _vector(seed, scale)}
    low = attribute(readout(), trace(), layers=[*coarse, N], **options)
    fine = attribute(readout(), trace(), layers=[*coarse, *more, N], **options)
    below = -1
    for j, layer in enumerate(low.layers):
        inside = [i for i, other in enumerate(fine.layers) if below < other <= layer]
        assert close(low.credits[:, j], fine.credits[:, inside].double().sum(1))
        below = layer


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paris(smol):
    model, tokenizer, own = smol
    return own, read(model, tokenizer, "The capital of France is", answer=" Paris", chat=False)


@pytest.mark.parametrize("steps", [1, 4, 64])
def test_default_model_gives_the_known_credits_at_every_step_count(paris, steps):
    result = attribute(*paris, steps=steps).check(1e-5)
    assert result.credits[0, -3:].tolist() == pytest.approx([0.0102, 0.0598, 0.7022], abs=6e-5)
    assert float(result.levels[0, -1]) == pytest.approx(0.77253, abs=1e-5)
    assert result.layers == tuple(range(1, 31))


@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_default_model_does_not_depend_on_the_chunks(paris, rows):
    plain = attribute(*paris, layers=14)
    chunked = attribute(*paris, layers=14, memory_mb=12 * 49152 * (rows + 0.5) / 2**20)
    assert close(chunked.credits, plain.credits)
    chunked.check(1e-5)


def test_default_model_spreads_evenly_at_the_zero_vector(paris):
    result = attribute(*paris, baseline="zero", layers=[0])
    assert float(result.levels[0, 0]) == pytest.approx(1 / 49152, rel=1e-5)


def test_default_model_never_holds_all_logits_of_a_long_text(smol):
    model, tokenizer, own = smol
    ids = [504 + 37 * i % 40000 for i in range(512)]
    trace = read(model, tokenizer, ids[:1], answer=ids[1:], scope="all")
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda m, args, out: sizes.append(out.numel() * out.element_size()))
    result = attribute(own, trace, layers=[15], memory_mb=128)
    handle.remove()
    assert result.credits.shape == (511, 2)
    assert max(sizes) * 3 <= 128 * 2**20
    assert trace.logits.shape == (64, 49152)
    assert result.completeness_error <= 1e-5
    assert result.faithfulness_error <= 1e-5
