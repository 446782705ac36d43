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

    def hook(module, args, kwargs, output):
        states = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return (states, *output[1:]) if isinstance(output, (tuple, list)) else states

    handle = block(model, layer).register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
