"""The experiment measures what it says, goes on where it was stopped, and its statistics find what was planted."""

import gzip
import itertools
import os
import sys

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from scipy import stats

from iglens_core import IGLensError, Readout, attribute, encode, explain, read, residual_stream
from iglens_lab import validation
from iglens_lab.ablation import Ablations
from iglens_lab.translators import Translators, fingerprint
from iglens_lab.validation import (
    RIVALS,
    SCORES,
    Experiment,
    bent,
    by_stratum,
    compare,
    enough,
    hits,
    interval,
    kinds,
    left_out,
    load,
    onset_table,
    onsets,
    others,
    percentiles,
    permuted,
    rank_correlation,
    run,
    table,
    verdicts,
    wins,
)

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
CONDITIONS = [f"{what}_{scope}" for what in validation.INTERVENTIONS for scope in validation.SCOPES]


def values(*shape, seed=0, ties=False) -> np.ndarray:
    chance = np.random.default_rng(seed)
    return chance.integers(0, 4, shape).astype(float) if ties else chance.normal(size=shape)


# ---------------------------------------------------------------------------------------------------------------------
# Each statistic, against scipy or a plain loop
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_spearman_of_every_pair(ties):
    scores, drops = values(6, 9, ties=ties), values(6, 9, seed=1, ties=ties)
    found = rank_correlation(scores, drops)
    for i, j in itertools.product(range(6), repeat=2):
        assert found[i, j] == pytest.approx(stats.spearmanr(scores[i], drops[j]).statistic, abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_given_depth_it_is_the_correlation_of_what_depth_leaves(ties):
    scores, drops = values(5, 9, ties=ties), values(5, 9, seed=1, ties=ties)
    found, depth = rank_correlation(scores, drops, depth=True), np.arange(9.0)

    def rest(one):
        ranks = stats.rankdata(one)
        return ranks - np.polyval(np.polyfit(depth, ranks, 1), depth)

    for i, j in itertools.product(range(5), repeat=2):
        assert found[i, j] == pytest.approx(np.corrcoef(rest(scores[i]), rest(drops[j]))[0, 1], abs=1e-12)


@pytest.mark.parametrize("depth", [False, True])
def test_without_an_order_there_is_no_rank_correlation(depth):
    scores, drops = values(3, 5), values(3, 5, seed=1)
    scores[1], drops[2] = 7, 0
    known = ~np.isnan(rank_correlation(scores, drops, depth))
    assert known.tolist() == [[True, True, False], [False, False, False], [True, True, False]]
    assert np.isnan(rank_correlation(scores[:, :1], drops[:, :1], depth)).all()


def test_given_depth_depth_itself_has_no_correlation():
    depth = np.tile(np.arange(7.0), (3, 1))
    assert np.isnan(rank_correlation(depth, values(3, 7), depth=True)).all()
    assert np.isnan(rank_correlation(values(3, 2), values(3, 2, seed=1), depth=True)).all()


def test_the_onset_is_the_first_layer_by_which_half_is_given():
    credits = np.array([[1, 1, 0, 0], [0, 0, -3, 1], [0.1, 0.2, 0.3, 0.59], [0, 0, 0, 0], [1e-30, 0, 0, 0]])
    assert onsets(credits).tolist() == [0, 2, 2, -1, 0]
    for one, place in zip(values(20, 9), onsets(values(20, 9)), strict=True):
        assert place == next(i for i in range(9) if abs(one[: i + 1]).sum() >= abs(one).sum() / 2)


def test_the_onset_is_that_of_the_core():
    result = explain(tiny.speaker(), tiny.tokenizer(), "the cat", answer=" sat on the mat", chat=False)
    assert (onsets(result.credits.double().numpy()) + 1).tolist() == result.onset().tolist()


@pytest.mark.parametrize("ties", [False, True])
def test_wins_are_counted_over_layers_with_a_smaller_credit(ties):
    credits, drops = values(6, 9, ties=ties), values(6, 9, seed=1, ties=ties)
    found = wins(credits, drops)
    for i, j in itertools.product(range(6), repeat=2):
        at, points = onsets(credits)[i], []
        for layer in range(9):
            if abs(credits[i, layer]) < abs(credits[i, at]):
                below, equal = drops[j, layer] < drops[j, at], drops[j, layer] == drops[j, at]
                points.append(1.0 if below else 0.5 if equal else 0.0)
        assert found[i, j] == pytest.approx(np.mean(points)) if points else np.isnan(found[i, j])


def test_without_an_onset_or_a_smaller_credit_there_are_no_wins():
    credits = np.array([[0.0, 0, 0], [1, 1, 1], [1, 5, 1]])
    found = wins(credits, values(3, 3))
    assert np.isnan(found[:2]).all() and not np.isnan(found[2]).any()


@pytest.mark.parametrize("k", [1, 3, 5, 9])
def test_hits_are_found_by_sorting(k):
    credits, drops = values(6, 9), values(6, 9, seed=1)
    found = hits(credits, drops, k)
    for i, j in itertools.product(range(6), repeat=2):
        assert found[i, j] == (onsets(credits)[i] in np.argsort(drops[j])[::-1][:k])


def test_tied_drops_share_the_places_as_if_drawn_by_lot():
    credits, drops = values(6, 7), values(6, 7, seed=1, ties=True)
    for k in (1, 3, 5):
        found, chance = hits(credits, drops, k), np.random.default_rng(0)
        broken = [hits(credits, drops + 1e-6 * chance.normal(size=drops.shape), k) for _ in range(2000)]
        np.testing.assert_allclose(found, np.mean(broken, 0), atol=0.06)
    np.testing.assert_allclose(hits(credits, drops * 0, 2), 2 / 7)
    assert np.isnan(hits(credits * 0, drops, 1)).all()


@pytest.mark.parametrize("ties", [False, True])
def test_percentiles_are_those_of_scipy(ties):
    credits, drops = values(6, 9, ties=ties), values(6, 9, seed=1, ties=ties)
    found = percentiles(credits, drops)
    for i, j in itertools.product(range(6), repeat=2):
        rest = np.delete(drops[j], at := onsets(credits)[i])
        assert found[i, j] == pytest.approx(stats.percentileofscore(rest, drops[j, at], kind="mean") / 100)
    assert np.isnan(percentiles(credits * 0, drops)).all()
    assert percentiles(credits, drops * 0) == pytest.approx(0.5)


def test_others_is_the_mean_of_the_row_without_the_diagonal():
    pairs = values(5, 5)
    pairs[1, 3], pairs[2] = np.nan, np.nan
    found = others(pairs)
    for i in (0, 1, 3, 4):
        assert found[i] == pytest.approx(np.nanmean(np.delete(pairs[i], i)))
    assert np.isnan(found[2]) and np.isnan(others(np.ones((1, 1)))).all()


def test_the_interval_is_that_of_a_mean():
    sample = values(400)
    mean, low, high = interval(sample, np.full(400, "one"))
    assert mean == pytest.approx(sample.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * sample.std() / 20, rel=0.06)
    assert interval(sample, np.full(400, "one")) == (mean, low, high)


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        _, low, high = interval(values(40, seed=seed), np.repeat(["a", "b"], 20), draws=300)
        covered += low <= 0 <= high
    assert 176 <= covered <= 199


def test_prompts_are_resampled_within_their_kind():
    names = np.repeat(["a", "b", "c"], [5, 7, 2])
    level = np.repeat([0.0, 10.0, -3.0], [5, 7, 2])
    assert interval(level, names) == pytest.approx((level.mean(),) * 3)
    one = np.where(names == "a", values(14), level)
    _, low, high = interval(one, names)
    alone = interval(one[:5], names[:5])
    assert (high - low) * 14 == pytest.approx((alone[2] - alone[1]) * 5, rel=0.1)


def test_what_is_undefined_is_left_out_of_the_interval():
    names, sample = np.repeat(["a", "b", "c"], 5), values(15)
    sample[[0, 3, 10, 11, 12, 13, 14]] = np.nan  # nothing is left of the third kind
    mean, low, high = interval(sample, names)
    assert mean == pytest.approx(np.nanmean(sample)) and low < mean < high
    assert np.isnan(interval(sample * np.nan, names)).all()


def test_left_out_gives_the_extremes():
    names, sample = np.repeat(["a", "b", "c"], [3, 4, 5]), values(12)
    sample[4] = np.nan
    means = [np.nanmean(sample[names != one]) for one in "abc"]
    assert left_out(sample, names) == pytest.approx((min(means), max(means)))
    sample[names != "a"] = np.nan  # without the first kind, nothing is left
    assert left_out(sample, names) == pytest.approx((sample[:3].mean(),) * 2)
    assert np.isnan(left_out(sample, np.full(12, "a"))).all()


def test_the_p_value_counts_the_pairings_that_are_as_good():
    pairs = values(5, 5)
    found = [np.mean([pairs[i, j] for i, j in enumerate(order)]) for order in itertools.permutations(range(5))]
    assert permuted(pairs) == pytest.approx(np.mean(np.array(found) >= pairs.trace() / 5 - 1e-12))
    pairs[2] = np.nan  # a prompt whose scores have no order
    kept = np.delete(np.delete(pairs, 2, 0), 2, 1)
    assert permuted(pairs) == permuted(kept)
    assert np.isnan(permuted(pairs * np.nan)) and np.isnan(permuted(np.ones((1, 1))))


def test_the_p_value_is_small_only_where_the_pairing_counts():
    noise = values(30, 30)
    assert permuted(noise + 2 * np.eye(30)) < 0.001
    assert 0.02 < permuted(noise) < 0.98
    assert permuted(noise - 2 * np.eye(30)) > 0.999
    assert permuted(noise + values(30, 1, seed=1) * 50) == pytest.approx(permuted(noise))  # a good row is no pairing
    assert permuted(noise) == permuted(noise)
    p = [permuted(values(12, 12, seed=seed), draws=200) for seed in range(60)]
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_shuffled_layers_give_no_correlation_and_a_bound_that_shrinks_with_the_prompts():
    few, many = (validation.shuffled(values(count, 10), values(count, 10, seed=1)) for count in (10, 1000))
    assert 0.1 < few < 0.4 and 0.01 < many < 0.04  # 1.96 / √(9 N)
    line = np.tile(np.arange(10.0), (1000, 1))
    assert validation.shuffled(line, line) < 0.04  # the profile that all share is forgotten


# ---------------------------------------------------------------------------------------------------------------------
# Tables of planted data
# ---------------------------------------------------------------------------------------------------------------------

N, COUNT = 12, 48
SOME = ("skip_last", "skip_all", "mlp_all", "mean_last")  # conditions, fewer than there are


def planted(drops, count=COUNT, n=N, seed=0, bend=1.0, groups=4, credits=None, conditions=SOME) -> pd.DataFrame:
    """Results in which drops(credits, noise) hold in all conditions and the rivals are noise."""
    chance = np.random.default_rng(seed)
    credits = chance.lognormal(sigma=1.5, size=(count, n)) / 40 if credits is None else credits(chance)
    frame = pd.DataFrame(
        {
            "prompt": np.repeat(np.arange(count) * 3, n),
            "kind": np.repeat([f"kind {i % groups}" for i in range(count)], n),
            "token": " a",
            "correct": True,
            "p": np.repeat(credits.sum(1), n),
            "delta": np.repeat(credits.sum(1) / bend, n),
            "layer": np.tile(np.arange(1, n + 1), count),
            "credit": credits.ravel(),
            "abs_credit": np.abs(credits).ravel(),
        }
    )
    for name in ("translated", "level", "logit", "gradient", "update"):
        frame[name] = chance.normal(size=len(frame))
    for condition in conditions:
        frame[condition] = drops(credits, chance.normal(size=credits.shape)).ravel()
    return frame


def follows(credits, noise):
    return credits + 0.002 * noise


def shared_profile(credits, noise):
    return np.linspace(0, 1, credits.shape[1]) + 0.001 * noise


def test_drops_that_follow_the_credits_support_them():
    found = verdicts(planted(follows, conditions=CONDITIONS))
    assert (found[["a", "b"]] == "supported").all(axis=None)
    assert (found[["c_a", "c_b"]] == "undecided").all(axis=None)  # no token is non-monotone
    assert list(found.index) == [tuple(one.rsplit("_", 1)) for one in CONDITIONS]


def test_drops_that_follow_the_credits_of_bent_tokens_support_them():
    frame = planted(follows, bend=2.0)
    assert bent(frame).all()
    assert (verdicts(frame) == "supported").all(axis=None)


def test_drops_against_the_credits_refute_them():
    found = verdicts(planted(lambda credits, noise: -credits + 0.002 * noise, bend=-2.0))
    assert (found == "refuted").all(axis=None)


def test_noise_decides_nothing():
    found = verdicts(planted(lambda credits, noise: noise, seed=1))
    assert (found == "undecided").all(axis=None)


def test_a_depth_profile_that_all_prompts_share_is_no_support():
    found = verdicts(planted(shared_profile))
    assert not (found == "supported").any(axis=None)

    def late(chance):  # credits that grow with depth for every prompt, too
        return np.exp(np.linspace(0, 4, N) + 0.1 * chance.normal(size=(COUNT, N)))

    frame = planted(shared_profile, credits=late)
    assert compare(frame, "skip", "last").loc["credit", "rho"] > 0.9
    assert compare(frame, "skip", "last").loc["credit", "p"] > 0.05
    assert abs(onset_table(frame)["ahead"]).max() < 0.05
    assert not (verdicts(frame) == "supported").any(axis=None)


def test_an_onset_that_does_better_with_other_prompts_drops_is_refuted():
    line = np.linspace(0, 4, N)

    def late(chance):
        return np.exp(line + 0.8 * chance.normal(size=(COUNT, N)))

    frame = planted(lambda credits, noise: 2 * line - np.log(credits) + 0.01 * noise, credits=late)
    assert (onset_table(frame)["low"] > 0.5).all() and (onset_table(frame)["ahead_high"] < 0).all()
    assert (verdicts(frame)["a"] == "refuted").all()


def test_noise_is_not_taken_for_a_verdict():
    decided = []
    for seed in range(6):  # ten conditions each: without a correction some would be decided by chance in most tables
        found = verdicts(planted(lambda credits, noise: noise, count=24, n=8, seed=seed, conditions=CONDITIONS))
        decided.append(bool((found[["a", "b"]] != "undecided").any(axis=None)))
    assert sum(decided) <= 1


def test_one_rival_as_good_as_the_credits_is_no_support():
    frame = planted(follows)
    frame["gradient"] = frame["credit"] * 3
    found = verdicts(frame)
    assert (found["a"] == "supported").all() and (found["b"] == "undecided").all()
    frame["credit"], frame["gradient"] = frame["credit"] + values(len(frame), seed=9), frame["credit"]
    assert (verdicts(frame)["b"] == "refuted").all()


def test_a_condition_is_judged_by_its_own_drops():
    frame = planted(follows)
    frame["mlp_all"] = values(len(frame), seed=9)
    frame["mean_last"] = -frame["credit"]
    found = verdicts(frame)
    assert found.loc[("mlp", "all"), "a"] == found.loc[("mlp", "all"), "b"] == "undecided"
    assert found.loc[("mean", "last"), "a"] == found.loc[("mean", "last"), "b"] == "refuted"
    assert (found.drop([("mlp", "all"), ("mean", "last")])[["a", "b"]] == "supported").all(axis=None)


def test_compare_says_how_well_each_score_ranks_the_drops():
    frame = planted(follows)
    found = compare(frame, "mlp", "all")
    assert list(found.index) == list(SCORES)
    for score in SCORES:
        column = "layer" if score == "depth" else score
        rho = [
            stats.spearmanr(rows[column][:-1], rows["mlp_all"][:-1]).statistic for _, rows in frame.groupby("prompt")
        ]
        assert found.loc[score, "rho"] == pytest.approx(np.mean(rho))
        assert found.loc[score, "low"] < np.mean(rho) < found.loc[score, "high"]
        assert found.loc[score, "least"] <= np.mean(rho) <= found.loc[score, "greatest"]
        if score not in ("credit", "abs_credit"):
            assert found.loc[score, "ahead"] == pytest.approx(found.loc["credit", "rho"] - np.mean(rho))
            assert found.loc[score, "ahead_low"] > 0.5 and found.loc[score, "p_ahead"] < 1e-6
    assert found.loc["credit", "p"] == pytest.approx(1 / 2001) and found.loc["credit", "partial"] > 0.8
    assert abs(found.loc["credit", "null"]) < 0.1
    assert found.loc["credit", ["ahead", "ahead_low", "ahead_high"]].tolist() == [0, 0, 0]
    assert np.isnan(found.loc["depth", "partial"]) and np.isnan(found.loc["credit", "p_ahead"])
    assert not found.drop(columns=["partial", "p_ahead"]).isna().any(axis=None)
    assert (found["used"] == COUNT).all() and (found["undefined"] == 0).all()


def test_the_onset_table_says_what_becomes_of_the_onset():
    frame = planted(follows)
    found = onset_table(frame)
    credits, drops = table(frame, "credit", False), table(frame, "mean_last", False)
    row, pairs = found.loc[("mean", "last")], wins(credits, drops)
    assert row["wins"] == pytest.approx(pairs.diagonal().mean())
    assert row["null"] == pytest.approx(pairs[~np.eye(COUNT, dtype=bool)].mean())
    assert row["ahead"] == pytest.approx(row["wins"] - row["null"]) and row["ahead_low"] > 0.2
    assert row["percentile"] == pytest.approx(percentiles(credits, drops).diagonal().mean())
    for k in (1, 3, 5):
        assert row[f"hit@{k}"] == pytest.approx(hits(credits, drops, k).diagonal().mean())
        assert row[f"null@{k}"] == pytest.approx(k / (N - 1), abs=0.1)
    assert not found.isna().any(axis=None) and (found["used"] == COUNT).all()
    assert not onset_table(frame, "translated").equals(found)


def test_the_last_block_is_left_out_unless_asked_for():
    frame, other = planted(follows), planted(follows)
    for column in (*SCORES[:-1], *SOME):
        if column != "abs_credit":  # the sum of it tells which tokens are non-monotone
            other.loc[other["layer"] == N, column] = values(COUNT, seed=5) * 9
    pd.testing.assert_frame_equal(onset_table(frame), onset_table(other))
    pd.testing.assert_frame_equal(
        compare(frame, "skip", "last").drop("abs_credit"), compare(other, "skip", "last").drop("abs_credit")
    )
    pd.testing.assert_frame_equal(verdicts(frame), verdicts(other))
    assert not onset_table(frame, last=True).equals(onset_table(other, last=True))
    assert not compare(frame, "skip", "last", last=True).equals(compare(other, "skip", "last", last=True))


def test_the_order_of_the_rows_does_not_matter():
    frame = planted(follows, bend=2.0)
    mixed = frame.sample(frac=1, random_state=0)
    pd.testing.assert_frame_equal(compare(frame, "mlp", "all"), compare(mixed, "mlp", "all"))
    pd.testing.assert_frame_equal(onset_table(frame), onset_table(mixed))
    assert kinds(frame).tolist() == kinds(mixed).tolist() == [f"kind {i % 4}" for i in range(COUNT)]
    np.testing.assert_array_equal(table(frame, "p"), table(mixed, "p"))
    np.testing.assert_array_equal(bent(frame), bent(mixed))


def test_some_prompts_alone():
    frame = planted(follows)
    some = np.arange(COUNT) % 3 == 0
    alone = frame[frame["prompt"].isin(np.unique(frame["prompt"])[some])]
    pd.testing.assert_frame_equal(compare(frame, "skip", "all", some=some), compare(alone, "skip", "all"))
    pd.testing.assert_frame_equal(onset_table(frame, some=some), onset_table(alone))
    parts = by_stratum(frame, "credit", "skip", "all", {"some": some, "rest": ~some})
    assert parts.loc["some", "mean"] == pytest.approx(compare(alone, "skip", "all").loc["credit", "rho"])
    assert parts["used"].tolist() == [16, 32]
    with pytest.raises(IGLensError, match="stratum 'none': expected prompts in it, got none"):
        by_stratum(frame, "credit", "skip", "all", {"none": some & ~some})


@pytest.mark.parametrize("some", [[0, 1], np.arange(COUNT), np.ones(COUNT - 1, bool), np.ones((COUNT, 1), bool)])
def test_a_choice_that_is_no_bool_for_each_prompt_is_refused(some):
    for call in (
        lambda: compare(planted(follows), "skip", "last", some=some),
        lambda: onset_table(planted(follows), some=some),
    ):
        with pytest.raises(IGLensError, match="some: expected a bool for each of the 48 prompts"):
            call()


@pytest.mark.parametrize("count", [1, 2, 9])
def test_fewer_than_ten_prompts_are_refused(count):
    frame = planted(follows, count=count)
    few = np.arange(COUNT) < count
    for call in (
        lambda: enough(frame),
        lambda: verdicts(frame),
        lambda: compare(frame, "skip", "last"),
        lambda: onset_table(frame),
        lambda: compare(planted(follows), "skip", "last", some=few),
        lambda: onset_table(planted(follows), some=few),
    ):
        with pytest.raises(IGLensError, match=f"expected at least 10 prompts, got {count}"):
            call()


def test_ten_prompts_are_enough_for_every_table():
    frame = planted(follows, count=10)
    assert enough(frame) == 10
    assert verdicts(frame).isin(["supported", "refuted", "undecided"]).all(axis=None)


def test_few_non_monotone_tokens_leave_their_part_undecided():
    frame = planted(follows)
    half = frame["prompt"] < 29 * 3
    frame.loc[half, "delta"] /= 2
    assert bent(frame).sum() == 29
    assert (verdicts(frame)[["c_a", "c_b"]] == "undecided").all(axis=None)
    frame.loc[frame["prompt"] == 29 * 3, "delta"] = 0
    assert bent(frame).sum() == 30
    assert (verdicts(frame)["c_a"] == "supported").all()


def test_prompts_without_credits_are_counted_as_undefined():
    frame = planted(follows, bend=2.0)
    silent = frame["prompt"] < 5 * 3
    frame.loc[silent, ["credit", "abs_credit", "delta", "p"]] = 0
    found = compare(frame, "skip", "last")
    assert found.loc["credit", ["used", "undefined"]].tolist() == [COUNT - 5, 5]
    assert found.loc["update", ["used", "undefined"]].tolist() == [COUNT, 0]
    assert found.drop(columns=["partial", "p_ahead"]).notna().all(axis=None)
    assert (onset_table(frame)["used"] == COUNT - 5).all() and onset_table(frame).notna().all(axis=None)
    assert not bent(frame)[:5].any()
    assert (verdicts(frame) == "supported").all(axis=None)


def test_prompts_with_drops_that_are_all_the_same_are_counted_as_undefined():
    frame = planted(follows)
    frame.loc[frame["prompt"] < 5 * 3, "skip_last"] = 0.0
    found = compare(frame, "skip", "last")
    assert (found["undefined"] == 5).all() and found.drop(columns=["partial", "p_ahead"]).notna().all(axis=None)
    row = onset_table(frame).loc[("skip", "last")]
    assert row.notna().all() and row["used"] == COUNT  # half a win and a fair share of the places each


def test_a_kind_without_a_defined_prompt_is_left_out():
    frame = planted(follows)
    frame.loc[frame["kind"] == "kind 2", ["credit", "abs_credit"]] = 0
    found = compare(frame, "skip", "last")
    assert found.loc["credit", "undefined"] == COUNT // 4
    assert found.drop(columns=["partial", "p_ahead"]).notna().all(axis=None)
    assert onset_table(frame).notna().all(axis=None)


def test_a_single_kind_has_an_interval_but_nothing_to_leave_out():
    found = compare(planted(follows, groups=1), "skip", "last")
    assert found[["least", "greatest"]].isna().all(axis=None)
    assert found.drop(columns=["partial", "p_ahead", "least", "greatest"]).notna().all(axis=None)


def test_where_nothing_differs_there_is_an_error_and_no_table_of_nan():
    frame = planted(follows)
    frame["skip_last"] = 0.25
    with pytest.raises(IGLensError, match="skip_last: no prompt has blocks that differ"):
        compare(frame, "skip", "last")
    frame = planted(follows)
    frame[["credit", "abs_credit"]] = 0.0
    for call in (compare, lambda *_: onset_table(frame), lambda *_: verdicts(frame)):
        with pytest.raises(IGLensError, match="skip_last: no prompt has blocks that differ"):
            call(frame, "skip", "last")


def test_a_rival_that_never_differs_is_undefined_and_beats_nothing():
    frame = planted(follows)
    frame["gradient"] = 1.0
    found = compare(frame, "skip", "last")
    assert found.loc["gradient", ["used", "undefined"]].tolist() == [0, COUNT]
    assert (verdicts(frame)["b"] == "undecided").all()


def test_tiny_probabilities_count_as_any():
    frame = planted(follows)
    small = frame.copy()
    small[["credit", "abs_credit", "delta", "p", *SOME]] *= 1e-12
    pd.testing.assert_frame_equal(onset_table(frame), onset_table(small))
    pd.testing.assert_frame_equal(compare(frame, "skip", "all"), compare(small, "skip", "all"))


def test_models_of_two_and_three_blocks():
    with pytest.raises(IGLensError, match="no prompt has blocks that differ"):
        compare(planted(follows, n=2), "skip", "last")  # one block is left, there is nothing to rank
    assert compare(planted(follows, n=2), "skip", "last", last=True).loc["credit", "rho"] > 0.5
    assert compare(planted(follows, n=3), "skip", "last").loc["credit", "rho"] > 0.5


@pytest.mark.parametrize("column", ["credit", "skip_last"])
def test_missing_columns_are_named(column):
    frame = planted(follows).drop(columns=column)
    with pytest.raises(IGLensError, match=f"results: expected a column '{column}'; they have prompt, kind"):
        compare(frame, "skip", "last")
    with pytest.raises(IGLensError, match="results: expected drops, such as skip_last"):
        onset_table(planted(follows, conditions=()))


@pytest.mark.parametrize("column", sorted({*RIVALS, "abs_credit", "delta"} - {"depth"}))
def test_verdicts_need_every_rival(column):
    with pytest.raises(IGLensError, match=f"results: expected the columns {column}; they have"):
        verdicts(planted(follows).drop(columns=column))


def test_missing_doubled_and_undefined_rows_are_refused():
    frame = planted(follows)
    bad = frame.copy()
    bad.loc[7, "credit"] = np.nan
    for one in (frame.drop(index=7), pd.concat([frame, frame[7:8]]), bad, frame.drop(index=[7, 30])):
        with pytest.raises(IGLensError, match="expected a number in 'credit' for every prompt and block, once"):
            table(one, "credit")


# ---------------------------------------------------------------------------------------------------------------------
# The experiment, on a tiny model
# ---------------------------------------------------------------------------------------------------------------------

TEXTS = {
    "cats": ["the cat", "the cat sat", "on the mat the cat", "cat"],
    "mats": ["the mat", "a mat on the", "mat"],
    "alone": ["s"],
}


def asked() -> pd.DataFrame:
    rows = [(kind, "en", text, " sat") for kind, texts in TEXTS.items() for text in texts]
    frame = pd.DataFrame(rows, columns=["kind", "language", "prompt", "answer"])
    return frame.set_index(np.array([0, 2, 3, 5, 8, 13, 21, 34]))


def experiment(**options) -> Experiment:
    return Experiment(tiny.speaker(), tiny.tokenizer(), asked(), **options)


def last_updates(index) -> torch.Tensor:
    ids = encode(tiny.tokenizer(), asked().loc[index, "prompt"])
    return residual_stream(tiny.speaker(), ids).diff(dim=0)


@pytest.mark.parametrize("index", [0, 3, 21])
def test_measured_drops_are_those_of_the_ablations(index):
    frame = experiment().measure(index)
    model, ids = tiny.speaker(), encode(tiny.tokenizer(), asked().loc[index, "prompt"])
    trace = read(model, tiny.tokenizer(), ids, chat=False, max_new_tokens=1)
    target, made = int(trace.token_ids[0]), Ablations(model)
    assert frame["layer"].tolist() == [1, 2, 3] and set(CONDITIONS) <= set(frame)

    def drops(*args, **options):
        found = made.probabilities(ids, target, *args, **options)
        return (found[0] - found[1:]).numpy()

    mean = torch.stack([last_updates(one)[:, -1] for one in asked().index if one != index]).mean(0)[:, None]
    for scope in validation.SCOPES:
        for what in ("skip", "attention", "mlp"):
            np.testing.assert_array_equal(frame[f"{what}_{scope}"], drops(what, scope=scope))
        everywhere = mean.expand(-1, len(ids) if scope == "all" else 1, -1)
        np.testing.assert_allclose(frame[f"mean_{scope}"], drops("update", scope=scope, updates=everywhere), atol=1e-6)
        rest = [one for one in asked().index[asked()["kind"] == asked().loc[index, "kind"]] if one != index]
        found = np.mean([drops("update", scope=scope, updates=last_updates(one)) for one in rest], 0)
        np.testing.assert_allclose(frame[f"resample_{scope}"], found, atol=1e-9)


def test_measured_scores_are_those_of_the_core():
    frame = experiment().measure(3)
    model, readout = tiny.speaker(), Readout(tiny.speaker())
    trace = read(model, tiny.tokenizer(), asked().loc[3, "prompt"], chat=False, max_new_tokens=1)
    result = attribute(readout, trace).check()
    np.testing.assert_array_equal(frame["credit"], result.credits[0])
    np.testing.assert_array_equal(frame["abs_credit"], result.credits[0].abs())
    np.testing.assert_array_equal(frame["level"], result.levels[0, 1:])
    np.testing.assert_array_equal(frame["logit"], attribute(readout, trace, scalar="logit").credits[0])
    states = trace.stream[:, trace.positions[0]]
    np.testing.assert_allclose(frame["update"], (states[1:] - states[:-1]).norm(dim=1), rtol=1e-6)
    for layer in (1, 2, 3):
        x = states[layer][None].clone().requires_grad_()
        readout.prob(x, int(trace.token_ids[0])).backward()
        assert frame["gradient"][layer - 1] == pytest.approx(float(x.grad.norm()), rel=1e-5)
    assert frame["credit"].sum() == pytest.approx(frame["delta"][0], abs=1e-5)
    assert frame["p"][0] == pytest.approx(float(result.model_level[0]), abs=1e-5)
    assert frame["skip_last"].iloc[-1] == pytest.approx(frame["credit"].iloc[-1], abs=1e-6)
    assert (frame["prompt"] == 3).all() and (frame["kind"] == "cats").all()
    assert (frame["token"] == trace.tokens[0]).all() and "translated" not in frame


def translators(seed=0) -> Translators:
    chance = torch.Generator().manual_seed(seed)
    maps, shifts = (torch.randn(3, *shape, generator=chance) / 50 for shape in ((tiny.D, tiny.D), (tiny.D,)))
    return Translators(maps, shifts, fingerprint(tiny.speaker()), 100, 0.01)


def test_translated_credits_stand_beside():
    frame = experiment(translators=translators()).measure(0)
    trace = read(tiny.speaker(), tiny.tokenizer(), "the cat", chat=False, max_new_tokens=1)
    result = attribute(Readout(tiny.speaker()), trace, translators=translators())
    np.testing.assert_array_equal(frame["translated"], result.credits[0])
    assert not np.allclose(frame["translated"], frame["credit"], atol=1e-4)


def test_a_prompt_is_correct_where_the_first_token_is_that_of_the_answer():
    assert experiment().measure(21, ["skip"], ["last"])["token"][0] == "x"
    frame = asked()
    for answer, correct in (("x and more", True), ("x", True), ("yx", False), (" x", False), ("", False)):
        frame["answer"] = answer
        made = Experiment(tiny.speaker(), tiny.tokenizer(), frame)
        assert (made.measure(21, ["skip"], ["last"])["correct"] == correct).all()


def test_nothing_depends_on_which_prompts_were_measured_before():
    first, again = experiment(), experiment()
    some = [0, 5, 13, 21]
    found = {index: first.measure(index) for index in some}
    for index in reversed(some):
        pd.testing.assert_frame_equal(again.measure(index), found[index], check_exact=True)
        pd.testing.assert_frame_equal(first.measure(index), found[index], check_exact=True)


def test_donors_are_others_of_the_kind_the_same_in_every_run():
    frame = pd.DataFrame({"kind": np.repeat(["a", "b"], [12, 3]), "prompt": "cat", "answer": " sat"})
    one, again = (Experiment(tiny.speaker(), tiny.tokenizer(), frame) for _ in range(2))
    other = Experiment(tiny.speaker(), tiny.tokenizer(), frame, seed=1)
    drawn = {index: one.donors(index) for index in frame.index}
    assert {index: again.donors(index) for index in reversed(frame.index)} == drawn
    for index, found in drawn.items():
        assert index not in found and len(set(found)) == len(found) == min(5, 11 if index < 12 else 2)
        assert all(frame["kind"][donor] == frame["kind"][index] for donor in found)
    assert any(other.donors(index) != drawn[index] for index in range(12))
    assert len({tuple(drawn[index]) for index in range(12)}) > 6


def test_the_mean_is_over_other_prompts():
    made = experiment()
    for index in (0, 13):
        rest = [last_updates(one)[:, -1] for one in asked().index if one != index]
        torch.testing.assert_close(made.mean_update(index)[:, 0], torch.stack(rest).mean(0))


def test_a_prompt_that_is_the_only_one_has_no_donors_and_no_mean():
    with pytest.raises(IGLensError, match="resample: expected another prompt of the kind 'alone'"):
        experiment().measure(34, ["resample"])
    single = Experiment(tiny.speaker(), tiny.tokenizer(), asked()[:1])
    with pytest.raises(IGLensError, match="mean: expected another prompt than 'the cat'"):
        single.measure(0, ["mean"])
    assert len(single.measure(0, ["skip", "mlp"])) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes_are_measured(dtype):
    made = Experiment(tiny.cast(tiny.speaker(), dtype), tiny.tokenizer(), asked())
    frame = made.measure(0)
    assert np.isfinite(frame.drop(columns=["kind", "token"]).to_numpy(float)).all()


@pytest.mark.parametrize("index", [1, -1, 1.5, "0", None, True])
def test_a_prompt_that_was_not_asked_is_refused(index):
    made = experiment()
    for call in (made.measure, made.donors, made.updates, made.mean_update):
        with pytest.raises(IGLensError, match="prompt: expected the number of one of the 8 asked, got"):
            call(index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame[:0], "index \\[\\]"),
        (lambda frame: frame.drop(columns=["answer", "kind"]), "lacks answer, kind"),
        (lambda frame: frame.set_index("prompt", drop=False), "index"),
        (lambda frame: pd.concat([frame, frame]), "index \\[0, 2"),
        (lambda frame: frame.set_index(frame.index - 1), "index \\[-1, 1"),
    ],
)
def test_what_is_asked_must_be_prompts(change, message):
    with pytest.raises(IGLensError, match=f"asked: expected rows of .*, got {message}"):
        Experiment(tiny.speaker(), tiny.tokenizer(), change(asked()))


def test_an_unknown_intervention_is_refused():
    with pytest.raises(
        IGLensError, match="interventions: expected some of skip, attention, mlp, mean, resample, got 'up"
    ):
        experiment().measure(0, ["update"])


def test_an_untouched_run_that_is_not_the_explained_one_is_refused(monkeypatch):
    made = experiment()
    found = made.ablations.probabilities
    monkeypatch.setattr(made.ablations, "probabilities", lambda *args, **options: found(*args, **options) * 0.9)
    with pytest.raises(IGLensError, match="skip, last: the untouched run gives p = "):
        made.measure(0)
    monkeypatch.setattr(made.ablations, "probabilities", lambda *args, **options: found(*args, **options) * torch.nan)
    with pytest.raises(IGLensError, match="the logits of prompt 0 are not finite"):
        made.measure(0)


# ---------------------------------------------------------------------------------------------------------------------
# The run and its files
# ---------------------------------------------------------------------------------------------------------------------

ODD = [" a", "\n", "\r", "\r\n", '"', ",", "\u2028", "NA", "", "1", "None", "\x85\x0b", "é", "\\n", "'", "<0xE6>", "\t"]


class Odd(Experiment):
    """Measures no model; its tokens would break a careless file. Counts what it measures, fails where it is told to."""

    def __init__(self, asked=None, translators=None, seed=0):
        frame = pd.DataFrame({"kind": 'a "kind", odd', "prompt": "cat", "answer": " sat"}, index=range(len(ODD)))
        self.model, self.asked = tiny.speaker(), frame if asked is None else asked
        self.translators, self.seed = translators, seed
        self.measured, self.stop = [], None

    def measure(self, index):
        if index == self.stop:
            raise KeyboardInterrupt
        self.measured.append(index)
        chance = np.random.default_rng(index)
        first = {"prompt": index, "kind": self.asked["kind"][index], "token": ODD[index], "correct": index % 2 == 0}
        frame = pd.DataFrame({"layer": [1, 2, 3], "credit": chance.normal(size=3), "skip_last": chance.normal(size=3)})
        return frame.assign(**first, p=1e-9 * chance.random(), delta=0.0)[[*first, "p", "delta", *frame.columns]]


def stopped(path, at: int, **options):
    """The part file of a run that was killed when it came to a prompt."""
    made = Odd(**options)
    made.stop = at
    with pytest.raises(KeyboardInterrupt):
        run(made, path, progress=False)
    (part,) = path.parent.glob(".*.part")
    assert made.measured == list(range(at)) and not path.exists()
    return part


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "results.csv.gz"
    run(Odd(), path, progress=False)
    return path.read_bytes()


def test_the_results_hold_what_was_measured(tmp_path):
    made = experiment()
    path = tmp_path / "results.csv.gz"
    found = run(made, path, [5, 0, 13], progress=False)
    expected = pd.concat([made.measure(index) for index in (0, 5, 13)], ignore_index=True)
    pd.testing.assert_frame_equal(found, expected, check_dtype=False, rtol=1e-4, atol=0)
    assert os.listdir(tmp_path) == ["results.csv.gz"]
    pd.testing.assert_frame_equal(load(path), found)


def test_odd_tokens_survive(tmp_path):
    found = run(Odd(), tmp_path / "results.csv.gz", progress=False)
    assert found["token"].tolist() == [token for token in ODD for _ in range(3)]
    assert found["correct"].dtype == bool and set(found["kind"]) == {'a "kind", odd'}
    assert found["layer"].tolist() == [1, 2, 3] * len(ODD)


@pytest.mark.parametrize("tokens", [["1", "2"], ["NA", "nan"], ["", " "], ["True", "False"]])
def test_tokens_that_look_like_numbers_stay_text(tmp_path, monkeypatch, tokens):
    monkeypatch.setattr(sys.modules[__name__], "ODD", tokens)
    found = run(Odd(), tmp_path / "results.csv.gz", progress=False)
    assert found["token"].tolist() == [token for token in tokens for _ in range(3)]


def test_two_runs_give_the_same_bytes(tmp_path, whole):
    path = tmp_path / "results.csv.gz"
    run(Odd(), path, reversed(range(len(ODD))), progress=False)
    assert path.read_bytes() == whole
    run(Odd(), path, progress=False)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kept", [0, 1, 0.1, 0.3, 0.5, 0.62, 0.77, 0.9, -2, -1, None])
def test_a_run_that_was_killed_goes_on_and_gives_the_same_bytes(tmp_path, whole, kept):
    path = tmp_path / "results.csv.gz"
    part = stopped(path, at=9)
    content = part.read_bytes()
    kept = int(kept * len(content)) if isinstance(kept, float) else kept
    part.write_bytes(content[:kept])
    done = content[:kept].count(b"\n")  # a line a prompt
    again = Odd()
    found = run(again, path, progress=False)
    assert again.measured == list(range(done, len(ODD)))
    assert path.read_bytes() == whole and os.listdir(tmp_path) == ["results.csv.gz"]
    assert not found.duplicated(["prompt", "layer"]).any()


def test_a_run_may_be_killed_many_times(tmp_path, whole):
    path, count = tmp_path / "results.csv.gz", 0
    for at in (3, 4, 4, 11):
        made = Odd()
        made.stop = at
        with pytest.raises(KeyboardInterrupt):
            run(made, path, progress=False)
        count += len(made.measured)
        (part,) = tmp_path.glob(".*.part")
        part.write_bytes(part.read_bytes() + b'[12, "half a l')
    made = Odd()
    run(made, path, progress=False)
    assert path.read_bytes() == whole and count + len(made.measured) == len(ODD)


@pytest.mark.parametrize(
    "damage", [b"\x00" * 40, b"\xff\xfe\n", b"{}\n", b"[]\n", b"[1]\n", b"3\n", b'"ab"\n', b"[3, 4]\n", b"\n"]
)
def test_damage_in_the_part_file_is_measured_anew(tmp_path, whole, damage):
    path = tmp_path / "results.csv.gz"
    part = stopped(path, at=9)
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join([*lines[:4], damage, *lines[4:]]))
    again = Odd()
    run(again, path, progress=False)
    assert again.measured == list(range(4, len(ODD))) and path.read_bytes() == whole


def test_what_another_run_finished_is_used_though_other_prompts_were_wanted(tmp_path):
    path = tmp_path / "results.csv.gz"
    stopped(path, at=9)
    again = Odd()
    found = run(again, path, [2, 4, 4, 12], progress=False)
    assert again.measured == [12] and found["prompt"].unique().tolist() == [2, 4, 12]
    assert os.listdir(tmp_path) == ["results.csv.gz"]


def others_prompts():
    frame = pd.DataFrame({"kind": "a", "prompt": "cat", "answer": " sat"}, index=range(len(ODD)))
    frame.loc[3, "prompt"] = "mat"
    return frame


@pytest.mark.parametrize(
    "options",
    [{"seed": 1}, {"asked": others_prompts()}, {"translators": translators()}],
    ids=lambda one: next(iter(one)),
)
def test_what_depends_on_something_else_is_not_gone_on_with(tmp_path, options):
    path = tmp_path / "results.csv.gz"
    part = stopped(path, at=9)
    again = Odd(**options)
    run(again, path, progress=False)
    assert again.measured == list(range(len(ODD)))
    assert sorted(os.listdir(tmp_path)) == sorted([part.name, "results.csv.gz"])  # it is still there for its own run


@pytest.mark.parametrize(
    "other", [lambda: tiny.build("llama", seed=1), lambda: tiny.cast(tiny.speaker(), torch.float64)]
)
def test_another_models_part_is_not_gone_on_with(tmp_path, other):
    path = tmp_path / "results.csv.gz"
    stopped(path, at=9)
    again = Odd()
    again.model = other()
    run(again, path, progress=False)
    assert again.measured == list(range(len(ODD)))


def test_the_results_appear_whole_or_not_at_all(tmp_path, monkeypatch, whole):
    path = tmp_path / "results.csv.gz"
    path.write_bytes(b"older")

    def fails(*args):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(validation.os, "replace", fails)
        with pytest.raises(OSError, match="no space left"):
            run(Odd(), path, progress=False)
    assert path.read_bytes() == b"older"
    (part,) = (name for name in os.listdir(tmp_path) if name != path.name)
    assert part.endswith(".part")
    again = Odd()
    run(again, path, progress=False)
    assert again.measured == [] and path.read_bytes() == whole and os.listdir(tmp_path) == [path.name]


def test_what_cannot_be_run_is_refused_before_anything_is_measured(tmp_path):
    made = Odd()
    for indices, message in (([], "expected at least one prompt"), ([0, 99], "got 99"), ([True], "got True")):
        with pytest.raises(IGLensError, match=message):
            run(made, tmp_path / "results.csv.gz", indices, progress=False)
    with pytest.raises(IGLensError, match=r"path: the folder .* does not exist"):
        run(made, tmp_path / "none" / "results.csv.gz", progress=False)
    assert made.measured == [] and os.listdir(tmp_path) == []


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(IGLensError, match=r"no results there; make them: python -m iglens_lab\.validation"):
        load(tmp_path / "results.csv.gz")


@pytest.mark.parametrize("content", [
    b"", b"prompt,kind\n", gzip.compress(b""), gzip.compress(b"a,b\n1,2\n"), gzip.compress(b"\xff\xfe,\n"),
    gzip.compress(b"prompt,kind,token,layer,credit\n"[:20]),
    gzip.compress(b"prompt,kind,token,layer,credit\n1,a,b,1,much\n"),
    gzip.compress(b"prompt,kind,token,layer,credit\n1,a,b,1,\n"),
    gzip.compress(b"prompt,kind,token,layer,credit\n1,a,b,1,0.5\n1,a,b,2\n"),
    gzip.compress(b"prompt,kind,token,layer,credit\n1,a,b,1,0.5\n1,a,\"b,2,0.5\n"),
])  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, content):
    path = tmp_path / "results.csv.gz"
    path.write_bytes(content)
    with pytest.raises(IGLensError, match=r"results\.csv\.gz: .*; delete it and make it anew"):
        load(path)


@pytest.mark.parametrize("kept", [5, 30, 0.5, -1, -9])
def test_a_file_that_was_cut_is_refused(tmp_path, whole, kept):
    path = tmp_path / "results.csv.gz"
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(IGLensError, match="delete it and make it anew"):
        load(path)


def test_a_file_that_lacks_rows_is_refused(tmp_path, whole):
    path = tmp_path / "results.csv.gz"
    rows = gzip.decompress(whole).decode().split("\n")
    path.write_bytes(gzip.compress("\n".join(rows[:2] + rows[3:]).encode()))
    with pytest.raises(IGLensError, match="for every prompt and block"):
        load(path)


def test_a_folder_in_its_place_is_refused(tmp_path):
    (tmp_path / "results.csv.gz").mkdir()
    with pytest.raises(IGLensError, match="cannot be read"):
        load(tmp_path / "results.csv.gz")


def test_from_the_command_line_every_so_many_of_the_prompts_are_measured(tmp_path, monkeypatch):
    frame = asked()[asked()["kind"] != "alone"]
    monkeypatch.setattr(validation, "RESULTS", tmp_path / "results.csv.gz")
    monkeypatch.setattr(validation, "load_model", lambda: (tiny.speaker(), tiny.tokenizer()))
    monkeypatch.setattr(validation, "prompts", lambda: frame)
    monkeypatch.setattr(validation, "for_model", lambda model, tokenizer: translators())
    monkeypatch.setattr(sys, "argv", ["validation", "--every", "3"])
    validation.main()
    found = load(tmp_path / "results.csv.gz")
    assert found["prompt"].unique().tolist() == frame.index[::3].tolist()
    assert {*SCORES[:-1], *CONDITIONS} <= set(found)
