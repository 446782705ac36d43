"""Does the onset predict what ablation breaks? The experiment on many prompts, and its statistics.

    python -m iglens_lab.validation        on the default model and all prompts; writes data/ablation_results.csv.gz

It goes on where it was stopped: each prompt's rows are written once, as soon as they are known. One row a prompt and
block; drops are named intervention_scope: by how much the probability of the model's own next token falls without the
block.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from statsmodels.stats.multitest import multipletests
from torch import Tensor
from tqdm.auto import tqdm

from iglens_core import TOLERANCE, IGLensError, Readout, attribute, encode, read, residual_stream
from iglens_lab import theory
from iglens_lab.ablation import Ablations
from iglens_lab.models import load_model
from iglens_lab.translators import DATA, Translators, fingerprint, for_model, prompts

RESULTS = DATA / "ablation_results.csv.gz"
INTERVENTIONS = ("skip", "attention", "mlp", "mean", "resample")
SCOPES = ("last", "all")
SCORES = ("credit", "translated", "level", "abs_credit", "logit", "gradient", "update", "depth")
REFERENCE = 32  # so many prompts, up to twice as many, over whose last positions the mean update is taken
DONORS = 5
FEWEST = 10  # prompts; below, no interval is worth printing
RIVALS = ("level", "logit", "gradient", "update", "depth")
FEWEST_BENT = 30  # non-monotone prompts
NON_MONOTONE = 1.1  # of the index Σ|credit| / |Δp|
AGAIN = "delete it and make it anew: python -m iglens_lab.validation"


class Experiment:
    """What is measured of a prompt: the scores of every block, and the drops of p when it is ablated.

    asked: rows of translators.prompts(), all that may be donors. translators: for the translated credits. seed: of the
    donors. Nothing depends on which prompts were measured before.
    """

    def __init__(self, model, tokenizer, asked: pd.DataFrame, translators: Translators | None = None, seed: int = 0):
        lacks = sorted({"kind", "prompt", "answer"} - set(asked))
        plain = len(asked) > 0 and asked.index.is_unique and pd.api.types.is_integer_dtype(asked.index)
        if lacks or not plain or asked.index.min() < 0:
            got = f"lacks {', '.join(lacks)}" if lacks else f"index {asked.index.tolist()[:5]}"
            raise IGLensError(f"asked: expected rows of translators.prompts(), each its own number, got {got}")
        self.model, self.tokenizer, self.asked, self.seed = model, tokenizer, asked, seed
        self.readout, self.ablations, self.translators = Readout(model), Ablations(model), translators
        self._updates: dict[int, Tensor] = {}
        self._reference = None

    def _asked(self, index: int) -> pd.Series:
        if isinstance(index, bool) or index not in self.asked.index:
            raise IGLensError(f"prompt: expected the number of one of the {len(self.asked)} asked, got {index!r}")
        return self.asked.loc[index]

    def updates(self, index: int) -> Tensor:
        """[n, S, d], what each block adds to the stream of a prompt, untouched."""
        if index not in self._updates:
            ids = encode(self.tokenizer, self._asked(index)["prompt"], special=True)
            self._updates[index] = residual_stream(self.model, ids).diff(dim=0)
        return self._updates[index]

    def mean_update(self, index: int) -> Tensor:
        """[n, 1, d], the mean update at the last position of reference prompts other than this one."""
        if self._reference is None:
            some = self.asked.index[:: max(1, len(self.asked) // REFERENCE)]
            self._reference = {int(one): self.updates(one)[:, -1] for one in some}
        others = [update for one, update in self._reference.items() if one != self._asked(index).name]
        if not others:
            raise IGLensError(f"mean: expected another prompt than {self.asked.loc[index, 'prompt']!r}")
        return torch.stack(others).mean(0)[:, None]

    def donors(self, index: int) -> list[int]:
        """Other prompts of the kind, up to five."""
        kind = self.asked.index[self.asked["kind"] == self._asked(index)["kind"]]
        others = [int(one) for one in kind if one != index]
        if not others:
            raise IGLensError(f"resample: expected another prompt of the kind {self.asked.loc[index, 'kind']!r}")
        chance = np.random.default_rng([self.seed, index])
        return sorted(chance.choice(others, min(DONORS, len(others)), replace=False).tolist())

    def measure(
        self, index: int, interventions: Iterable[str] = INTERVENTIONS, scopes: Iterable[str] = SCOPES
    ) -> pd.DataFrame:
        """One row a block: its scores for the model's own next token, and the drops."""
        row = self._asked(index)
        trace = read(self.model, self.tokenizer, row["prompt"], chat=False, max_new_tokens=1)
        target, ids = int(trace.token_ids[0]), trace.input_ids[:-1]
        result = attribute(self.readout, trace)
        states = trace.stream[:, trace.positions[0]]  # [n + 1, d]
        scores = {
            "credit": result.credits[0],
            "level": result.levels[0, 1:],
            "abs_credit": result.credits[0].abs(),
            "logit": attribute(self.readout, trace, scalar="logit").credits[0],
            "gradient": theory.gradients(self.readout, states[1:], target).norm(dim=-1),
            "update": states.diff(dim=0).norm(dim=-1),
        }
        if self.translators is not None:
            scores["translated"] = attribute(self.readout, trace, translators=self.translators).credits[0]
        frame = pd.DataFrame({name: values.cpu().double().numpy() for name, values in scores.items()})
        frame.insert(0, "layer", result.layers)
        expected = encode(self.tokenizer, row["answer"])[:1]
        first = {"prompt": index, "kind": row["kind"], "token": trace.tokens[0], "correct": expected == [target]}
        first |= {"p": float(result.levels[0, -1]), "delta": float(result.delta[0])}
        for place, (name, value) in enumerate(first.items()):
            frame.insert(place, name, value)
        for what in interventions:
            for scope in scopes:
                frame[f"{what}_{scope}"] = self._drops(index, ids, target, first["p"], what, scope)
        return frame

    def _drops(self, index: int, ids: Tensor, target: int, p: float, what: str, scope: str) -> np.ndarray:
        """[n], p − p without block 1 … n."""

        allowed = max(1e-4, TOLERANCE.get(self.model.dtype, 2e-2))

        def drops(name, updates=None):
            found = self.ablations.probabilities(ids, target, name, scope=scope, updates=updates)
            if not found.isfinite().all():
                raise IGLensError(f"{name}, {scope}: without a block the logits of prompt {index} are not finite")
            if abs(float(found[0]) - p) > allowed:  # the untouched row must be the run that is explained
                raise IGLensError(f"{name}, {scope}: the untouched run gives p = {float(found[0]):.6f}, not {p:.6f}")
            return (found[0] - found[1:]).numpy()

        if what not in INTERVENTIONS:
            raise IGLensError(f"interventions: expected some of {', '.join(INTERVENTIONS)}, got {what!r}")
        if what == "mean":
            mean = self.mean_update(index)
            return drops("update", mean if scope == "last" else mean.expand(-1, len(ids), -1))
        if what == "resample":
            return np.mean([drops("update", self.updates(one)) for one in self.donors(index)], axis=0)
        return drops(what)


# ---------------------------------------------------------------------------------------------------------------------
# The full run
# ---------------------------------------------------------------------------------------------------------------------


def run(experiment: Experiment, path, indices: Iterable[int] | None = None, progress: bool = True) -> pd.DataFrame:
    """Measure prompts and write the results to a compressed CSV; goes on where an earlier run was stopped."""
    path = Path(path)
    if not path.parent.is_dir():
        raise IGLensError(f"path: the folder {path.parent} does not exist; make it first")
    wanted = list(dict.fromkeys(experiment.asked.index if indices is None else indices))
    wanted = sorted(int(experiment._asked(index).name) for index in wanted)
    if not wanted:
        raise IGLensError("indices: expected at least one prompt, got none")
    part = path.with_name(f".{path.name}.{_mark(experiment)}.part")
    done = _finished(part)
    for index in tqdm([i for i in wanted if i not in done], desc="ablation", disable=not progress):
        done[index] = experiment.measure(index).to_csv(index=False, float_format="%.5g", lineterminator="\n")
        with part.open("a", encoding="ascii", newline="") as file:  # a line a prompt, whatever is in its tokens
            file.write(json.dumps([index, done[index]]) + "\n")
            file.flush()
            os.fsync(file.fileno())
    head = done[wanted[0]].partition("\n")[0]
    text = "\n".join([head, *(done[index].partition("\n")[2].removesuffix("\n") for index in wanted), ""])
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        made.write_bytes(gzip.compress(text.encode(), mtime=0))
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
    part.unlink(missing_ok=True)
    return load(path)


def _mark(experiment: Experiment) -> str:
    """What the rows depend on: those of another model, seed or set of prompts are not gone on with."""
    known, made = experiment.asked[["kind", "prompt", "answer"]].to_csv(), experiment.translators
    fitted = None if made is None else (made.ridge, made.tokens, float(made.maps.double().sum()))
    key = (fingerprint(experiment.model), str(experiment.model.dtype), experiment.seed, known, fitted)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def _finished(part: Path) -> dict[int, str]:
    """The rows of the prompts that an earlier run finished; what it was writing when it was killed is cut off."""
    done, end = {}, 0
    if not part.exists():
        return done
    with suppress(ValueError, TypeError):
        for line in part.read_bytes().splitlines(keepends=True):
            index, rows = json.loads(line)
            if type(index) is not int or type(rows) is not str or not line.endswith(b"\n"):
                break
            done[index], end = rows, end + len(line)
    with part.open("r+b") as file:
        file.truncate(end)
    return done


def load(path=RESULTS) -> pd.DataFrame:
    """The stored results; raises IGLensError where there are none."""
    try:  # a token may be a carriage return, or read as a number or as missing
        text = {"kind": str, "token": str}
        frame = pd.read_csv(path, keep_default_na=False, dtype=text, lineterminator="\n", compression="gzip")
    except FileNotFoundError as error:
        raise IGLensError(f"{path}: no results there; make them: python -m iglens_lab.validation") from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise IGLensError(f"{path}: cannot be read ({error}); {AGAIN}") from error
    if lacks := sorted({"prompt", "kind", "token", "layer", "credit"} - set(frame)):
        raise IGLensError(f"{path}: lacks {', '.join(lacks)}; {AGAIN}")
    numbers = frame.drop(columns=["kind", "token"])
    if not all(pd.api.types.is_numeric_dtype(kind) for kind in numbers.dtypes) or numbers.isna().any(axis=None):
        raise IGLensError(f"{path}: some of its numbers are none; {AGAIN}")
    table(frame, "credit")
    return frame


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


# Everything is [N, N] over pairings of prompt i's scores (rows) with prompt j's drops (columns): the diagonal is what
# is asked for, the rest the null, in which the layers stay in place and only the prompt is another's.


def others(pairs: np.ndarray) -> np.ndarray:
    """[N], the mean over the pairings of a prompt's scores with other prompts' drops."""
    return _mean(np.where(np.eye(len(pairs), dtype=bool), np.nan, pairs), 1)


def _mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of what is not NaN; NaN where all is."""
    known = ~np.isnan(values)
    count = known.sum(axis)
    return np.where(count > 0, np.where(known, values, 0).sum(axis) / np.maximum(count, 1), np.nan)


def table(results: pd.DataFrame, column: str, last: bool = True) -> np.ndarray:
    """A column as [N, n] over prompts and blocks; without the last block, [N, n − 1]."""
    if column != "depth" and column not in results:
        raise IGLensError(f"results: expected a column {column!r}; they have {', '.join(results.columns)}")
    rows = results.sort_values(["prompt", "layer"])
    values = rows["layer" if column == "depth" else column].to_numpy(float)
    layers, count = np.unique(rows["layer"]), results["prompt"].nunique()
    if not np.array_equal(rows["layer"], np.tile(layers, count)) or np.isnan(values).any():
        raise IGLensError(
            f"results: expected a number in {column!r} for every prompt and block, once; some are missing"
        )
    return values.reshape(count, len(layers))[:, : None if last else -1]


def kinds(results: pd.DataFrame) -> np.ndarray:
    return results.drop_duplicates("prompt").sort_values("prompt")["kind"].to_numpy()


def enough(results: pd.DataFrame, what: str = "results") -> int:
    """The number of prompts; raises IGLensError where they are too few to say anything."""
    count = results["prompt"].nunique()
    if count < FEWEST:
        raise IGLensError(
            f"{what}: expected at least {FEWEST} prompts, got {count}; raise n_prompts, or take more kinds"
        )
    return count


def ranks(values: np.ndarray, depth: bool = False) -> np.ndarray:
    """The ranks of [N, L] within their rows, centred and of length 1, NaN where all are equal.

    Products of two are Spearman's ρ. depth: without what the layer's number explains of them.
    """
    made = stats.rankdata(values, axis=1)
    made -= made.mean(1, keepdims=True)
    if depth:
        line = np.arange(made.shape[1]) - (made.shape[1] - 1) / 2
        made -= np.outer(made @ line, line) / max(line @ line, 1e-9)
    size = np.linalg.norm(made, axis=1, keepdims=True)
    return np.where(size > 1e-9, made / np.maximum(size, 1e-9), np.nan)


def rank_correlation(scores: np.ndarray, drops: np.ndarray, depth: bool = False) -> np.ndarray:
    """Spearman's ρ of [N, L] and [N, L], for all pairs [N, N]; depth: its partial form, given the layer's number."""
    return ranks(scores, depth) @ ranks(drops, depth).T


def onsets(credits: np.ndarray) -> np.ndarray:
    """[N], the place of the first layer by which half of Σ|credit| is given; −1 where there is none."""
    cumulated = np.abs(credits).cumsum(1)
    place = (cumulated >= 0.5 * cumulated[:, -1:] * (1 - 1e-12)).argmax(1)
    return np.where(cumulated[:, -1] > 0, place, -1)


def wins(credits: np.ndarray, drops: np.ndarray) -> np.ndarray:
    """[N, N]: of the layers with a smaller |credit| than the onset, the share whose drop is smaller too; ties half."""
    place, size = onsets(credits), np.abs(credits)
    values = np.full((len(credits), len(drops)), np.nan)
    for i, at in enumerate(place):
        smaller = size[i] < size[i, at]
        if at >= 0 and smaller.any():
            below = drops[:, smaller] - drops[:, [at]]
            values[i] = (below < 0).mean(1) + 0.5 * (below == 0).mean(1)
    return values


def hits(credits: np.ndarray, drops: np.ndarray, k: int) -> np.ndarray:
    """[N, N]: whether the onset is among the k layers of the largest drops; tied ones share the places left."""
    place = onsets(credits)
    first, final = (stats.rankdata(-drops, axis=1, method=end).T[place] for end in ("min", "max"))  # 1: the largest
    return np.where(place[:, None] >= 0, np.clip((k + 1 - first) / (final + 1 - first), 0, 1), np.nan)


def percentiles(credits: np.ndarray, drops: np.ndarray) -> np.ndarray:
    """[N, N]: the rank of the onset's drop among all layers, 0 the smallest, 1 the largest, ½ by chance."""
    place = onsets(credits)
    ranks = (stats.rankdata(drops, axis=1) - 1) / max(1, drops.shape[1] - 1)
    return np.where(place[:, None] >= 0, ranks.T[place], np.nan)


def interval(values: np.ndarray, kinds: np.ndarray, draws: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """The mean over prompts and its bootstrap 95 % interval, prompts resampled within their kind."""
    known = ~np.isnan(values)
    values, kinds, chance = values[known], kinds[known], np.random.default_rng(seed)
    if not len(values):
        return (np.nan,) * 3
    total = np.zeros(draws)
    for kind in np.unique(kinds):
        some = values[kinds == kind]
        total += chance.choice(some, (draws, len(some))).sum(1)
    low, high = np.percentile(total / len(values), [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def left_out(values: np.ndarray, kinds: np.ndarray) -> tuple[float, float]:
    """The least and the greatest mean when one kind is left out."""
    means = [float(_mean(values[kinds != kind])) for kind in np.unique(kinds)]
    means = [mean for mean in means if mean == mean] or [np.nan]  # of a single kind, nothing stays
    return min(means), max(means)


def permuted(paired: np.ndarray, draws: int = 2000, seed: int = 0) -> float:
    """P-value of the mean of the diagonal of [N, N] under random pairings of scores with drops, one-sided."""
    known = ~np.isnan(paired.diagonal())
    some = paired[np.ix_(known, known)]
    rows = np.arange(len(some))
    if len(rows) < 2:
        return np.nan

    def mean(order, axis=-1):
        return some[rows, order.astype(int)].mean(axis)

    found = stats.permutation_test(
        (rows,), mean, permutation_type="pairings", vectorized=True, n_resamples=draws, alternative="greater", rng=seed
    )
    return float(found.pvalue)


def _chosen(results: pd.DataFrame, some) -> tuple[np.ndarray, np.ndarray]:
    """Which prompts [N], and the kinds [N] of all. Raises IGLensError where they are too few."""
    names = kinds(results)
    some = np.ones(len(names), bool) if some is None else np.asarray(some)
    if some.shape != names.shape or some.dtype != bool:
        raise IGLensError(f"some: expected a bool for each of the {len(names)} prompts, got {some.dtype} {some.shape}")
    enough(results[results["prompt"].isin(np.unique(results["prompt"])[some])])
    return some, names


def _defined(own: np.ndarray, what: str) -> None:
    if np.isnan(own).all():
        raise IGLensError(f"{what}: no prompt has blocks that differ, in credit and in drop; nothing can be compared")


def shuffled(scores: np.ndarray, drops: np.ndarray, draws: int = 200, seed: int = 0) -> float:
    """What the mean ρ of [N, L] and [N, L] stays below in 97.5 % of cases when each prompt's layers are shuffled.

    A null that is too easy to beat: it forgets the depth profile that all prompts share.
    """
    chance = np.random.default_rng(seed)
    scores, drops = ranks(scores), ranks(drops)  # [N, L], of length 1
    means = [_mean((scores * chance.permuted(drops, axis=1)).sum(1)) for _ in range(draws)]
    return float(np.quantile(means, 0.975))


def _signed_ranks(values: np.ndarray) -> float:
    """P-value of Wilcoxon's signed-rank test, NaN where nothing differs from 0."""
    moved = values[~np.isnan(values) & (values != 0)]
    return float(stats.wilcoxon(moved).pvalue) if len(moved) else np.nan


def compare(results: pd.DataFrame, intervention: str, scope: str, last: bool = False, some=None) -> pd.DataFrame:
    """How well each score ranks the drops of an intervention: a row a score, means over prompts of Spearman's ρ.

    last: with the last block, whose drop is the credit by identity where it is skipped at the last position. some:
    [N] bool, of the prompts. Columns: rho, low and high (95 %), null (other prompts' drops), p (of that null), shuffled
    (what 97.5 % of layer shuffles stay below), partial (given depth), least and greatest (a kind left out), ahead,
    ahead_low, ahead_high (of the plain credit's ρ over this one's), p_ahead (Wilcoxon), used and undefined (prompts).
    """
    some, names = _chosen(results, some)
    drops = table(results, f"{intervention}_{scope}", last)[some]
    rows, first = {}, None
    for score in (one for one in SCORES if one in ("credit", "depth") or one in results):
        values = table(results, score, last)[some]
        pairs = rank_correlation(values, drops)
        own = pairs.diagonal()
        if first is None:  # the plain credit
            first = own
            _defined(own, f"{intervention}_{scope}")
        rho, low, high = interval(own, names[some])
        ahead = first - own
        row = {"rho": rho, "low": low, "high": high, "null": float(_mean(others(pairs))), "p": permuted(pairs)}
        row["shuffled"] = shuffled(values, drops)
        row["partial"] = float(_mean(rank_correlation(values, drops, depth=True).diagonal()))  # NaN for depth itself
        row["least"], row["greatest"] = left_out(own, names[some])
        row["ahead"], row["ahead_low"], row["ahead_high"] = interval(ahead, names[some])
        row["p_ahead"] = _signed_ranks(ahead)
        rows[score] = row | {"used": int((~np.isnan(own)).sum()), "undefined": int(np.isnan(own).sum())}
    return pd.DataFrame.from_dict(rows, orient="index")


def onset_table(results: pd.DataFrame, score: str = "credit", last: bool = False, some=None) -> pd.DataFrame:
    """What becomes of the onset: a row an intervention and scope, means over prompts beside the null.

    wins: of the layers with a smaller score than the onset, the share whose drop is smaller (½ by chance); with its
    95 % interval, its null, and ahead: wins − null, with interval. p and p_half: Wilcoxon's, of wins against the null
    and against ½. percentile, hits: see the functions.
    """
    some, names = _chosen(results, some)
    credits, rows = table(results, score, last)[some], {}
    for what in INTERVENTIONS:
        for scope in SCOPES:
            if f"{what}_{scope}" not in results:
                continue
            drops = table(results, f"{what}_{scope}", last)[some]
            pairs = wins(credits, drops)
            own, null = pairs.diagonal(), others(pairs)
            _defined(own, f"{what}_{scope}")
            row = dict(zip(("wins", "low", "high"), interval(own, names[some]), strict=True))
            row["null"] = float(_mean(null))
            row |= dict(zip(("ahead", "ahead_low", "ahead_high"), interval(own - null, names[some]), strict=True))
            row["p"], row["p_half"] = _signed_ranks(own - null), _signed_ranks(own - 0.5)
            row["percentile"] = float(_mean(percentiles(credits, drops).diagonal()))
            for k in (1, 3, 5):
                pairs = hits(credits, drops, k)
                row[f"hit@{k}"], row[f"null@{k}"] = float(_mean(pairs.diagonal())), float(_mean(others(pairs)))
            rows[what, scope] = row | {"used": int((~np.isnan(own)).sum())}
    if not rows:
        raise IGLensError(f"results: expected drops, such as skip_last; they have {', '.join(results.columns)}")
    return pd.DataFrame.from_dict(rows, orient="index")


def bent(results: pd.DataFrame) -> np.ndarray:
    """[N] bool: whether the token's trajectory is non-monotone, Σ|credit| / |Δp| above 1.1."""
    by_prompt = results.sort_values("prompt").groupby("prompt")
    return (by_prompt["abs_credit"].sum() > NON_MONOTONE * by_prompt["delta"].first().abs()).to_numpy()


def by_stratum(results: pd.DataFrame, score: str, intervention: str, scope: str, strata: dict) -> pd.DataFrame:
    """Spearman's ρ of score and drop without the last block: a row a stratum, [N] bool by name.

    Columns: mean, low, high (95 %), null, used. Raises IGLensError on a stratum without prompts.
    """
    names, rows = kinds(results), {}
    for name, some in strata.items():
        if not some.any():
            raise IGLensError(f"stratum {name!r}: expected prompts in it, got none; leave it out, or take more kinds")
        pairs = rank_correlation(
            table(results, score, False)[some], table(results, f"{intervention}_{scope}", False)[some]
        )
        mean, low, high = interval(pairs.diagonal(), names[some])
        rows[name] = {
            "mean": mean,
            "low": low,
            "high": high,
            "null": float(_mean(others(pairs))),
            "used": int(some.sum()),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def verdicts(results: pd.DataFrame, level: float = 0.05) -> pd.DataFrame:
    """The rule of notebooks/04_ablation_validation.ipynb, applied: supported, refuted or undecided.

    A row an intervention and scope; columns a (the onset beats layers with smaller scores), b (credits rank drops
    better than each rival), c_a and c_b (the same for non-monotone tokens). Without the last block; p-values corrected
    by Holm over all conditions of a column (for b, also over the rivals).
    """
    enough(results)
    if lacks := [one for one in (*RIVALS, "abs_credit", "delta") if one != "depth" and one not in results]:
        raise IGLensError(f"results: expected the columns {', '.join(lacks)}; they have {', '.join(results.columns)}")
    columns = {}
    for name, some in (("", None), ("c_", bent(results))):
        if some is not None and some.sum() < FEWEST_BENT:
            columns |= dict.fromkeys(("c_a", "c_b"), "undecided")
            continue
        onset = onset_table(results, some=some)
        chance = np.split(multipletests(onset[["p", "p_half"]].fillna(1).to_numpy().T.ravel(), method="holm")[1], 2)
        columns[f"{name}a"] = [
            "supported" if p < level and row.low > 0.5 and row.ahead_low > 0
            else "refuted" if (half < level and row.high < 0.5) or (p < level and row.ahead_high < 0)
            else "undecided"
            for p, half, row in zip(*chance, onset.itertuples(), strict=True)
        ]  # fmt: skip
        rivals = [compare(results, *condition, some=some).loc[list(RIVALS)] for condition in onset.index]
        chance = multipletests(pd.concat(rivals)["p_ahead"].fillna(1), method="holm")[1].reshape(len(rivals), -1)
        columns[f"{name}b"] = [
            "supported" if (p < level).all() and (frame["ahead_low"] > 0).all()
            else "refuted" if ((p < level) & (frame["ahead_high"] < 0)).any()
            else "undecided"
            for p, frame in zip(chance, rivals, strict=True)
        ]  # fmt: skip
    return pd.DataFrame(columns, index=onset.index)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Ablate every block for every prompt; writes data/ablation_results.csv.gz."
    )
    parser.add_argument("--every", type=int, default=1, help="take every so many of the prompts")
    given = parser.parse_args()
    model, tokenizer = load_model()
    asked = prompts()
    experiment = Experiment(model, tokenizer, asked, for_model(model, tokenizer))
    run(experiment, RESULTS, asked.index[:: given.every])


if __name__ == "__main__":
    main()
