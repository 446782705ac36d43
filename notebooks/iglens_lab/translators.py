"""Affine translators: maps that make an earlier state readable by the one head, fitted in closed form.

A translator of layer L maps h_L to a least-squares estimate of h_n, the state after the last block, as in Din et al.,
Jump to Conclusions (arXiv 2303.09435); the tuned lens (Belrose et al. 2023, arXiv 2303.08112) learns such maps by
gradient descent. That of layer n is the identity, so a path through translated states still ends at the model's own
state, and its credits still sum exactly to Δp. Shapes as in iglens_core: n blocks, d width, k chosen layers, T tokens.

    python -m iglens_lab.translators        compares the alternatives on the default model, in some five minutes
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

from iglens_core import IGLensError, Readout, attribute, context_of, encode, read, residual_stream, save_tensors
from iglens_lab.models import DTYPES, cache_folder, load_model

DATA = Path(__file__).resolve().parents[2] / "data"
TEXT = DATA / "translator_text.json"
RIDGE = 0.01  # see notebooks/05_translated_path.ipynb for the alternatives
RIDGES = (1e-4, RIDGE, 0.1, 1.0)  # kept in the cache, to choose from
WINDOW = 256  # tokens of a text that are read at a time


def fingerprint(model) -> str:
    """What tells two models apart: a thousand values of every weight, from all over it, the norms' ε and the rotation.

    Rounded to bfloat16, so that a model in float32, float64 and bfloat16 has the same. A change of a few values of a
    large matrix may go unseen. Raises IGLensError where weights are offloaded and cannot be looked at.
    """
    digest = hashlib.sha256(repr(getattr(model.config.get_text_config(), "rope_parameters", None)).encode())
    for weight in model.parameters():
        if weight.is_meta:
            raise IGLensError(
                "translators: this model's weights are offloaded; load it whole to fit or use translators"
            )
        some = weight.detach().reshape(-1)[_places(weight.numel()).to(weight.device)].cpu().to(torch.bfloat16)
        digest.update(some.view(torch.int16).numpy().tobytes())
    for module in model.modules():
        digest.update(repr(getattr(module, "variance_epsilon", getattr(module, "eps", None))).encode())
    return digest.hexdigest()


@cache
def _places(count: int) -> Tensor:
    """Which of a weight's values are looked at: all of a vector; random ones of a matrix, so that all columns count."""
    if count <= 4096:
        return torch.arange(count)
    return torch.randint(count, (1000,), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, eq=False)
class Translators:
    """One affine map for each layer below n: h_L becomes h_L + maps[L] h_L + shifts[L].

    maps: [n, d, d]. shifts: [n, d]. model: fingerprint of the model they were fitted on. tokens: the number of states
    they were fitted on. ridge: its strength; inf for the shifts alone. Give them to iglens_core.attribute or explain.
    They were not fitted on a text's first position, the attention sink: there, a translated level is an extrapolation.
    """

    maps: Tensor
    shifts: Tensor
    model: str
    tokens: int
    ridge: float

    def __call__(self, states: Tensor, layers: Iterable[int]) -> Tensor:
        """What the head is to read: states [k, T, d] of the layers -> [k, T, d]; those of layer n as they are."""
        n, d = self.shifts.shape
        layers = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        fits = isinstance(states, Tensor) and states.shape[::2] == (len(layers), d) and states.is_floating_point()
        if not fits or not all(type(layer) is int and 0 <= layer <= n for layer in layers):
            expected = f"floats [{len(layers)}, T, {d}] of layers within 0 … {n}"
            raise IGLensError(f"translators: expected {expected}, got {list(getattr(states, 'shape', []))} of {layers}")
        made = states.clone()
        wide = torch.promote_types(states.dtype, torch.float32)
        for row, layer in enumerate(layers):
            if layer < n:
                h, linear, shift = states[row].to(wide), self.maps[layer], self.shifts[layer]
                made[row] = (h + h @ linear.to(h).T + shift.to(h)).to(states.dtype)
        return made

    def suits(self, model) -> None:
        """Raises IGLensError where the model is not the one they were fitted on."""
        n, d = self.shifts.shape
        if fingerprint(model) != self.model:
            raise IGLensError(
                f"translators: fitted on another model (n = {n} blocks, d = {d}) or on other weights than this "
                f"{type(model).__name__} has; fit them anew: iglens_lab.translators.fit (float16 needs its own)"
            )

    def _fault(self) -> str | None:
        """Why they are not to be kept or used; None where nothing is wrong."""
        tensors, shape = (self.maps, self.shifts), self.shifts.shape
        if len(shape) != 2 or self.maps.shape != (*shape, shape[1]):
            return f"maps {list(self.maps.shape)} do not fit shifts {list(shape)}"
        if not all(one.dtype in DTYPES for one in tensors):
            return f"maps or shifts are not floats of 16 bits or more but {self.maps.dtype}, {self.shifts.dtype}"
        if not all(one.isfinite().all() for one in tensors):
            return "maps or shifts are not finite"
        number = isinstance(self.ridge, (int, float)) and not isinstance(self.ridge, bool)
        if not (isinstance(self.model, str) and type(self.tokens) is int and number and self.ridge >= 0):
            return f"no model, tokens and ridge: {self.model!r:.60}, {self.tokens!r:.60}, {self.ridge!r:.60}"
        return None

    def save(self, path) -> None:
        """Write to a safetensors file, which appears whole or not at all. Raises IGLensError on what load() refuses."""
        if fault := self._fault():
            raise IGLensError(f"save: {fault}; fit them anew, on other text or with a larger ridge")
        labels = {"model": self.model, "tokens": self.tokens, "ridge": self.ridge}
        save_tensors(path, {"maps": self.maps, "shifts": self.shifts}, {"translators": json.dumps(labels)})

    @staticmethod
    def load(path) -> Translators:
        """Read what save() wrote. Raises IGLensError where the file is not such a one."""
        try:
            with safe_open(Path(path), "pt") as file:
                labels = json.loads(file.metadata()["translators"])
                maps, shifts = file.get_tensor("maps"), file.get_tensor("shifts")
            found = Translators(maps, shifts, **labels)
            if fault := found._fault():
                raise ValueError(fault)
            return found
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise IGLensError(f"load: {path} is not a file written by Translators.save ({error})") from error


@dataclass(frozen=True, eq=False)
class Moments:
    """What the fit needs to know of a text, whatever its length: float64 means and products of the states.

    gram[L] = mean of h_L h_Lᵀ [n + 1, d, d], cross[L] = mean of h_L h_nᵀ [n + 1, d, d], mean [n + 1, d].
    """

    gram: Tensor
    cross: Tensor
    mean: Tensor
    model: str
    tokens: int

    def solve(self, ridge: float = RIDGE, rank: int | None = None) -> Translators:
        """Least squares of h_n − h_L on h_L, for all layers. ridge: its penalty, in units of the mean variance of h_L's
        coordinates; inf leaves the shift alone. rank: of the maps, None for full (reduced-rank regression)."""
        n, d = len(self.mean) - 1, self.mean.shape[1]
        _ridge(ridge)
        if rank is not None and not (type(rank) is int and 1 <= rank <= d):
            raise IGLensError(f"rank: expected None or a whole number of 1 … {d}, got {rank!r}")
        maps, shifts = torch.zeros(n, d, d), torch.zeros(n, d)
        for layer in range(n):
            x, y = self.mean[layer], self.mean[n] - self.mean[layer]
            linear = torch.zeros(d, d, dtype=torch.float64)  # [d, d], applied as h @ linear
            if ridge < float("inf"):
                gram = self.gram[layer] - torch.outer(x, x)
                cross = self.cross[layer] - self.gram[layer] - torch.outer(x, y)
                # a hair more than 0, so that directions in which nothing varies have a solution
                hair = 1e-12 * float(self.gram[layer].diagonal().mean()) + 1e-30
                damped = gram + (ridge * float(gram.diagonal().mean()) + hair) * torch.eye(d, dtype=torch.float64)
                linear = torch.linalg.solve(damped, cross)
                if rank is not None:
                    size, along = torch.linalg.eigh(damped)
                    root = size.clamp(min=0).sqrt()[:, None] * along.T
                    main = torch.linalg.svd(root @ linear, full_matrices=False)[2][:rank]
                    linear = linear @ main.T @ main
            maps[layer], shifts[layer] = linear.T, y - x @ linear
        return Translators(maps, shifts, self.model, self.tokens, float(ridge))


def _ridge(ridge) -> None:
    number = isinstance(ridge, (int, float)) and not isinstance(ridge, bool)
    if not (number and (0 <= ridge <= 1e6 or ridge == math.inf)):
        raise IGLensError(f"ridge: expected a number, 0 … 1e6, or inf, got {ridge!r}")


def moments(model, tokenizer, texts: Iterable[str], *, progress: bool = True) -> Moments:
    """One pass over the texts, with a progress bar; memory does not grow with their length.

    It grows with the width: the products are 2 (n + 1) d² float64, 1.1 GB for n = 16 and d = 2048, up to three times
    that while a window is added.
    A text's first position is left out: its state is that of the attention sink, far longer than all others.
    Raises IGLensError on too little text (fewer positions than the model's width) and where states are not finite.
    """
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise IGLensError(f"texts: expected a list of texts, got {str(texts)[:60]!r}")
    gram = cross = mean = None
    tokens = 0
    for one in tqdm(list(texts), desc="fitting translators", disable=not progress):
        for window in _windows(model, tokenizer, one):
            if len(window) < 2:
                continue
            states = residual_stream(model, window)[:, 1:].cpu().double()  # [n + 1, S − 1, d]
            parts = states.mT @ states, states.mT @ states[-1], states.sum(1)
            gram, cross, mean = parts if mean is None else map(torch.add, (gram, cross, mean), parts)
            tokens += states.shape[1]
    d = 0 if mean is None else mean.shape[1]
    if tokens <= d or not tokens:
        raise IGLensError(
            f"texts: expected more than {d or 'the width of the model in'} positions, got {tokens}; add text"
        )
    return Moments(gram / tokens, cross / tokens, mean / tokens, fingerprint(model), tokens)


def _windows(model, tokenizer, one: str) -> tuple[Tensor, ...]:
    """The ids of a text, in parts that the model's context takes; a chat's text comes with its own special tokens."""
    if not isinstance(one, str):
        raise IGLensError(f"texts: expected texts, got {str(one)[:60]!r}")
    own = any(one.startswith(token) for token in getattr(tokenizer, "all_special_tokens", None) or ())
    return torch.tensor(encode(tokenizer, one, special=not own), dtype=torch.long).split(min(WINDOW, context_of(model)))


def fit(model, tokenizer, texts: Iterable[str], *, ridge: float = RIDGE, progress: bool = True) -> Translators:
    """Translators of a model, fitted on the texts in closed form; see moments and Moments.solve."""
    _ridge(ridge)
    return moments(model, tokenizer, texts, progress=progress).solve(ridge)


# ---------------------------------------------------------------------------------------------------------------------
# How well the head reads what the translators make
# ---------------------------------------------------------------------------------------------------------------------


def sample(model, tokenizer, texts: Iterable[str], count: int = 150) -> tuple[Tensor, Tensor]:
    """States [n + 1, R, d] at R = count positions spread over the texts, without each one's first, and next ids [R]."""
    if isinstance(texts, str) or not isinstance(texts, Iterable) or type(count) is not int or count < 1:
        raise IGLensError(
            f"sample: expected a list of texts and a count of at least 1, got {str(texts)[:60]!r}, {count!r}"
        )
    states, following = [], []
    for one in texts:
        window = _windows(model, tokenizer, one)[0]
        if len(window) > 2:
            states.append(residual_stream(model, window)[:, 1:-1].cpu())
            following.append(window[2:])
    if not following:
        raise IGLensError("sample: expected texts of at least three tokens, got none")
    states, following = torch.cat(states, 1), torch.cat(following)
    some = torch.linspace(0, len(following) - 1, min(count, len(following))).round().long()
    return states[:, some], following[some]


def reading(
    readout: Readout, states: Tensor, following: Tensor, layers: Iterable[int], translators=None
) -> pd.DataFrame:
    """How well the head reads each layer's states [n + 1, R, d]; a row a layer, means over R.

    kl: of the final distribution to the one that is read, in nats. cross_entropy: of the text's next ids [R], in nats.
    top1: how often the most probable token is that of the final distribution.
    """
    rows, layers = {}, list(layers)
    if states.shape[1:2] != following.shape or not all(0 <= layer < len(states) for layer in layers):
        got = f"{list(states.shape)}, {list(following.shape)}, layers {layers}"
        raise IGLensError(f"reading: expected states [n + 1, R, d], next ids [R] and layers of 0 … n, got {got}")
    with torch.no_grad():
        final = _log_probs(readout, states[-1])
        for layer in layers:
            h = states[[layer]] if translators is None else translators(states[[layer]], (layer,))
            seen = _log_probs(readout, h[0])
            rows[layer] = {
                "kl": float((final.exp() * (final - seen)).sum(-1).mean()),
                "cross_entropy": float(-seen.gather(1, following[:, None].to(seen.device)).mean()),
                "top1": float((seen.argmax(-1) == final.argmax(-1)).float().mean()),
            }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")


def _log_probs(readout: Readout, h: Tensor) -> Tensor:
    logits = readout.logits(h)
    return logits - logits.logsumexp(-1, keepdim=True)


# ---------------------------------------------------------------------------------------------------------------------
# The text and the comparison that come with the project
# ---------------------------------------------------------------------------------------------------------------------


def text() -> dict:
    """ "fit", "held out" (texts that the default model wrote) and "public domain" (source -> text; held out too)."""
    return json.loads(TEXT.read_text(encoding="utf-8"))


def for_model(model, tokenizer, ridge: float = RIDGE) -> Translators:
    """Translators fitted on the project's text, of one of the RIDGES, from the cache folder.

    On first use they are fitted, all ridges from one pass over the text, which takes a minute or two.
    """
    if isinstance(ridge, bool) or not isinstance(ridge, (int, float)) or ridge not in RIDGES:
        raise IGLensError(f"ridge: expected one of {', '.join(map(str, RIDGES))}, got {ridge!r}; for others use fit()")
    mark = fingerprint(model)
    key = hashlib.sha256(mark.encode() + TEXT.read_bytes()).hexdigest()[:16]
    folder = cache_folder()
    paths = {one: folder / f"translators-{key}-{one:g}.safetensors" for one in RIDGES}
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"translators-{key}.lock"):  # a second process waits for the first one's
        with suppress(IGLensError):
            made = Translators.load(paths[ridge])
            if (made.model, made.ridge) == (mark, ridge):
                return made
        print(f"Fitting translators, once, in about a minute; they are kept in {folder}", file=sys.stderr)
        found = moments(model, tokenizer, text()["fit"])
        for one, path in paths.items():
            found.solve(one).save(path)
        return Translators.load(paths[ridge])


def write_text(model, tokenizer, tokens: int = 160) -> None:
    """Let the model continue the openings at temperature 1; every fifth text is held out."""
    known, made = text(), []
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": one}], add_generation_prompt=True, tokenize=False)
        for one in known["openings"]["chat"]
    ]
    torch.manual_seed(0)
    for some in (known["openings"]["plain"], chats):
        batch = tokenizer(some, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        with torch.no_grad():
            rows = model.generate(**batch, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        for row, mask in zip(rows.tolist(), batch["attention_mask"].tolist(), strict=True):
            ids = row[len(mask) - sum(mask) :]
            ends = [i for i in range(sum(mask), len(ids)) if ids[i] == tokenizer.eos_token_id]
            made.append(tokenizer.decode(ids[: ends[0] + 1] if ends else ids))
    known["fit"] = [one for i, one in enumerate(made) if i % 5 != 4]
    known["held out"] = [one for i, one in enumerate(made) if i % 5 == 4]
    TEXT.write_text(json.dumps(known, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def alternatives(model, tokenizer, whole: Moments, layers=(5, 10, 15, 20, 25, 29)) -> pd.DataFrame:
    """Held-out reading of the plain lens, of the shift alone, and of translators of several ridges, ranks and texts.

    whole: moments of the project's text.
    """
    known, readout = text(), Readout(model)
    parts = {"generated": known["held out"], "public domain": list(known["public domain"].values())}
    held = {name: sample(model, tokenizer, texts) for name, texts in parts.items()}
    tried = {("identity", ""): None, ("mean shift", ""): whole.solve(math.inf)}
    tried |= {("ridge", f"{ridge:g}"): whole.solve(ridge) for ridge in (1e-6, 1e-4, 1e-2, 0.1, 1.0, 10.0)}
    tried |= {("rank", str(rank)): whole.solve(rank=rank) for rank in (8, 32, 128)}
    for share in (8, 4, 2):
        some = moments(model, tokenizer, known["fit"][::share])
        tried["text", f"{some.tokens} positions"] = some.solve()
    for name, chat in (("plain only", False), ("chat only", True)):
        some = [one for one in known["fit"] if one.startswith("<|im_start|>") is chat]
        tried["text", name] = fit(model, tokenizer, some)
    found = []
    for (kind, setting), translators in tqdm(tried.items(), desc="alternatives"):
        for part, (states, following) in held.items():
            frame = reading(readout, states, following, layers, translators).reset_index()
            found.append(frame.assign(kind=kind, setting=setting, held_out=part))
    return pd.concat(found)[["kind", "setting", "held_out", "layer", "kl", "cross_entropy", "top1"]]


def prompts(kinds: Iterable[str] | None = None) -> pd.DataFrame:
    """The project's prompts: kind, language, prompt and the expected answer, text as it stands in the file."""
    frame = pd.read_csv(DATA / "prompts.csv", dtype=str, keep_default_na=False)
    wanted = set(frame["kind"]) if kinds is None else {kinds} if isinstance(kinds, str) else set(kinds)
    if unknown := wanted - set(frame["kind"]):
        raise IGLensError(f"kinds: expected some of {', '.join(sorted(set(frame['kind'])))}, got {sorted(unknown)}")
    return frame[frame["kind"].isin(wanted)]


def variants(model, tokenizer, whole: Moments) -> dict[str, Translators]:
    """Translators that differ in ridge, rank or text: between them an onset should stand. whole: see alternatives."""
    made = {f"ridge {ridge:g}": whole.solve(ridge) for ridge in (RIDGE, 1e-4, 0.1, 1.0)}
    made["rank 128"] = whole.solve(rank=min(128, whole.mean.shape[1]))
    for half in (0, 1):
        made[f"half {half + 1} of the text"] = fit(model, tokenizer, text()["fit"][half::2])
    return made


def onsets(
    model, tokenizer, asked: pd.DataFrame, translators: dict[str, Translators], tokens: int = 3, progress: bool = True
) -> pd.DataFrame:
    """Onsets of every greedy answer token of the prompts, plain and translated: a row a token.

    asked: rows of prompts(). translators: the first is the one that is meant, all together give the interval.
    """
    readout, rows = Readout(model), []
    each = list(zip(asked.index, asked["kind"], asked["prompt"], strict=True))
    for index, kind, prompt in tqdm(each, desc="onsets", disable=not progress):
        trace = read(model, tokenizer, prompt, chat=False, max_new_tokens=tokens)
        plain = attribute(readout, trace)
        others = [attribute(readout, trace, translators=one) for one in translators.values()]
        found = torch.stack([one.onset() for one in others])  # [variants, T]
        for t, token in enumerate(trace.tokens):
            rows.append(
                {"prompt": index, "kind": kind, "place": t, "token": token, "p": float(plain.levels[t, -1]),
                 "delta_plain": float(plain.delta[t]), "delta_translated": float(others[0].delta[t]),
                 "last_plain": float(plain.credits[t, -1]), "last_translated": float(others[0].credits[t, -1]),
                 "onset_plain": int(plain.onset()[t]), "onset_translated": int(found[0, t]),
                 "onset_low": int(found[:, t].min()), "onset_high": int(found[:, t].max())}
            )  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare translators of the default model; writes to data/.")
    parser.add_argument("--text", action="store_true", help="let the model write the text anew first")
    parser.add_argument("--every", type=int, default=4, help="take every so many of the prompts for the onsets")
    given = parser.parse_args()
    model, tokenizer = load_model()
    if given.text:
        write_text(model, tokenizer)
    whole = moments(model, tokenizer, text()["fit"])
    frames = {
        "translated_onsets": onsets(model, tokenizer, prompts()[:: given.every], variants(model, tokenizer, whole)),
        "translators": alternatives(model, tokenizer, whole),
    }
    for name, frame in frames.items():
        frame.to_csv(DATA / f"{name}.csv", index=False, float_format="%.4f", lineterminator="\n")


if __name__ == "__main__":
    main()
