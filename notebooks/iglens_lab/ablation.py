"""Interventions on a model: context managers that are always undone."""

from __future__ import annotations

from contextlib import contextmanager

from torch import Tensor

from iglens_core import IGLensError, blocks_of


def block(model, layer: int):
    """The model's block `layer`, 1 … n. Raises IGLensError where there is no such one."""
    found = blocks_of(model)
    if type(layer) is not int or not 1 <= layer <= len(found):
        raise IGLensError(f"layer: expected a block of 1 … {len(found)}, got {layer!r}")
    return found[layer - 1]


@contextmanager
def skipped(model, layer: int):
    """Inside, block `layer` passes the residual stream on unchanged, at all positions; also undone on an error."""

    given = []

    def before(module, args, kwargs):
        states = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        given[:] = [states.clone()]  # a block may write into its input

    def after(module, args, output):
        return (given.pop(), *output[1:]) if isinstance(output, (tuple, list)) else given.pop()

    one = block(model, layer)
    handles = [one.register_forward_pre_hook(before, with_kwargs=True), one.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
