"""Paths, curves and counts for the theory: what the notebooks draw and check beside the core's credits.

Shapes as in iglens_core: k segments of a path, T tokens, d width, V head rows, R rows of a readout call.
"""

from __future__ import annotations

import itertools
import math
import warnings
from copy import deepcopy

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from iglens_core import IGLensError, Readout, attribute, path_credits, read


def densify(states: Tensor, m: int) -> Tensor:
    """A path with m equal steps a segment: states [k + 1, T, d] -> [k·m + 1, T, d], its points kept as they are."""
    if type(m) is not int or m < 1:
        raise IGLensError(f"m: expected a whole number of steps, at least 1, got {m!r}")
    if not isinstance(states, Tensor) or states.ndim != 3 or len(states) < 2 or not states.is_floating_point():
        raise IGLensError(f"states: expected a path of floats [k + 1, T, d], got {list(getattr(states, 'shape', []))}")
    wide = states if states.dtype == torch.float64 else states.float()  # a difference may overflow in half precision
    t = (torch.arange(m, dtype=torch.float64) / m).to(wide)[:, None, None]
    inner = wide[:-1, None] + t * wide.diff(dim=0)[:, None]  # [k, m, T, d]
    return torch.cat([inner.flatten(0, 1), wide[-1:]]).to(states.dtype)


def curves(start: Tensor, end: Tensor, bend: float = 0.45, points: int = 256) -> dict[str, Tensor]:
    """Three curves of the plane between the same ends, [2] each -> name: [points + 1, 2].

    "straight"; "bent": an arc that leaves the chord by `bend` times its length; "detour": with a loop on the way.
    """
    if start.shape != (2,) or end.shape != (2,):
        raise IGLensError(f"expected two points of a plane, [2] each, got {list(start.shape)} and {list(end.shape)}")
    t = torch.linspace(0, 1, points + 1, dtype=torch.float64)[:, None]
    chord = end.double() - start.double()
    across = torch.stack([-chord[1], chord[0]])
    line = start.double() + t * chord
    turn = 2 * math.pi * t
    return {
        "straight": line,
        "bent": line + bend * 4 * t * (1 - t) * across,
        "detour": line + bend * ((1 - torch.cos(turn)) * across / 2 + torch.sin(2 * turn) * chord / 2),
    }


def gradients(readout: Readout, h: Tensor, target: int) -> Tensor:
    """∇p at every state, h [R, d] -> [R, d]."""
    with torch.enable_grad():
        x = h.detach().clone().requires_grad_()
        return torch.autograd.grad(readout.prob(x, target).sum(), x)[0]


def integral(readout: Readout, curve: Tensor, target: int, steps: int = 4) -> float:
    """∫ ∇p · dh along a polyline [P, d], by Gauss–Legendre with `steps` points on each of its pieces."""
    credits, _ = path_credits(readout, curve[:, None], [target], estimator="gauss-legendre", steps=steps)
    return float(credits.sum())


def operations(T: int, k: int, V: int, d: int, m: int = 1) -> dict[str, int]:
    """Floating-point operations of the head's products, for T tokens and k layers; norm and softmax are small beside.

    "observed": one product of T·(k + 1) rows. "observed, naive": every one of the m steps of a segment is read.
    "gradient": m points a segment, forward, and backward to the states, which is a product of the same size.
    """
    if min(T, k, V, d, m) < 1:
        raise IGLensError(f"expected numbers of at least 1, got T={T}, k={k}, V={V}, d={d}, m={m}")
    row = 2 * V * d
    return {"observed": T * (k + 1) * row, "observed, naive": T * (k * m + 1) * row, "gradient": 2 * T * k * m * row}


def verification(models: dict, ms: list[int]) -> pd.DataFrame:
    """The largest errors over the models, by dtype, estimator and steps; a column for each baseline.

    models: name -> (model, tokenizer, prompt, answer), float32. The last column is the largest faithfulness error. The
    vector baseline is the embedding of the vocabulary's first token.
    """
    rows = {}
    for dtype in (torch.float32, torch.float64):
        for model, tokenizer, prompt, answer in models.values():
            same = deepcopy(model).to(dtype)
            readout, trace = Readout(same), read(same, tokenizer, prompt, answer=answer)
            vector = same.get_input_embeddings().weight[0]
            for estimator, m in itertools.product(("observed", "midpoint", "gauss-legendre"), ms):
                row = rows.setdefault((str(dtype).removeprefix("torch."), estimator, m), {})
                for name, baseline in {
                    "embedding": "embedding",
                    "mean": "mean",
                    "zero": "zero",
                    "vector": vector,
                }.items():
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)  # that a sum is off is what is measured
                        one = attribute(readout, trace, baseline=baseline, estimator=estimator, steps=m)
                    row[name] = _larger(row.get(name, 0.0), one.completeness_error)
                row["faithfulness"] = _larger(row.get("faithfulness", 0.0), one.faithfulness_error)  # at any baseline
    return pd.DataFrame(rows.values(), index=pd.MultiIndex.from_tuples(rows, names=["dtype", "estimator", "m"]))


def _larger(a: float, b: float) -> float:
    return float(np.maximum(a, b))  # NaN where one is NaN, unlike max()


def order(error: float, floor: float) -> str:
    """An error as the nearest power of ten, so that machines agree; "≤ floor" where within it (a power of ten)."""
    if 0 <= error <= floor:
        return f"≤ {floor:.0e}"
    return f"{10.0 ** round(math.log10(error)):.0e}" if 0 < error < math.inf else str(error)
