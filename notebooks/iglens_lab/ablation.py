"""Interventions on a model, all of its blocks in one batch: how far does the probability of a token fall without each?

Context managers that are always undone, and Ablations, which runs them: row L of a batch has block L ablated. Shapes as
in iglens_core: n blocks, d width, S positions.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from iglens_core import IGLensError, UnsupportedModelError, blocks_of, context_of, residual_stream

INTERVENTIONS = ("skip", "attention", "mlp", "update")
SCOPES = ("last", "all")
PARTS = {"attention": ("self_attn", "attn", "attention", "self_attention"), "mlp": ("mlp", "ffn", "feed_forward")}


def block(model, layer: int) -> nn.Module:
    """The model's block `layer`, 1 … n. Raises IGLensError where there is no such one."""
    found = blocks_of(model)
    if type(layer) is not int or not 1 <= layer <= len(found):
        raise IGLensError(f"layer: expected a block of 1 … {len(found)}, got {layer!r}")
    return found[layer - 1]


def part(model, layer: int, what: str) -> nn.Module:
    """The block's attention or MLP, a module whose output is added to the residual stream."""
    if not (isinstance(what, str) and what in PARTS):
        raise IGLensError(f"what: expected one of {', '.join(PARTS)}, got {what!r}")
    found = [module for name, module in block(model, layer).named_children() if name in PARTS[what]]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(model).__name__}: found no single {what} in block {layer} to take out")
    return found[0]


def _states(args, kwargs) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _changed(output, change):
    """A module's output with its states changed: it returns a tensor, or a tuple that starts with it."""
    states = output[0] if isinstance(output, (tuple, list)) else output
    if not (isinstance(states, Tensor) and states.ndim == 3):
        got = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
        raise UnsupportedModelError(f"expected a block, attention or MLP that gives [batch, S, d], it gives {got}")
    return (change(states), *output[1:]) if isinstance(output, (tuple, list)) else change(states)


@contextmanager
def ablated(model, layer: int, what: str = "skip", *, scope: str = "all", row: int | None = None, update=None):
    """Inside, block `layer` is changed; also undone on an error.

    what: "skip" (the residual stream passes), "attention" or "mlp" (that part adds nothing), "update" (the block adds
    `update` [U, d] instead, aligned with the end of the sequence; earlier positions keep their own). scope: at "all"
    positions, or at the "last" alone. row: of a batch; None for all rows.
    """
    _known(what, scope)
    if row is not None and not (type(row) is int and row >= 0):
        raise IGLensError(f"row: expected None or a row of the batch, got {row!r}")
    if (what == "update") != isinstance(update, Tensor):
        raise IGLensError(f"update: expected a tensor [U, d] for 'update', and None for all else, got {update!r:.80}")
    rows = slice(None) if row is None else slice(row, row + 1)
    one, given, handles = block(model, layer), [], []

    def changeable(states):
        if row is not None and row >= len(states):
            raise IGLensError(f"row: expected a row of the batch of {len(states)}, got {row}")
        if update is not None and (update.ndim != 2 or len(update) == 0 or update.shape[1] != states.shape[2]):
            raise IGLensError(f"update: expected [U, d = {states.shape[2]}], got {list(update.shape)}")
        return states.clone()

    def before(module, args, kwargs):
        given[:] = [_states(args, kwargs).clone()]  # a block may write into its input

    def after(module, args, output):
        def change(states):
            length = 1 if scope == "last" else states.shape[1]
            length = length if update is None else min(length, len(update))
            made, came = changeable(states), given.pop()[rows, -length:]
            made[rows, -length:] = came if update is None else came + update[-length:].to(came)
            return made

        return _changed(output, change)

    def silence(module, args, output):
        def change(states):
            made = changeable(states)
            made[rows, -1 if scope == "last" else slice(None)] = 0
            return made

        return _changed(output, change)

    try:
        if what in PARTS:
            handles.append(part(model, layer, what).register_forward_hook(silence))
        else:
            handles.append(one.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(one.register_forward_hook(after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def skipped(model, layer: int):
    """Inside, block `layer` passes the residual stream on unchanged, at all positions; also undone on an error."""
    return ablated(model, layer)


def _known(what, scope) -> None:
    for name, value, known in (("what", what, INTERVENTIONS), ("scope", scope, SCOPES)):
        if not (isinstance(value, str) and value in known):
            raise IGLensError(f"{name}: expected one of {', '.join(known)}, got {value!r}")


class Ablations:
    """The probability of a next token with each block ablated in turn: row L of one batch is the run without block L.

    At all positions, rows begin at their block: below it, they are the untouched row 0. At the last position alone, the
    keys and values of the positions before are computed once. Each way is tried first against whole rows; a model that
    cannot go it gets whole rows, which are slower. Attributes: n (blocks), d (width), V (rows of the head). Raises
    IGLensError where the model is in training mode, UnsupportedModelError where it has no single residual stream.
    """

    def __init__(self, model):
        self.model, self.n = model, len(blocks_of(model))
        known = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._sound = False
        self._rows = getattr(model.get_input_embeddings(), "num_embeddings", 8)
        self._probe = torch.arange(7, 7 + 13 * min(5, context_of(model)), 13) % self._rows
        self.d = residual_stream(model, self._probe).shape[-1]  # also refuses what has no single stream
        self._ways = {scope: self._way(scope) for scope in SCOPES}

    def _way(self, scope: str):
        """The fast way of a scope, where it gives what whole rows give."""
        fast = {"last": self._cached, "all": self._grown}[scope]
        whole = self._logits(self._whole, self._probe, scope)
        self.V = whole.shape[1]
        try:
            found = self._logits(fast, self._probe, scope)
        except Exception:  # whatever a model raises where its masks or caches do not fit a batch that differs
            return self._whole
        size = float(whole[whole.isfinite()].abs().max())
        near = 2e-2 if self.model.dtype in (torch.bfloat16, torch.float16) else 1e-4
        return fast if torch.allclose(found, whole, rtol=near, atol=near * size) else self._whole

    def probabilities(self, input_ids, target: int, what: str = "skip", *, scope: str = "last", updates=None) -> Tensor:
        """[n + 1], float64: p(target) after input_ids [S], untouched and without block 1 … n.

        what, scope: see ablated. updates: [n, U, d], what the blocks add instead, for "update".
        """
        _known(what, scope)
        ids = self._ids(input_ids)
        if not (type(target) is int and 0 <= target < self.V):
            raise IGLensError(f"target: expected an id of 0 … {self.V - 1}, got {target!r:.80}")
        if what == "update":
            plain = isinstance(updates, Tensor) and updates.is_floating_point() and not updates.is_meta
            fits = plain and updates.ndim == 3 and updates.shape[::2] == (self.n, self.d) and updates.shape[1] > 0
            if not fits or not updates.isfinite().all():
                got = list(updates.shape) if isinstance(updates, Tensor) else type(updates).__name__
                raise IGLensError(f"updates: expected finite floats [n = {self.n}, U, d = {self.d}], got {got}")
        elif updates is not None:
            raise IGLensError(f"updates: expected None for {what!r}; they go with 'update'")
        if what in PARTS:
            self._check_parts()
        logits = self._logits(self._ways[scope] if len(ids) > 1 else self._whole, ids, scope, what, updates)
        return (logits[:, target] - logits.logsumexp(-1)).exp()

    def _ids(self, input_ids) -> Tensor:
        """[S] on the CPU, every id one of the model's."""
        shown = f"input_ids: expected the ids [S] of one prompt, got {input_ids!r:.80}"
        flags = isinstance(input_ids, (list, tuple)) and any(isinstance(one, bool) for one in input_ids)
        try:
            ids = torch.as_tensor(input_ids).detach().cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise IGLensError(shown) from error
        whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or flags)
        if not whole or ids.ndim != 1 or len(ids) == 0:
            raise IGLensError(shown)
        ids = ids.long()
        if ids.min() < 0 or ids.max() >= self._rows or len(ids) > context_of(self.model):
            raise IGLensError(f"{shown}; ids of 0 … {self._rows - 1}, at most {context_of(self.model)} of them")
        return ids

    def _check_parts(self) -> None:
        """Without attention and MLP a block must be the identity: else they are not what is added to the stream."""
        if self._sound:
            return
        with ExitStack() as stack:
            for layer in range(1, self.n + 1):
                for what in PARTS:
                    stack.enter_context(ablated(self.model, layer, what))
            states = residual_stream(self.model, self._probe)
        if not torch.equal(states, states[:1].expand_as(states)):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: without attention and MLP its blocks still change the residual stream"
            )
        self._sound = True

    def _logits(self, way, ids: Tensor, scope: str, what: str = "skip", updates=None) -> Tensor:
        """[n + 1, V] float64, after the last position."""
        if any(module.training for module in self.model.modules()):
            raise IGLensError("model: expected it in eval mode, dropout would change the results; call model.eval()")
        # eager: a compiled model would be compiled anew for every hook
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), ExitStack() as hooks:
            ids = ids.to(self.model.get_input_embeddings().weight.device)

            def ablate():
                for layer in range(1, self.n + 1):
                    update = None if updates is None else updates[layer - 1]
                    hooks.enter_context(ablated(self.model, layer, what, scope=scope, row=layer, update=update))

            return way(ids, ablate).logits[:, -1].cpu().double()

    def _whole(self, ids: Tensor, ablate):
        ablate()
        return self.model(input_ids=ids.expand(self.n + 1, -1), use_cache=False, **self._options)

    def _grown(self, ids: Tensor, ablate):
        """A batch that gets a row more before every block, a copy of the untouched one."""

        def grow(module, args, kwargs):
            states = _states(args, kwargs)
            more = torch.cat([states, states[:1]])
            return (
                tuple(more if value is states else value for value in args),
                {name: more if value is states else value for name, value in kwargs.items()},
            )

        handles = [one.register_forward_pre_hook(grow, with_kwargs=True) for one in blocks_of(self.model)]
        try:
            ablate()  # its hooks come after these, and see the new row
            return self.model(input_ids=ids[None], use_cache=False, **self._options)
        finally:
            for handle in handles:
                handle.remove()

    def _cached(self, ids: Tensor, ablate):
        """One token a row; what it attends to is untouched, so it is computed once."""
        made = self.model(input_ids=ids[None, :-1], use_cache=True, **self._options)
        name = "cache" if "cache" in made else "past_key_values"  # as newer and older versions call it
        cache = made[name]
        cache.batch_repeat_interleave(self.n + 1)
        ablate()
        last = ids[-1:].expand(self.n + 1, 1)
        return self.model(input_ids=last, **{name: cache}, use_cache=True, **self._options)


def one_by_one(model, input_ids, target: int, what: str = "skip", *, scope: str = "last") -> Tensor:
    """[n], float64: what Ablations gives in one batch, by one run of the model for each block; to compare with."""
    found = []
    for layer in range(1, len(blocks_of(model)) + 1):
        with ablated(model, layer, what, scope=scope), torch.no_grad():
            logits = model(input_ids=torch.as_tensor(input_ids)[None].to(model.device)).logits[0, -1].double()
        found.append((logits[target] - logits.logsumexp(-1)).exp())
    return torch.stack(found)
