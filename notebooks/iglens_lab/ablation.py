"""Interventions on a model: context managers that are always undone."""

from __future__ import annotations

from contextlib import contextmanager

from torch import Tensor, nn

from iglens_core import IGLensError


@contextmanager
def skipped(block: nn.Module):
    """Inside, the block passes the residual stream on unchanged, at all positions; also undone on an error."""
    if not isinstance(block, nn.Module):
        raise IGLensError(f"skipped: expected a block, such as model.model.layers[0], got {type(block).__name__}")

    def hook(module, args, kwargs, output):
        states = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return (states, *output[1:]) if isinstance(output, (tuple, list)) else states

    handle = block.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
