"""Paths, curves, gradients and counts for the theory, against sums and differences that share no code with them."""

import dataclasses
import math
import warnings
from functools import cache

import pandas as pd
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from iglens_core import IGLensError, Readout, attribute, path_credits, read
from iglens_lab import theory, toy

ROWS = torch.tensor([[0.0, 2.0], [-1.7, -1.0], [1.7, -1.0]], dtype=torch.float64)
START, END = torch.tensor([-1.4, -1.2], dtype=torch.float64), torch.tensor([0.4, 1.6], dtype=torch.float64)
NAMES = ["straight", "bent", "detour"]


@cache
def readout(name="llama", dtype=torch.float32):
    return Readout(tiny.cast(tiny.shared(name), dtype))


@cache
def flat(norm=False):
    """A readout of the plane."""
    return Readout(toy.walking(torch.stack([START, END]), ROWS, norm=norm))


def by_hand(h, target, norm=False):
    """p(target) at states [·, 2] of the plane."""
    h = h / (h.square().mean(-1, keepdim=True) + 1e-2).sqrt() if norm else h
    return (h @ ROWS.T).softmax(-1)[..., target]


def path(k=3, T=4, d=tiny.D, seed=0):
    return torch.randn(k + 1, T, d, generator=torch.Generator().manual_seed(seed)) * 3


# ---------------------------------------------------------------------------------------------------------------------
# Refining a path
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 2, 7, 64])
def test_a_refined_path_keeps_its_points_and_puts_equal_steps_between_them(m, dtype):
    states = path().to(dtype)
    dense = theory.densify(states, m)
    assert dense.dtype == dtype and dense.shape == (3 * m + 1, 4, tiny.D)
    assert torch.equal(dense[::m], states)
    wide = states.double()
    for j in range(3):
        for i in range(m):
            expected = wide[j] * (m - i) / m + wide[j + 1] * i / m
            error = (dense[j * m + i].double() - expected).abs().max()
            assert error <= 8 * torch.finfo(dtype).eps * wide.abs().max()


def test_a_refined_path_stays_on_its_device_and_the_given_one_as_it_is():
    assert theory.densify(torch.zeros(3, 2, 5, device="meta"), 4).device.type == "meta"
    states = path()
    before = states.clone()
    theory.densify(states, 4).add_(1)
    theory.densify(states, 1).add_(1)
    assert torch.equal(states, before)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    k=st.integers(1, 4),
    T=st.integers(1, 3),
    m=st.integers(1, 9),
    seed=st.integers(0, 99),
    name=st.sampled_from(["llama", "gpt2", "gemma2"]),
    scalar=st.sampled_from(["prob", "log_prob", "entropy"]),
)
def test_the_credits_of_a_refined_step_sum_to_the_credit_of_the_step(k, T, m, seed, name, scalar):
    states, targets = path(k, T, seed=seed).double(), torch.arange(T)
    head = readout(name, torch.float64)
    coarse, levels = path_credits(head, states, targets, scalar=scalar)
    fine, _ = path_credits(head, theory.densify(states, m), targets, scalar=scalar)
    torch.testing.assert_close(fine.view(T, k, m).sum(2), coarse, atol=1e-10, rtol=0)
    torch.testing.assert_close(fine.sum(1), levels[:, -1] - levels[:, 0], atol=1e-10, rtol=0)


def test_a_refined_path_of_a_half_precision_model_is_read_as_before():
    head, states = readout("llama", torch.bfloat16), path().bfloat16()
    _, coarse = path_credits(head, states, [1, 2, 3, 4])
    _, fine = path_credits(head, theory.densify(states, 5), [1, 2, 3, 4])
    assert torch.equal(fine[:, ::5], coarse)


@pytest.mark.parametrize("m", [0, -1, 1.0, True, "2", None, math.nan])
def test_a_number_of_steps_that_is_none_is_refused(m):
    with pytest.raises(IGLensError, match="m: expected a whole number of steps, at least 1"):
        theory.densify(path(), m)


@pytest.mark.parametrize("states", [torch.zeros(3, 4), torch.zeros(1, 2, 3), torch.zeros(2, 2, 2, 2), [[1.0]], None,
                                    torch.tensor([[[0, 0]], [[4, 8]]])])  # fmt: skip
def test_what_is_no_path_is_refused(states):
    with pytest.raises(IGLensError, match=r"states: expected a path of floats \[k \+ 1, T, d\], got \["):
        theory.densify(states, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Curves and integrals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bend", [0.45, -1.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_three_curves_have_the_same_ends(dtype, bend):
    start, end = START.to(dtype), END.to(dtype)
    found = theory.curves(start, end, bend=bend, points=100)
    assert list(found) == NAMES
    for curve in found.values():
        assert curve.shape == (101, 2) and curve.dtype == torch.float64
        exact = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(curve[[0, -1]], torch.stack([start, end]).double(), atol=exact, rtol=0)


@pytest.mark.parametrize(("start", "end"), [(torch.zeros(3), torch.ones(3)), (torch.zeros(2), torch.ones(1, 2))])
def test_curves_between_other_than_points_of_a_plane_are_refused(start, end):
    with pytest.raises(IGLensError, match=r"expected two points of a plane, \[2\] each, got"):
        theory.curves(start, end)


def across(curve):
    """How far points are from the straight line, signed, in lengths of the chord."""
    chord = END - START
    gap = curve - START
    return (chord[0] * gap[:, 1] - chord[1] * gap[:, 0]) / chord.square().sum()


@pytest.mark.parametrize("bend", [0.45, -0.8])
def test_the_curves_leave_the_straight_line_as_they_say(bend):
    found = theory.curves(START, END, bend=bend)
    length = {name: float(curve.diff(dim=0).norm(dim=1).sum()) for name, curve in found.items()}
    assert float(across(found["straight"]).abs().max()) < 1e-12
    assert float(across(found["bent"])[128]) == pytest.approx(bend)
    assert float(across(found["bent"]).abs().max()) == pytest.approx(abs(bend))
    assert float(across(found["detour"]).abs().max()) == pytest.approx(abs(bend), rel=1e-3)
    assert length["straight"] < length["bent"] < length["detour"]
    along = (found["detour"] - START) @ (END - START)
    assert (along.diff() < 0).any()  # it goes back on its way


@pytest.mark.parametrize("target", [0, 1, 2])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bend", [0.45, -1.0])
def test_the_integral_of_the_gradient_does_not_depend_on_the_curve(norm, target, bend):
    change = float(by_hand(END, target, norm) - by_hand(START, target, norm))
    for curve in theory.curves(START, END, bend=bend).values():
        assert theory.integral(flat(norm), curve, target) == pytest.approx(change, abs=1e-6)


def test_the_integral_turns_its_sign_with_the_curve_and_is_zero_around_a_loop():
    bent = theory.curves(START, END)["bent"]
    there, back = theory.integral(flat(), bent, 0), theory.integral(flat(), bent.flip(0), 0)
    assert there == pytest.approx(-back) and abs(there) > 0.5
    loop = torch.cat([bent, theory.curves(END, START)["detour"]])
    assert theory.integral(flat(), loop, 0) == pytest.approx(0, abs=1e-8)


def test_the_integral_samples_gradients_so_that_few_points_miss():
    ends, change = torch.stack([START, END]), float(by_hand(END, 0) - by_hand(START, 0))
    errors = [abs(theory.integral(flat(), ends, 0, steps=steps) - change) for steps in (1, 4, 16)]
    assert errors[0] > 0.1 > errors[1] > 1e-3 and errors[2] < 1e-6


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt_350m"])  # whose norms compute in float64
def test_gradients_are_the_finite_differences_of_the_models_own_probability(name):
    model = tiny.cast(tiny.shared(name), torch.float64)
    states = tiny.stream(model, tiny.IDS)[1:3, 4]
    step = 1e-5 * torch.eye(tiny.D, dtype=torch.float64)
    for target in (7, 60):
        found = theory.gradients(readout(name, torch.float64), states, target)
        assert found.shape == states.shape and found.dtype == torch.float64
        for h, slope in zip(states, found, strict=True):
            up, down = (tiny.log_probs(tiny.oracle(model, h + sign * step))[:, target].exp() for sign in (1, -1))
            torch.testing.assert_close(slope, (up - down) / 2e-5, atol=1e-9, rtol=1e-5)
        assert found.abs().max() > 1e-7


def test_gradients_work_in_any_mode_and_leave_nothing_behind():
    head, h = readout(), path()[0]
    expected = theory.gradients(head, h, 5)
    with torch.no_grad():
        found = theory.gradients(head, h, 5)
    assert torch.equal(found, expected) and not found.requires_grad
    assert not h.requires_grad
    assert all(weight.grad is None for weight in head.model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Counts
# ---------------------------------------------------------------------------------------------------------------------


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(("T", "k", "V", "d"), [(4, 3, 64, 48), (1, 1, 26, 64), (5, 7, 96, 32)])
@pytest.mark.parametrize("m", [1, 5])
def test_operations_are_those_that_torch_counts(T, k, V, d, m):
    head, states = Readout(toy.llama(V, d, 2, seed=0)), path(k, T, d)
    targets, expected = torch.arange(T), theory.operations(T, k, V, d, m)
    observed = counted(lambda: path_credits(head, states, targets, steps=m))
    assert expected["observed"] == observed
    every = counted(lambda: path_credits(head, theory.densify(states, m), targets))
    assert expected["observed, naive"] == every
    for estimator in ("midpoint", "gauss-legendre"):  # both read the levels too
        both = counted(lambda estimator=estimator: path_credits(head, states, targets, estimator=estimator, steps=m))
        assert expected["gradient"] == both - observed
    points = torch.randn(T * k * m, d)
    assert expected["gradient"] == counted(lambda: theory.gradients(head, points, 0))


@pytest.mark.parametrize("given", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1), (1, 1, 1, 1, 0)])
def test_operations_of_nothing_are_refused(given):
    with pytest.raises(IGLensError, match="expected numbers of at least 1, got T="):
        theory.operations(*given)


# ---------------------------------------------------------------------------------------------------------------------
# Errors, as they are shown
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "floor", "shown"),
    [(0.0, 1e-6, "≤ 1e-06"), (1e-6, 1e-6, "≤ 1e-06"), (1e-9, 1e-6, "≤ 1e-06"), (1.0001e-6, 1e-6, "1e-06"),
     (0.13, 1e-6, "1e-01"), (0.99, 1e-12, "1e+00"), (1.01, 1e-12, "1e+00"), (3e-4, 1e-12, "1e-04"),
     (4e-4, 1e-12, "1e-03"), (42.0, 1e-12, "1e+02"), (0.0, 0.0, "≤ 0e+00")],
)  # fmt: skip
def test_an_error_is_shown_as_the_nearest_power_of_ten(error, floor, shown):
    assert theory.order(error, floor) == shown


@given(error=st.floats(1e-15, 1e15))
@settings(derandomize=True)
def test_the_shown_power_is_nearer_than_the_next_one(error):
    shown = float(theory.order(error, 1e-16))
    assert abs(math.log10(error) - math.log10(shown)) <= 0.5 + 1e-9
    assert shown == float(f"1e{round(math.log10(shown))}")


@pytest.mark.parametrize("error", [math.nan, math.inf, -1.0])
def test_an_error_that_is_none_is_not_shown_as_a_small_one(error):
    assert theory.order(error, 1e-6) == str(error)


ASKED = (toy.PROMPT, toy.ANSWER)


@cache
def planted(layer):
    return toy.planted((layer, toy.ANSWER, 10.0), blocks=3)


@cache
def table():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return theory.verification({"one": (planted(2), toy.tokenizer(), *ASKED)}, [1, 4])


def test_the_table_has_a_row_for_each_way_and_a_column_for_each_baseline():
    assert list(table().columns) == ["embedding", "mean", "zero", "vector", "faithfulness"]
    assert table().index.names == ["dtype", "estimator", "m"]
    ways = [("float32", "float64"), ("observed", "midpoint", "gauss-legendre"), (1, 4)]
    assert list(table().index) == list(pd.MultiIndex.from_product(ways))


def test_observed_changes_are_exact_in_the_table_and_sampled_gradients_are_not():
    exact = table().xs("observed", level="estimator")
    assert (exact.loc["float32"] <= 1e-6).all(axis=None) and (exact.loc["float64"] <= 1e-12).all(axis=None)
    baselines = table().columns[:4]
    for estimator in ("midpoint", "gauss-legendre"):
        assert (table().xs((estimator, 1), level=(1, 2))[baselines] > 1e-2).all(axis=None)
    for dtype, allowed in (("float32", 1e-6), ("float64", 1e-12)):
        assert (table().xs(dtype)["faithfulness"] <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_entry_is_the_error_of_the_attribution_it_names(dtype):
    model = tiny.cast(planted(2), dtype)
    trace, vector = read(model, toy.tokenizer(), toy.PROMPT, answer=toy.ANSWER), model.model.embed_tokens.weight[0]
    for name, baseline in {"embedding": "embedding", "mean": "mean", "zero": "zero", "vector": vector}.items():
        with pytest.warns(UserWarning, match="miss delta"):
            one = attribute(Readout(model), trace, baseline=baseline, estimator="midpoint", steps=4)
        row = table().loc[str(dtype).removeprefix("torch."), "midpoint", 4]
        assert row[name] == pytest.approx(one.completeness_error, rel=1e-4)
        assert one.completeness_error > 1e-3


def test_an_entry_is_the_largest_over_the_models_which_stay_as_they_are():
    alone = [theory.verification({"": (planted(layer), toy.tokenizer(), *ASKED)}, [2]) for layer in (1, 3)]
    models = {f"{layer}": (planted(layer), toy.tokenizer(), *ASKED) for layer in (1, 3)}
    both = theory.verification(models, [2])
    pd.testing.assert_frame_equal(both, alone[0].where(alone[0] >= alone[1], alone[1]))
    assert not both.equals(alone[0]) and not both.equals(alone[1])
    assert planted(1).dtype == torch.float32


@pytest.mark.parametrize("gap", [0.25, math.inf])
def test_an_unfaithful_model_shows_in_the_table(monkeypatch, gap):
    def off(*given, **options):
        result = attribute(*given, **options)
        return dataclasses.replace(result, model_level=result.model_level + gap)

    monkeypatch.setattr(theory, "attribute", off)
    found = theory.verification({"one": (planted(2), toy.tokenizer(), *ASKED)}, [1])
    assert found["faithfulness"].tolist() == pytest.approx([gap] * 6, abs=1e-6)


def test_an_error_that_is_nan_is_not_lost_among_the_others(monkeypatch):
    def off(*given, **options):
        result = attribute(*given, **options)
        lost = math.nan if options["baseline"] == "mean" else 0.0
        return dataclasses.replace(result, credits=result.credits + lost)

    monkeypatch.setattr(theory, "attribute", off)
    found = theory.verification({name: (planted(2), toy.tokenizer(), *ASKED) for name in "ab"}, [1])
    assert found["mean"].isna().all() and found[["embedding", "zero", "faithfulness"]].notna().all(axis=None)
