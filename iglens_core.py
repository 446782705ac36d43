"""IG-Lens: which layers of a language model produced the probability of this token.

The change in a token's probability between a baseline and the model's last state is split over the layers so that the
parts sum to the whole. Softmax and final norm stay inside the path, one readout head is applied once to every state,
and no backward pass is needed.

References
  [1] IG-Lens: Exact Additive Probability Attribution Across Transformer Layers via Telescoping Integrated Gradients,
      arXiv 2606.29693.
  [2] Yang, Wang, Bilgic: IDGI, a framework to eliminate explanation noise from integrated gradients, arXiv 2303.14242.
  [3] nostalgebraist: interpreting GPT, the logit lens, 2020.

Axes, everywhere in this file
  n  blocks of the model             S  positions of the sequence        k  chosen layers (k + 1 path points)
  d  width of the residual stream    T  explained tokens                 R  rows of a readout call
  V  rows of the head (vocabulary)   C  positions compared with the model's own logits

Layer L is the residual stream after block L and before the final norm; layer 0 is the input of the first block. A token
is read at its *predicting* position: the one before its own.
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
import operator
import os
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

__all__ = [
    "Attribution", "CompletenessError", "FaithfulnessError", "IGLensError", "Readout", "Trace", "UnsupportedModelError",
    "attribute", "blocks_of", "context_of", "encode", "explain", "path_credits", "read", "residual_path",
    "residual_stream", "save_tensors", "token_id", "token_text",
]  # fmt: skip

HALF = (torch.bfloat16, torch.float16)
COMPARED = 64  # positions at which the model's own logits are kept, so that memory does not grow with the text
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # in probability
TOLERANCE_NATS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 3e-2}  # in logarithms
ROUGH = 1e-2  # completeness error of a gradient estimator that is worth a warning
SLICE = 512  # rows of the head in one product, see Readout._read
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # the alphabet of byte-level tokenizers


class IGLensError(ValueError):
    """Something cannot be computed; the message says what was given, what was expected and what to do."""


class UnsupportedModelError(IGLensError):
    """The model's residual stream or readout cannot be read faithfully."""


class CompletenessError(IGLensError):
    """The credits do not sum to the change of the scalar."""


class FaithfulnessError(IGLensError):
    """The readout disagrees with the model's own logits."""


def _require(condition, message: str, error: type[IGLensError] = IGLensError) -> None:
    if not condition:
        raise error(" ".join(message.split())[:600])  # what was given may be a large tensor


# ---------------------------------------------------------------------------------------------------------------------
# Reading a model: blocks, residual stream, logits
# ---------------------------------------------------------------------------------------------------------------------


def _name(model) -> str:
    return type(model).__name__


def blocks_of(model) -> nn.ModuleList:
    """The model's n blocks; raises UnsupportedModelError where there is no causal stack of them with a head."""
    known = isinstance(model, nn.Module) and hasattr(model, "config")
    _require(known, f"model: expected a causal language model of transformers, loaded, got {_name(model)}")
    decoder = not getattr(model.config, "is_encoder_decoder", False)
    _require(decoder, f"{_name(model)} is an encoder-decoder; expected a causal decoder", UnsupportedModelError)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    _require(head is not None, f"{_name(model)} has no head; load it with AutoModelForCausalLM", UnsupportedModelError)
    n = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    _require(n, f"{_name(model)}: its config gives no number of blocks (num_hidden_layers)", UnsupportedModelError)
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == n}
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(outer) > 1:  # a vision tower may be as deep as the language model, but it does not run on text
        ran = []
        handles = [lists[name][0].register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name in outer]
        with _hooked(handles), _evaluating(model), torch.no_grad(), suppress(Exception):
            model(input_ids=torch.tensor([[1, 1]], device=_device(model)))
        outer = sorted(set(ran))
    message = f"{_name(model)}: expected one list of {n} blocks in the model, found {outer or 'none'}"
    _require(len(outer) == 1, message, UnsupportedModelError)
    blocks = lists[outer[0]]
    _require(len({*blocks}) == n, f"{_name(model)}: the same block stands at several layers", UnsupportedModelError)
    return blocks


@contextmanager
def _evaluating(model: nn.Module):
    """Eval mode inside; every module's own mode is put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager"):  # hooks must run, also in a compiled model
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _hooked(handles: list):
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first(output) -> Tensor:
    """A block's states: blocks return a tensor or a tuple that starts with it."""
    return output[0] if isinstance(output, (tuple, list)) else output


def _shape(value) -> list:
    return list(value.shape) if isinstance(value, Tensor) else [type(value).__name__]


def _first_tensor(args, kwargs) -> Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _ids(input_ids, rows: int | None = None, what: str = "input_ids", kind: str = "ids of this model") -> Tensor:
    """[S] long on the CPU, from [S] or [1, S]; every id within the given number of rows."""
    flags = isinstance(input_ids, (list, tuple)) and any(isinstance(one, bool) for one in input_ids)
    _require(not flags, f"{what}: expected integers, got torch.bool")
    try:
        ids = torch.as_tensor(input_ids).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise IGLensError(f"{what}: expected integers, got {str(input_ids)[:80]!r}") from error
    _require(ids.numel() > 0, f"{what}: expected at least one id, got none")
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    _require(whole, f"{what}: expected integers, got {ids.dtype}")
    ids = ids[0] if ids.ndim == 2 and len(ids) == 1 else ids
    _require(ids.ndim == 1, f"{what}: expected one sequence, [S] or [1, S], got shape {list(ids.shape)}")
    ids = ids.long()
    bad = [] if rows is None else ids[(ids < 0) | (ids >= rows)].tolist()
    _require(not bad, f"{what}: expected {kind}, 0 … {(rows or 0) - 1}, got {bad[:3]}")
    return ids


def _device(model) -> torch.device:
    """Where the ids go: an offloaded model's own device is "meta", its embedding knows where it runs."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return model.device if device is None else torch.device(device)


def _run(model, ids: Tensor, at: Tensor | None = None, overwrite: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One forward of one sequence: ids [S] -> stream [n + 1, S, d], the model's own logits [C, V] at positions `at`.

    `overwrite` [S, d] takes the place of the last block's output (the stream still holds what the block computed).
    """
    blocks = blocks_of(model)
    ids = _ids(ids, getattr(model.get_input_embeddings(), "num_embeddings", None)).to(_device(model))
    stream, seen = None, []

    def store(layer, states):
        nonlocal stream
        message = f"{_name(model)}: expected one stream [1, {len(ids)}, d], layer {layer} gives {_shape(states)}"
        _require(_shape(states)[:2] == [1, len(ids)] and states.ndim == 3, message, UnsupportedModelError)
        if stream is None:
            stream = states.new_empty((len(blocks) + 1, *states.shape[1:]))
        stream = stream.to(torch.promote_types(stream.dtype, states.dtype))  # some keep a wider stream than embedding
        stream[layer] = states[0]  # copied at once: a later block may write into its input
        seen.append(layer)

    def before_first(module, args, kwargs):
        store(0, _first_tensor(args, kwargs))

    def after(layer):
        def hook(module, args, output):
            store(layer, _first(output))
            if layer == len(blocks) and overwrite is not None:
                rows = overwrite[None].to(_first(output))
                return (rows, *output[1:]) if isinstance(output, (tuple, list)) else rows

        return hook

    kwargs, accepted = {}, inspect.signature(model.forward).parameters
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    if "return_dict" in accepted:
        kwargs["return_dict"] = True
    if at is not None and "logits_to_keep" in accepted:
        kwargs["logits_to_keep"] = at.to(ids.device)
    handles = [blocks[0].register_forward_pre_hook(before_first, with_kwargs=True)]
    handles += [block.register_forward_hook(after(layer)) for layer, block in enumerate(blocks, 1)]
    with _hooked(handles), _evaluating(model), torch.no_grad():
        try:
            logits = model(input_ids=ids[None], **kwargs).logits[0]
        except IGLensError:
            raise
        except Exception as error:  # whatever the model raises, the caller learns that it is the model
            raise UnsupportedModelError(f"{_name(model)} fails on {len(ids)} ids: {_line(error)}") from error
    message = f"{_name(model)}: expected every block to run once, in order; they ran as {seen[:12]}"
    _require(seen == list(range(len(blocks) + 1)), message, UnsupportedModelError)
    if at is not None and len(logits) != len(at):
        logits = logits[at.to(logits.device)]
    return stream, logits.detach()


def _line(error) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def residual_stream(model, input_ids, attention_mask=None) -> Tensor:
    """The residual stream of one sequence, before the final norm, captured by hooks that are removed again.

    input_ids: [S] or [1, S] ids. attention_mask: the same shape, 0 for padding at either end. Returns [n + 1, S, d]:
    layer 0 is the input of the first block, layer n the output of the last, NaN at padding. (`output_hidden_states`
    would give the last state after the final norm.) Raises IGLensError on bad ids or non-finite states,
    UnsupportedModelError where the model has no single residual stream.
    """
    ids = _ids(input_ids)
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    with suppress(TypeError, ValueError, RuntimeError):  # what is no tensor is refused by _ids
        mask = torch.as_tensor(mask)
        mask = mask.long() if mask.dtype == torch.bool else mask
    mask = _ids(mask, 2, "attention_mask", "0 or 1")
    real = mask.nonzero()[:, 0]
    whole = mask.shape == ids.shape and len(real) > 0 and int(real[-1] - real[0]) == len(real) - 1
    _require(whole, f"attention_mask: expected {len(ids)} values, its 1s in one run, got {mask.tolist()[:20]}")
    stream, _ = _run(model, ids[real], at=torch.tensor([0]))  # without the padding, which models read differently
    padded = _finite(stream, model).new_full((len(stream), len(ids), stream.shape[-1]), math.nan)
    padded[:, real.to(stream.device)] = stream
    return padded


def _finite(stream: Tensor, model) -> Tensor:
    bad = [layer for layer, states in enumerate(stream) if not torch.isfinite(states).all()]
    what = f"{_name(model)}: the residual stream at layer {bad[:1]} is not finite in {stream.dtype}"
    _require(not bad, f"{what}; load the model in bfloat16 or float32")
    return stream


# ---------------------------------------------------------------------------------------------------------------------
# The readout
# ---------------------------------------------------------------------------------------------------------------------


def context_of(model) -> float:
    """Positions the model can take; some configs say −1 or nothing where there is no limit."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else math.inf


class Readout:
    """The model's own way from a residual state to a probability: final norm, head, and what it does to its logits.

    It is found by watching which modules turn the last block's output into the logits, then checked twice against the
    model: at the last layer, and with the last block's output overwritten by states of every depth. Raises
    UnsupportedModelError where the two disagree. Attributes: V (rows of the head), d (width), n (blocks).
    """

    def __init__(self, model):
        blocks = blocks_of(model)
        self.model, self.n = model, len(blocks)
        rows = getattr(model.get_input_embeddings(), "num_embeddings", 2)
        probe = [(7 + 13 * i * max(1, rows // 97)) % rows for i in range(min(8, context_of(model)))]
        probe = torch.tensor(probe)
        calls, end = [], model.get_output_embeddings()
        inside = {m for m in blocks.modules()}
        watched = [m for m in model.modules() if m not in inside and blocks not in set(m.modules())]

        def note(module, args, kwargs, output):
            states = _first_tensor(args, kwargs)
            if states is not None and isinstance(_first(output), Tensor):
                calls.append((module, states, _first(output)))

        handles = [blocks[-1].register_forward_pre_hook(lambda *_: calls.clear())]
        handles += [module.register_forward_hook(note, with_kwargs=True) for module in watched]
        with _hooked(handles):
            stream, logits = _run(model, probe)
        self.V, self.d = logits.shape[-1], _finite(stream, model).shape[-1]
        self._tail = self._follow(stream[-1][None], calls, end)
        lost = f"{_name(model)}: could not follow the states from block {self.n} to the head; nothing is read from it"
        _require(self._tail is not None, lost, UnsupportedModelError)
        self._slope, self._cap = self._shape_of_logits(probe)
        try:
            self._check(probe, stream, logits)
        except RuntimeError as error:
            raise UnsupportedModelError(f"{_name(model)}: its norm and head fail alone: {_line(error)}") from error

    def _follow(self, states: Tensor, calls: list, end: nn.Module) -> list | None:
        """The modules from `states` to the head: [(module, factor on its input, dtype of its input), …] or None."""
        for i, (module, given, output) in enumerate(calls):
            factor = _factor(given, states)
            parts = set(module.modules())
            outer = any(module in set(m.modules()) and _factor(g, states) == factor for m, g, _ in calls[i + 1 :])
            if factor is None or outer:  # the outermost module that takes the states stands for those inside it
                continue
            rest = [] if end in parts else self._follow(output, calls[i + 1 :], end)
            if rest is not None:
                return [(module, factor, given.dtype), *rest]
        return None

    def _shape_of_logits(self, probe: Tensor) -> tuple[float, float | None]:
        """What the model does to the head's output, from its answer to known values: cap·tanh(slope·z / cap)."""
        m, top = self.V // 2, 1e4 if self.model.dtype in (torch.float32, torch.float64) else 1e3
        wide = torch.linspace(-1, 1, self.V - m, dtype=torch.float64) ** 3 * top
        known = torch.cat([torch.linspace(-1e-2, 1e-2, m, dtype=torch.float64), wide]).to(self.model.dtype)
        end = self._tail[-1][0]
        with _hooked([end.register_forward_hook(lambda _, args, output: known.to(output).expand_as(output).clone())]):
            _, logits = _run(self.model, probe)
        z, y = known.double(), logits[0].double().cpu()
        if torch.equal(y, z):
            return 1.0, None
        slope = float(y[:m] @ z[:m] / (z[:m] @ z[:m]))  # averaged: a half-precision model rounds each value
        cap = None
        if abs(float(y[-1]) - slope * float(z[-1])) > 0.05 * abs(float(y[-1])):  # it saturates
            cap = abs(float(y[-1]))
            straight = cap * torch.atanh((y[:m] / cap).clamp(-0.999, 0.999))
            slope = float(straight @ z[:m] / (z[:m] @ z[:m]))
        made = slope * z if cap is None else cap * torch.tanh(slope * z / cap)
        error = float(((y - made).abs() / (made.abs() + 1e-2)).max())
        message = f"{_name(self.model)} does to its logits what is neither a scale nor a soft cap (off by {error:.1e})"
        _require(error < max(3 * torch.finfo(logits.dtype).eps, 1e-5), message, UnsupportedModelError)
        return slope, cap

    def _check(self, probe: Tensor, stream: Tensor, logits: Tensor) -> None:
        layers = torch.linspace(0, self.n, len(probe)).round().long()
        mixed = stream[layers.to(stream.device), torch.arange(len(probe), device=stream.device)]
        changed = probe.clone()
        changed[-1] = (probe[-1] + 1) % max(2, int(probe.max()) + 1)
        again, overwritten = _run(self.model, changed, overwrite=mixed)
        moved = (again - stream)[:, :-1].abs().amax(-1) / stream[:, :-1].abs().amax(-1).clamp(min=1e-30)
        message = f"{_name(self.model)}: a later token changes earlier states (an encoder?); expected a causal decoder"
        _require(moved.max() <= (4e-3 if self.model.dtype in HALF else 1e-4), message, UnsupportedModelError)
        self._agrees(stream[-1], logits, UnsupportedModelError)
        self._agrees(mixed, overwritten, UnsupportedModelError)

    def _agrees(self, states: Tensor, own: Tensor, error: type[IGLensError]) -> None:
        """Over the whole vocabulary, the readout of states [R, d] gives the model's own logits [R, V]."""
        allowed = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
        allowed = allowed.get(self.model.dtype, 8e-3)
        fits = own.ndim == 2 and own.shape[1] == self.V
        _require(fits, f"logits: expected [C, {self.V}], got {_shape(own)}; read the trace with the same model", error)
        # off by how much of the logits that matter: one huge masked logit must not make all others look small
        size = max(float(row.abs()[row >= row.max() - 50].max()) for row in own)
        gap = 0.0
        for i in range(0, len(states), 8):
            j = torch.arange(min(i + 8, len(states)) - 1, i - 1, -1)  # turned round: no row may depend on others
            part = own[j.to(own.device)].double()
            with torch.no_grad():
                off = (self.logits(states[j.to(states.device)]).to(own.device).double() - part).abs()
            off /= part.abs_().clamp_(min=max(size, 1e-30))
            gap = max(gap, float(off.max())) if torch.isfinite(off).all() else math.nan
            message = f"{_name(self.model)}: the readout misses the model's own logits by {gap:.1e} of their size"
            _require(gap <= allowed, f"{message} (allowed {allowed:.0e}); expected the same, unchanged model", error)

    def _before_head(self, h: Tensor) -> Tensor:
        """h [R, d] -> [1, R, ·], the input of the tail's last module."""
        fits = len(_shape(h)) == 2 and _shape(h)[1] == self.d and h.is_floating_point()
        _require(fits, f"h: expected floats [R, {self.d}], got {_shape(h)} {getattr(h, 'dtype', '')}")
        x = h[None].to(_device(self.model))
        for module, factor, dtype in self._tail[:-1]:
            with _evaluating(module):
                x = _first(module((x if factor == 1 else x * factor).to(dtype)))
        _, factor, dtype = self._tail[-1]
        return (x if factor == 1 else x * factor).to(dtype)

    def _after_head(self, x: Tensor) -> Tensor:
        x = x if self._slope == 1 else x * self._slope
        x = x if self._cap is None else self._cap * torch.tanh(x / self._cap)
        return x if x.dtype == torch.float64 else x.float()

    def logits(self, h: Tensor) -> Tensor:
        """h [R, d] -> [R, V], after soft cap and scale, as the model would; float32 (float64 for a float64 model)."""
        x, head = self._before_head(h), self._tail[-1][0]
        with _evaluating(head):
            return self._after_head(_first(head(x))[0])

    def _sliced(self) -> bool:
        """Whether the head is a plain, resident Linear; any other is called as the module it is."""
        head = self._tail[-1][0]
        hooks = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
        return type(head) is nn.Linear and not hooks and not head.weight.is_meta

    def _read(self, h: Tensor, ids: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """h [R, d], ids [R, q] -> the logits of the ids [R, q], logsumexp [R], entropy [R].

        A plain head is applied in slices of the vocabulary, to all rows at once: so a product reads the weights once,
        and its logits are reduced while they are still in the processor's cache. Chunks of rows over the whole
        vocabulary would read the weights anew for each chunk and send every logit through main memory. On two cores,
        1,984 rows, d 576, V 49,152: slices of 512 took 0.66 s, of 4,096 0.94 s, chunks of 432 whole rows 1.09 s.
        """
        if not self._sliced():
            return _summary([self.logits(h)], ids, entropy)
        head, x = self._tail[-1][0], self._before_head(h)[0]
        bias = [None] * self.V if head.bias is None else head.bias.split(SLICE)
        slices = zip(head.weight.split(SLICE), bias, strict=False)
        return _summary((self._after_head(nn.functional.linear(x, *part)) for part in slices), ids, entropy)

    def _value(self, h: Tensor, ids: Tensor, scalar) -> Tensor:
        """h [R, d], ids [R, q] -> the scalar [R]."""
        return _scalar_of(*self._read(h, ids.to(_device(self.model)), scalar == "entropy"), scalar)

    def log_prob(self, h: Tensor, target) -> Tensor:
        """h [R, d], target [R] ids (or one id for all) -> log-probability [R], in nats."""
        return self._value(h, _targets(target, len(h), self.V)[:, None], "log_prob")

    def prob(self, h: Tensor, target) -> Tensor:
        """h [R, d], target [R] ids (or one id for all) -> probability [R]; the paper's f."""
        return self._value(h, _targets(target, len(h), self.V)[:, None], "prob")

    def topk(self, h: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """h [R, d] -> the k largest probabilities [R, k] and their ids [R, k]."""
        k = _whole(k, "k", 1, self.V)
        logits = self.logits(h)
        best = logits.topk(k, dim=-1)
        return (best.values - logits.logsumexp(-1, keepdim=True)).exp(), best.indices


def _factor(given: Tensor, states: Tensor) -> float | None:
    """The constant c with given = c·states, None where there is none."""
    if given.shape != states.shape or not given.is_floating_point():
        return None
    a, b = given.detach().double().cpu(), states.detach().to(given.dtype).double().cpu()
    if torch.equal(a, b):
        return 1.0
    c = float((a * b).sum() / (b * b).sum()) if bool(b.any()) else 0.0
    close = (a - c * b).abs().max() <= 4 * torch.finfo(given.dtype).eps * a.abs().max()
    return c if c != 0 and bool(close) else None


def _summary(slices, ids: Tensor, entropy: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits in slices of the vocabulary, each [R, ·] -> those of the ids [R, q], logsumexp [R], entropy [R]."""
    start, picked, sums, parts = 0, None, [], []
    for logits in slices:
        inside = (ids >= start) & (ids < start + logits.shape[1])
        found = logits.gather(1, (ids - start).clamp(0, logits.shape[1] - 1))
        picked = found if picked is None else torch.where(inside, found, picked)
        # logit − logsumexp: torch's float32 softmax loses two digits at large vocabularies
        sums.append(logits.logsumexp(-1))
        if entropy:  # of log-probabilities within the slice: a mean of raw logits would cancel against logsumexp
            log_p = (logits - sums[-1][:, None]).clamp(min=-1e4)
            parts.append((log_p.exp() * log_p).sum(-1))
        start += logits.shape[1]
    total = torch.stack(sums).logsumexp(0)
    log_w = torch.stack(sums) - total
    return picked, total, -(log_w.exp() * (torch.stack(parts) + log_w)).sum(0) if entropy else None


def _scalar_of(picked: Tensor, total: Tensor, entropy: Tensor | None, scalar) -> Tensor:
    """The scalar [R] from the logits of its ids [R, q], logsumexp [R] and entropy [R]."""
    if scalar == "entropy":
        return entropy
    if scalar == "logit":
        return picked[:, 0]
    log_prob = picked - total[:, None]
    if isinstance(scalar, str):
        return log_prob[:, 0] if scalar == "log_prob" else log_prob[:, 0].exp()
    pair = picked if scalar[0] == "logit" else log_prob.exp()
    return pair[:, 0] - pair[:, 1]


def _whole(value, what: str, low: float = -math.inf, high: float = math.inf) -> int:
    """An integer within the bounds, not a bool."""
    number = None
    if not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool:
        with suppress(TypeError, RuntimeError):
            number = operator.index(value)
    fits = number is not None and low <= number <= high
    bounds = "" if low == -math.inf else f", at least {low}" if high == math.inf else f", {low} … {high}"
    shown = repr(value) if number is None or abs(number) < 10**18 else "a number of many digits"
    _require(fits, f"{what}: expected an integer{bounds}, got {shown}")
    return number


def _number(value, what: str, fits: Callable[[float], bool], expected: str) -> None:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    _require(real and fits(value), f"{what}: expected {expected}, got {value!r}")


def _targets(target, count: int, rows: int) -> Tensor:
    if isinstance(target, numbers.Integral) or getattr(target, "ndim", None) == 0:
        target = [target] * count
    target = _ids(target, rows, "targets")
    _require(len(target) == count, f"targets: expected {count} ids, one for each explained token, got {len(target)}")
    return target


# ---------------------------------------------------------------------------------------------------------------------
# The mathematics: credits along a path
# ---------------------------------------------------------------------------------------------------------------------


def path_credits(
    readout: Readout,
    states: Tensor,
    targets,
    *,
    estimator: str = "observed",
    steps: int = 1,
    scalar="prob",
    memory_mb: float = 256,
) -> tuple[Tensor, Tensor]:
    """Credits and levels along a path of states: IGL_j = f(h_j) − f(h_{j−1}) ([1], Proposition 1).

    states: [k + 1, T, d], the baseline first. targets: [T] ids. scalar: "prob", "log_prob" (nats), "logit", "entropy"
    (nats), ("prob", A, B) for p(A) − p(B) or ("logit", A, B), A and B ids; entropy and contrasts ignore the targets.
    estimator: "observed" credits the change of f over each of `steps` steps of a segment [2]; the inner points cancel,
    so `steps` changes neither result nor cost. "midpoint" and "gauss-legendre" integrate the gradient with `steps`
    points a segment; their sum is approximate. memory_mb: bound on what the readout holds at a time, in MB.
    Returns credits [T, k] and levels [T, k + 1], float32 (float64 for a float64 model). Raises IGLensError on wrong
    shapes, ids, options, non-finite states, and where a head has no gradient.
    """
    _require(isinstance(readout, Readout), f"readout: expected a Readout, got {type(readout).__name__}")
    _options(estimator, steps)
    scalar = _scalar(scalar, readout.V)
    fits = len(_shape(states)) == 3 and min(_shape(states)[:2]) > 0 and states.shape[0] > 1
    fits = fits and states.shape[2] == readout.d and states.is_floating_point() and not states.is_meta
    _require(fits, f"states: expected floats [k + 1, T, {readout.d}] with k of at least 1, got {_shape(states)}")
    _require(torch.isfinite(states).all(), "states: expected finite values, got NaN or infinity")
    states, ids = states.detach(), _wanted(_targets(targets, states.shape[1], readout.V), scalar)
    levels = _levels(readout, states, ids, scalar, memory_mb)
    if estimator == "observed":
        return levels.diff(dim=1), levels
    size = max(1, _chunk(readout, memory_mb, readout.V) // 2)  # the logits, their gradient and what autograd keeps
    return _integrals(readout, states, ids, estimator, steps, scalar, size).to(levels), levels


def _levels(readout: Readout, states: Tensor, ids: Tensor, scalar, memory_mb) -> Tensor:
    """states [k + 1, T, d], ids [T, q] -> the scalar [T, k + 1], rows gathered in chunks that keep to the budget."""
    points, count = states.shape[:2]
    parts = torch.arange(count * points).split(_chunk(readout, memory_mb))
    with torch.no_grad():
        levels = [readout._value(states[i % points, i // points], ids[i // points], scalar) for i in parts]
    return torch.cat(levels).view(count, points)


def _integrals(readout: Readout, states: Tensor, ids: Tensor, estimator, steps: int, scalar, size: int) -> Tensor:
    """∫ ∇f · dh over every segment by `steps` points, [T, k] float64: the gradient of all rows of a chunk at once."""
    if estimator == "midpoint":
        nodes = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
        weights = torch.full_like(nodes, 1 / steps)
    else:
        from numpy.polynomial.legendre import leggauss

        nodes, weights = (torch.from_numpy(values) for values in leggauss(steps))
        nodes, weights = (nodes + 1) / 2, weights / 2
    count, k = states.shape[1], len(states) - 1
    total = torch.zeros(count * k, dtype=torch.float64)
    wide = torch.promote_types(states.dtype, torch.float32)  # the points of a half-precision model lie too close
    for start in range(0, len(total) * steps, size):
        some = torch.arange(start, min(start + size, len(total) * steps))
        segment, node = some // steps, some % steps
        begin, end = (states[segment % k + j, segment // k].to(wide) for j in (0, 1))
        with torch.inference_mode(False), torch.enable_grad():
            x = (begin + nodes[node].to(begin)[:, None] * (end - begin)).clone().requires_grad_()
            try:
                slope = torch.autograd.grad(readout._value(x, ids[segment // k], scalar).sum(), x)[0]
            except RuntimeError as error:  # quantised or offloaded weights
                message = f"estimator {estimator!r}: no gradient goes through {_name(readout.model)}'s head"
                raise IGLensError(f"{message} ({_line(error)}); use 'observed', which needs none") from error
        part = (slope.double() * (end - begin).double()).sum(-1).cpu() * weights[node]
        total.index_add_(0, segment, part)
    return total.view(count, k)


def _options(estimator, steps) -> None:
    known = ("observed", "midpoint", "gauss-legendre")
    fits = isinstance(estimator, str) and estimator in known
    _require(fits, f"estimator: expected one of {', '.join(known)}, got {estimator!r}")
    _whole(steps, "steps", 1, 1000 if estimator == "gauss-legendre" else 100_000)


def _scalar(scalar, rows: int, tokenizer=None):
    """The scalar, checked; a contrast as (kind, id, id)."""
    known = ("prob", "log_prob", "logit", "entropy")
    if isinstance(scalar, str) and scalar in known:
        return scalar
    pair = isinstance(scalar, (tuple, list)) and len(scalar) == 3 and str(scalar[0]) in ("prob", "logit")
    expected = f"one of {', '.join(known)}, ('prob', A, B) or ('logit', A, B)"
    _require(pair, f"scalar: expected {expected}, got {scalar!r}")
    return (str(scalar[0]), *_ids([_id(one, tokenizer) for one in scalar[1:]], rows, "scalar").tolist())


def _wanted(targets: Tensor, scalar) -> Tensor:
    """The ids [T, q] whose logits the scalar takes: the targets, or the two of a contrast."""
    return targets[:, None] if isinstance(scalar, str) else torch.tensor([scalar[1:]]).expand(len(targets), 2)


def _id(target, tokenizer):
    """A text's id where there is a tokenizer; anything else as it is."""
    return token_id(tokenizer, target) if isinstance(target, str) and tokenizer is not None else target


def _chunk(readout: Readout, memory_mb, width: int | None = None) -> int:
    """Rows of one readout call: its logits, its states and what norm and logsumexp make of them fit the budget."""
    width = width or (min(SLICE, readout.V) if readout._sliced() else readout.V)
    row = (4 * width + 6 * readout.d) * (8 if readout.model.dtype == torch.float64 else 4) / 2**20
    _number(memory_mb, "memory_mb", lambda mb: mb >= row, f"a number of at least {row:.2f} (one row of logits)")
    return int(min(memory_mb, 2**20) // row)


# ---------------------------------------------------------------------------------------------------------------------
# Reading a prompt
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trace:
    """What one run of the model left behind; everything else is computed from it without running the model again.

    input_ids, attention_mask: [S]. stream: [n + 1, S, d]. positions: [T], the predicting positions. token_ids: [T], the
    tokens at positions + 1. tokens: T texts. input_tokens: S texts. prompt_length: tokens of the prompt as fed. logits:
    [C, V], the model's own at logit_positions [C] (C is at most 64). model: its class. tokenizer: for labels.
    """

    input_ids: Tensor
    attention_mask: Tensor
    stream: Tensor
    positions: Tensor
    token_ids: Tensor
    tokens: tuple[str, ...]
    input_tokens: tuple[str, ...] = ()
    prompt_length: int = 0
    logits: Tensor | None = None
    logit_positions: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    model: str = ""
    tokenizer: object = None


def token_text(tokenizer, token: int) -> str:
    """The text of one id: as it reads inside a sentence (leading space kept), bytes as <0xE6>, no text as "id N"."""
    token = _whole(token, "token")
    piece = tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(tokenizer) else None
    if piece is None:
        return f"id {token}"
    if token in tokenizer.all_special_ids or re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return piece
    anchor = tokenizer.encode("a", add_special_tokens=False)  # some tokenizers drop a space at the start of a text
    start = tokenizer.decode(anchor, clean_up_tokenization_spaces=False)
    text = tokenizer.decode([*anchor, token], clean_up_tokenization_spaces=False)
    text = text[len(start) :] if text.startswith(start) else tokenizer.decode([token])
    if "\ufffd" not in text and text:
        return text
    if all(character in BYTES for character in piece):  # part of a character
        text = bytes(BYTES[character] for character in piece).decode("utf-8", "surrogateescape")
        return re.sub("[\udc80-\udcff]", lambda part: f"<0x{ord(part[0]) - 0xDC00:02X}>", text)
    return f"id {token}"


def token_id(tokenizer, text: str) -> int:
    """The id of a text that is one token, its leading space respected (" Paris" is not "Paris").

    Raises IGLensError where the text is not one token, or is a special token.
    """
    _require(isinstance(text, str) and text, f"target: expected a token's text, got {text!r}")
    ids, vocabulary = encode(tokenizer, text), tokenizer.get_vocab()
    # some tokenizers put a space before a text: then it is looked up
    known = [
        *ids[: len(ids) == 1],
        *(vocabulary[piece] for piece in (text, text.replace(" ", "▁")) if piece in vocabulary),
    ]
    exact = [i for i in known if i not in tokenizer.all_special_ids and token_text(tokenizer, i) == text]
    pieces = ", ".join(f"{i} {token_text(tokenizer, i)!r}" for i in ids) or "nothing"
    _require(exact, f"target {text!r}: expected the text of one ordinary token, it encodes as {pieces}; pass an id")
    return exact[0]


def encode(tokenizer, text: str, special: bool = False) -> list[int]:
    """The ids of a text. special: with what the tokenizer puts before it, without an end token behind it.

    Raises IGLensError where the tokenizer cannot encode it.
    """
    try:
        plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        full = list(tokenizer(text)["input_ids"]) if special else plain
    except Exception as error:  # half a surrogate pair, or a vocabulary without the character
        raise IGLensError(f"the tokenizer cannot encode {text[:60]!r}: {_line(error)}") from error
    for start in range(len(full) - len(plain), -1, -1):
        if full[start : start + len(plain)] == plain:
            return full[: start + len(plain)]  # an end token put behind the text would close it before the answer
    return full


def _prompt(tokenizer, prompt, chat, rows) -> tuple[list[int], str | None]:
    """Ids of the prompt as fed, and its text where there is one."""
    many = isinstance(prompt, (list, tuple)) and any(isinstance(part, (str, list, tuple, dict)) for part in prompt)
    advice = "explain many with iglens_lab.batch.explain_many"
    _require(not many, f"prompt: expected one string or one list of ids, got {str(prompt)[:60]}; {advice}")
    _require(chat is None or isinstance(chat, bool), f"chat: expected None, True or False, got {chat!r}")
    if not isinstance(prompt, str):
        _require(not chat, "chat=True: expected the prompt as a string, got ids; pass chat=False to feed ids")
        return _ids(prompt, rows, "prompt").tolist(), None
    _require(prompt, "prompt: expected at least one character, got an empty string")
    template = getattr(tokenizer, "chat_template", None)
    _require(template or not chat, "chat=True: this tokenizer has no chat template; pass chat=False")
    if chat is False or not template:
        ids, text = encode(tokenizer, prompt, special=True), prompt
    else:
        messages = [{"role": "user", "content": prompt}]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates are programs: whatever they raise, the advice is the same
            raise IGLensError(f"the chat template refused the prompt ({error}); pass chat=False") from error
        dropped = "the chat template left the prompt out (it may want a list of parts); pass chat=False"
        _require(prompt.strip() in text, dropped)
        ids = encode(tokenizer, text)  # the template writes its own special tokens: nothing is added
    _require(ids, f"prompt: expected at least one token, {prompt!r} encodes to none")
    _ids(ids, rows, "prompt")
    return ids, text


def _forced(tokenizer, answer, prompt_ids: list[int], text: str | None, rows) -> list[int]:
    """Ids of a given answer, encoded alone; warns where the tokenizer would have split it otherwise."""
    if not isinstance(answer, str):
        return _ids(answer, rows, "answer").tolist()
    ids = encode(tokenizer, answer)
    _require(ids, f"answer: expected at least one token, got {answer!r}; pass None for the model's own answer")
    _ids(ids, rows, "answer")
    if text is None:
        return ids
    fed, joint = prompt_ids + ids, encode(tokenizer, text + answer)
    if joint != fed[-len(joint) :]:
        tail = joint[max(0, len(joint) - len(ids) - 3) :]
        together = f"encoded together with the prompt it would end in {tail}"
        warnings.warn(f"the answer {answer!r} is fed as {ids}; {together}", stacklevel=3)
    if answer[0].isalnum() and text[-1].isalnum() and ord(answer[0]) < 0x2E80:  # scripts that put spaces between words
        spaced = []
        with suppress(IGLensError):  # a vocabulary without a space
            spaced = encode(tokenizer, " " + answer)
        one, two = (f"id {i} {token_text(tokenizer, i)!r}" for i in (ids[0], (spaced or ids)[0]))
        if one != two:
            warnings.warn(f"the answer starts with {one}; with a space before it, with {two}", stacklevel=3)
    return ids


def _greedy(model, tokenizer, ids: list[int], count: int) -> list[int]:
    """The argmax of the raw logits, token by token, up to and with the end token."""
    _require(hasattr(model, "generate"), f"{_name(model)} cannot generate; pass the answer")
    own = getattr(model, "generation_config", None)
    ends = {tokenizer.eos_token_id}
    ends |= {*end} if isinstance(end := getattr(own, "eos_token_id", None), (list, tuple)) else {end}
    ends = sorted(ends - {None})
    given = torch.tensor([ids], device=_device(model))
    # a config of its own: penalties and forced tokens of the model's would change the argmax
    plain = GenerationConfig(eos_token_id=ends or None, pad_token_id=(ends or [0])[0], do_sample=False, num_beams=1)
    try:
        model.generation_config = plain
        with _evaluating(model), torch.no_grad():
            made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count)
    finally:
        model.generation_config = own
    return made[0, len(ids) :].tolist()


def read(model, tokenizer, prompt, *, answer=None, chat=None, scope="answer", max_new_tokens=20) -> Trace:
    """Run the model once on prompt and answer and keep its residual stream.

    prompt: a string, or ids. answer: None for the greedy one (its end token included), a string or ids to force one.
    chat: None uses the tokenizer's template where it has one, False feeds the bare prompt. scope: "answer" explains the
    answer's tokens, "all" tokens 1 … S − 1. max_new_tokens: of a greedy answer. Raises IGLensError on bad input and on
    non-finite states, UnsupportedModelError where the stream cannot be read.
    """
    blocks_of(model)
    known = callable(getattr(tokenizer, "convert_ids_to_tokens", None))
    _require(known, f"tokenizer: expected the model's tokenizer, got {type(tokenizer).__name__}")
    _require(isinstance(scope, str) and scope in ("answer", "all"), f"scope: expected 'answer' or 'all', got {scope!r}")
    max_new_tokens = _whole(max_new_tokens, "max_new_tokens", 1)
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    ids, text = _prompt(tokenizer, prompt, chat, rows)
    forced = None if answer is None else _forced(tokenizer, answer, ids, text, rows)
    context = context_of(model)
    length = len(ids) + (max_new_tokens if forced is None else len(forced))
    what = f"max_new_tokens={max_new_tokens}" if forced is None else f"an answer of {len(forced)}"
    message = f"prompt: {len(ids)} tokens and {what} make {length}; this model's context is {context}: shorten them"
    _require(length <= context, message)
    made = _greedy(model, tokenizer, ids, max_new_tokens) if forced is None else forced
    full = torch.tensor(ids + made)
    first = len(ids) - 1 if scope == "answer" else 0
    positions = torch.arange(first, len(full) - 1)
    compared = positions[torch.linspace(0, len(positions) - 1, min(COMPARED, len(positions))).round().long()]
    stream, logits = _run(model, full, at=compared)
    texts = tuple(token_text(tokenizer, i) for i in full.tolist())
    return Trace(
        input_ids=full,
        attention_mask=torch.ones_like(full),
        stream=_finite(stream, model),
        positions=positions,
        token_ids=full[positions + 1],
        tokens=texts[first + 1 :],
        input_tokens=texts,
        prompt_length=len(ids),
        logits=logits,
        logit_positions=compared,
        model=_name(model),
        tokenizer=tokenizer,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The path and its attribution
# ---------------------------------------------------------------------------------------------------------------------


def _layers(layers, n: int, baseline) -> tuple[int, ...]:
    if layers is None:
        return tuple(range(1 if isinstance(baseline, str) and baseline == "embedding" else 0, n + 1))
    if not isinstance(layers, Iterable) or getattr(layers, "ndim", None) == 0:
        count = _whole(layers, "layers", 1, n)
        return tuple(round(n * j / count) for j in range(1, count + 1))
    chosen = {_whole(layer, "layers", 0, n) for layer in layers}
    _require(chosen, f"layers: expected at least one layer of 0 … {n}, got none; pass None for all")
    return tuple(sorted(chosen | {n}))


def _base(trace: Trace, some: slice, lowest: int, baseline) -> Tensor:
    """The baseline states [T, d] of some of the explained tokens."""
    stream = trace.stream
    where = trace.positions[some].to(stream.device)
    if isinstance(baseline, str):
        if baseline == "embedding":
            return stream[0, where]
        if baseline == "zero":
            return torch.zeros_like(stream[0, where])
        if baseline == "mean":  # positions up to the explained one: later ones would leak the future
            mask = trace.attention_mask.bool().cpu()
            _require(mask[where.cpu()].all(), "positions: expected tokens, got a padding position (attention_mask 0)")
            real = stream[lowest].cpu().double().where(mask[:, None], 0)  # float64: position 0 dwarfs the others
            mean = real.cumsum(0) / mask.cumsum(0).clamp(min=1)[:, None]
            return mean[where.cpu()].to(stream)
    total, d, vector = len(trace.positions), stream.shape[-1], torch.empty(0)
    if not isinstance(baseline, str):
        with suppress(TypeError, ValueError, RuntimeError):  # what is no plain tensor of floats is refused below
            given = torch.as_tensor(baseline).detach()
            dense = given.is_floating_point() and given.layout == torch.strided
            vector = given.cpu().double() if dense else vector
    fits = vector.shape in ((d,), (total, d))
    expected = f"'embedding', 'mean', 'zero' or floats of shape [{d}] or [{total}, {d}]"
    got = f"{baseline.dtype} {_shape(baseline)}" if isinstance(baseline, Tensor) else repr(baseline)[:80]
    _require(fits, f"baseline: expected {expected}, got {got}")
    _require(torch.isfinite(vector).all(), "baseline: expected finite values, got NaN or infinity")
    return vector.to(stream).expand(total, d)[some]


def _path(trace: Trace, some: slice, layers: tuple[int, ...], baseline, translators) -> Tensor:
    base = _base(trace, some, layers[0], baseline)[None]
    states = trace.stream[torch.tensor(layers)[:, None], trace.positions[some]]  # [k, T, d], only what is needed
    if translators is not None:
        states = _translated(translators, states, layers)
        if isinstance(baseline, str) and baseline == "embedding":
            base = _translated(translators, base, (0,))
    return torch.cat([base, states])


def _translated(translators, states: Tensor, layers: tuple[int, ...]) -> Tensor:
    _require(callable(translators), f"translators: expected a function of states and layers, got {translators!r}"[:200])
    made = translators(states, layers)
    _require(_shape(made) == _shape(states), f"translators: expected states {_shape(states)}, got {_shape(made)}")
    return made


def _trace(trace: Trace) -> None:
    """A Trace may be made by hand: its parts must fit each other."""
    _require(isinstance(trace, Trace), f"trace: expected a Trace, got {type(trace).__name__}")
    shape, lists = _shape(trace.stream), ["positions"] + ["logit_positions"] * (trace.logits is not None)
    plain = len(shape) == 3 and trace.stream.is_floating_point() and trace.stream.device.type != "meta"
    _require(plain and shape[0] > 1, f"trace.stream: expected floats [n + 1, S, d], got {shape}")
    for name in lists:
        value = getattr(trace, name)
        long = len(_shape(value)) == 1 and getattr(value, "dtype", None) == torch.long
        _require(long, f"trace.{name}: expected a tensor of integers (torch.long) of one axis, got {_shape(value)}")
        _ids(value, shape[1], f"trace.{name}", "positions")
    count = len(trace.positions)
    parts = {"token_ids": [count], "attention_mask": [shape[1]]}
    if trace.logits is not None:
        parts |= {"logits": [len(trace.logit_positions), *_shape(trace.logits)[1:2]]}
    for name, expected in parts.items():
        got = _shape(getattr(trace, name))
        _require(got == expected, f"trace.{name}: expected a tensor {expected}, got {got}")
    texts = isinstance(trace.tokens, (tuple, list)) and len(trace.tokens) == count
    _require(texts, f"trace.tokens: expected {count} texts, got {trace.tokens!r}")


def residual_path(
    trace: Trace,
    *,
    layers=None,
    baseline="embedding",
    translators: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None,
) -> tuple[Tensor, tuple[int, ...]]:
    """The path of every explained token: states [k + 1, T, d], the baseline first, and the k chosen layers.

    layers: None (1 … n with the embedding baseline, 0 … n with any other), an int k (k layers, evenly spread) or
    layers; n is always on the path. baseline: "embedding" (layer 0 at the position), "mean" (of the lowest chosen layer
    over the non-padding positions up to the explained one), "zero", or floats [d] or [T, d]. translators: maps states
    [·, T, d] of the given layers; applied to the layers and the embedding baseline. Raises IGLensError on all else.
    """
    _trace(trace)
    chosen = _layers(layers, trace.stream.shape[0] - 1, baseline)
    return _path(trace, slice(None), chosen, baseline, translators), chosen


def attribute(
    readout: Readout,
    trace: Trace,
    *,
    targets=None,
    layers=None,
    baseline="embedding",
    estimator: str = "observed",
    steps: int = 1,
    scalar="prob",
    translators=None,
    memory_mb: float = 256,
) -> Attribution:
    """Split every explained token's probability over the layers; never runs the model.

    targets: [T] ids or texts, or one for all; default the tokens themselves. layers, baseline, translators: see
    residual_path. estimator, steps, scalar, memory_mb: see path_credits. Raises IGLensError on bad options,
    FaithfulnessError where the readout disagrees with the model's own logits by more than the dtype's tolerance.
    """
    _require(isinstance(readout, Readout), f"readout: expected a Readout, got {type(readout).__name__}")
    _trace(trace)
    fits = trace.stream.shape[::2] == (readout.n + 1, readout.d)
    expected = f"a stream [{readout.n + 1}, S, {readout.d}] of the readout's model"
    _require(fits, f"trace: expected {expected}, got {_shape(trace.stream)}")
    suits = getattr(translators, "suits", None)
    if suits is not None:  # fitted translators know their model, and refuse another
        suits(readout.model)
    _options(estimator, steps)
    scalar = _scalar(scalar, readout.V, trace.tokenizer)
    if trace.logits is not None:  # at every entry of the vocabulary, whatever the targets
        readout._agrees(trace.stream[-1, trace.logit_positions], trace.logits, FaithfulnessError)
    if isinstance(targets, (str, list, tuple)):
        texts = [targets] * len(trace.positions) if isinstance(targets, str) else targets
        targets = [_id(target, trace.tokenizer) for target in texts]
    target_ids = trace.token_ids if targets is None else _targets(targets, len(trace.positions), readout.V)
    chosen = _layers(layers, readout.n, baseline)
    credits, levels, ends = [], [], []
    for i in range(0, len(trace.positions), COMPARED):  # in groups, so that the path of a long text is never held whole
        some = slice(i, i + COMPARED)
        states, wanted = _path(trace, some, chosen, baseline, translators), target_ids[some]
        part = path_credits(
            readout, states, wanted, estimator=estimator, steps=steps, scalar=scalar, memory_mb=memory_mb
        )
        credits.append(part[0])
        levels.append(part[1])
        ends.append(_levels(readout, states[[0, -1]], _wanted(wanted, scalar), scalar, memory_mb))  # apart
    ends = torch.cat(ends).cpu()  # [T, 2]
    credits, levels = torch.cat(credits).cpu(), torch.cat(levels).cpu()
    model_level = _model_level(trace, target_ids, scalar).to(levels.dtype)
    known = ~model_level.isnan()
    label = baseline if isinstance(baseline, str) else "tensor"
    result = Attribution(
        credits=credits,
        levels=levels,
        delta=torch.where(known, model_level, ends[:, 1]) - ends[:, 0],
        model_level=model_level,
        layers=chosen,
        positions=trace.positions,
        token_ids=trace.token_ids,
        target_ids=target_ids,
        tokens=trace.tokens if targets is None else _texts(trace, target_ids),
        scalar=scalar,
        baseline=f"{label} (translated)" if translators is not None and label == "embedding" else label,
        estimator=estimator,
        steps=int(steps),
        model=trace.model,
        dtype=str(readout.model.dtype).removeprefix("torch."),
    )
    error, allowed = result.faithfulness_error, result._tolerance()
    message = f"the readout's {result.scalar} is off the model's own by {error:.1e} (allowed {allowed:.0e})"
    advice = "make Readout and Trace from the same, unchanged model; translators must leave the last layer as it is"
    _require(error <= allowed or not known.any(), f"{message}; {advice}", FaithfulnessError)
    if estimator != "observed" and not result.completeness_error <= ROUGH:
        off = f"the credits of {estimator!r} with {steps} steps miss delta by {result.completeness_error:.1e}"
        warnings.warn(f"{off}; more steps may help, 'observed' is exact", stacklevel=2)
    return result


def _texts(trace: Trace, ids: Tensor) -> tuple[str, ...]:
    if trace.tokenizer is None:
        return tuple(f"id {i}" for i in ids.tolist())
    return tuple(token_text(trace.tokenizer, i) for i in ids.tolist())


def _model_level(trace: Trace, targets: Tensor, scalar) -> Tensor:
    """The scalar from the model's own logits [T], in float64, NaN where those were not kept."""
    level, ids = torch.full((len(targets),), math.nan, dtype=torch.float64), _wanted(targets, scalar)
    kept = {} if trace.logits is None else {p: row for row, p in enumerate(trace.logit_positions.tolist())}
    for t, position in enumerate(trace.positions.tolist()):
        if position in kept:
            row = trace.logits[kept[position]][None].double().cpu()
            level[t] = _scalar_of(*_summary([row], ids[[t]], scalar == "entropy"), scalar)[0]
    return level


def explain(
    model, tokenizer, prompt, *, answer=None, chat=None, scope="answer", max_new_tokens=20, **options
) -> Attribution:
    """read, then attribute: the layer credits of the answer's tokens.

    See read and attribute for every option.
    """
    given = {"answer": answer, "chat": chat, "scope": scope, "max_new_tokens": max_new_tokens}
    trace = read(model, tokenizer, prompt, **given)
    return attribute(Readout(model), trace, **options)


# ---------------------------------------------------------------------------------------------------------------------
# The result
# ---------------------------------------------------------------------------------------------------------------------


def save_tensors(path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file that appears whole or not at all. Raises IGLensError where it cannot be written."""
    _require(isinstance(path, (str, os.PathLike)), f"save: expected a path, got {path!r}")
    path = Path(path)
    _require(path.parent.is_dir(), f"save: the folder {path.parent} does not exist; make it first")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    try:
        part.write_bytes(save(copies, metadata))
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise IGLensError(f"save: cannot write {path}: {_line(error)}; choose another place") from error
    finally:
        with suppress(OSError):  # a name too long for the part is too long to be removed
            part.unlink(missing_ok=True)


_TENSORS = ("credits", "levels", "delta", "model_level", "positions", "token_ids", "target_ids")


@dataclass(frozen=True, eq=False)
class Attribution:
    """Layer credits of T tokens; every row of credits sums to delta.

    credits: [T, k], credits[:, j] is the change since layers[j − 1], since the baseline for j = 0; signed. levels:
    [T, k + 1], the scalar at each path point, the baseline first. delta: [T], the scalar at layer n minus at the
    baseline, evaluated apart. model_level: [T], from the model's own logits, NaN where not compared. layers: k numbers.
    positions: [T], predicting. token_ids: [T], the tokens that stand there. target_ids: [T], the explained ones, and
    tokens their texts. scalar, baseline, estimator, steps, model (its class), dtype (the model's): labels.
    """

    credits: Tensor
    levels: Tensor
    delta: Tensor
    model_level: Tensor
    layers: tuple[int, ...]
    positions: Tensor
    token_ids: Tensor
    target_ids: Tensor
    tokens: tuple[str, ...]
    scalar: str | tuple[str, int, int]
    baseline: str
    estimator: str
    steps: int
    model: str
    dtype: str

    @property
    def completeness_error(self) -> float:
        """Largest |Σ credits − delta| over the tokens."""
        return float((self.credits.double().sum(1) - self.delta.double()).abs().max())

    @property
    def faithfulness_error(self) -> float:
        """Largest |level at layer n − the model's own| over the compared tokens; NaN where none was."""
        gap = (self.levels[:, -1].double() - self.model_level.double()).abs()[~self.model_level.isnan()]
        return float(gap.max()) if len(gap) else math.nan

    def check(self, tolerance: float | None = None) -> Attribution:
        """Returns self where both errors are within the tolerance (default: that of the model's dtype).

        Raises CompletenessError or FaithfulnessError with the numbers. Without a tolerance, the sum of a gradient
        estimator may be off by 1e-2.
        """
        if tolerance is not None:
            _number(tolerance, "tolerance", lambda x: x >= 0, "a number, at least 0")
        faithful = self._tolerance() if tolerance is None else tolerance
        complete = max(faithful, ROUGH) if tolerance is None and self.estimator != "observed" else faithful
        for error, allowed, kind, message in (
            (self.completeness_error, complete, CompletenessError, "the credits do not sum to delta"),
            (
                self.faithfulness_error,
                faithful,
                FaithfulnessError,
                "the readout is not the model's own (NaN: not compared)",
            ),
        ):
            _require(error <= allowed, f"{message}: off by {error:.1e}, allowed {allowed:.0e}", kind)
        return self

    def _tolerance(self) -> float:
        probability = self.scalar[0] == "prob" or self.scalar == "prob"
        return (TOLERANCE if probability else TOLERANCE_NATS).get(getattr(torch, self.dtype), 0.25)

    def onset(self, mass: float = 0.5) -> Tensor:
        """[T], the earliest layer at which the cumulated |credit| reaches `mass` of its sum; −1 where that sum is 0."""
        _number(mass, "mass", lambda x: 0 < x <= 1, "a number above 0 and at most 1")
        cumulated = self.credits.double().abs().cumsum(1)
        reached = cumulated >= mass * cumulated[:, -1:] * (1 - 1e-12)
        onset = torch.tensor(self.layers)[reached.int().argmax(1)]
        return onset.where(cumulated[:, -1] > 0, -1)

    def non_monotonicity(self) -> Tensor:
        """[T], Σ|credit| / |delta|: 1 where the level is monotone; inf where only delta is 0, NaN where both are."""
        return self.credits.double().abs().sum(1) / self.delta.double().abs()

    def answer(self, log: bool = False) -> Attribution:
        """The probability of the whole answer, T = 1: Π_t p_t moved layer by layer at all its positions at once.

        log: its logarithm instead, in nats, for answers so long that the product underflows; take it from a result
        with scalar "log_prob", whose levels never do. Raises IGLensError unless positions are contiguous and the
        targets are the answer's own tokens.
        """
        plain = self.estimator == "observed" and self.scalar in ("prob", "log_prob")
        _require(plain, f"answer(): expected 'observed' and 'prob' or 'log_prob', got {self.estimator}, {self.scalar}")
        _require(isinstance(log, bool), f"log: expected True or False, got {log!r}")
        _require((self.positions.diff() == 1).all(), "answer(): expected contiguous positions; use scope='answer'")
        _require(torch.equal(self.token_ids, self.target_ids), "answer(): expected the answer's own tokens as targets")
        logs = self.scalar == "log_prob"
        seen = logs or not log or bool((self.levels >= torch.finfo(self.levels.dtype).tiny).all())
        _require(
            seen, "answer(log=True): some probabilities are below 1e-38 and lost their digits; use scalar='log_prob'"
        )

        def whole(levels: Tensor) -> Tensor:
            total = (levels.double() if logs else levels.double().log()).sum(0)
            return total if log else total.exp()

        compared = ~self.model_level.isnan()
        levels, end = whole(self.levels), whole(self.model_level.where(compared, self.levels[:, -1]))
        return replace(
            self,
            credits=levels.diff()[None],
            levels=levels[None],
            delta=(end - levels[0])[None],
            model_level=(end if compared.any() else end * math.nan)[None],
            positions=self.positions[-1:],
            token_ids=self.token_ids[-1:],
            target_ids=self.target_ids[-1:],
            tokens=("".join(self.tokens),),
            scalar="log_prob" if log else "prob",
        )

    def to_frame(self):
        """A DataFrame, a row for each token and layer: position, token_id, token, layer, level, credit, scalar."""
        import pandas as pd

        count, k = self.credits.shape
        return pd.DataFrame(
            {
                "position": self.positions.repeat_interleave(k).numpy(),
                "token_id": self.target_ids.repeat_interleave(k).numpy(),
                "token": [token for token in self.tokens for _ in range(k)],
                "layer": list(self.layers) * count,
                "level": self.levels[:, 1:].flatten().numpy(),
                "credit": self.credits.flatten().numpy(),
                "scalar": str(self.scalar),
            }
        )

    def save(self, path) -> None:
        """Write to a safetensors file with the labels as metadata; the file appears whole or not at all."""
        labels = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _TENSORS}
        save_tensors(path, {name: getattr(self, name) for name in _TENSORS}, {"iglens": json.dumps(labels)})

    @staticmethod
    def load(path) -> Attribution:
        """Read what save() wrote. Raises IGLensError where the file is not such a one."""
        try:
            with safe_open(Path(path), "pt") as file:
                labels = json.loads(file.metadata()["iglens"])
                tensors = {name: file.get_tensor(name) for name in _TENSORS}
            labels = {name: tuple(value) if isinstance(value, list) else value for name, value in labels.items()}
            count, k = tensors["credits"].shape
            shapes = [(count, k), (count, k + 1), *[(count,)] * (len(_TENSORS) - 2)]
            _require([tensors[name].shape for name in _TENSORS] == shapes, "its shapes do not fit each other")
            return Attribution(**tensors, **labels)
        except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise IGLensError(f"load: {path} is not a file written by Attribution.save ({error})") from error
