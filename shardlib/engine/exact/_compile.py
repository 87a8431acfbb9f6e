"""Random calls in a block that is compiled: nodes of its graph that draw a key, and values by it, on every run.

A compiler traces no block under a mode, so the mode steps aside for the call of a compiled block. While its graph is
traced, random ops on DTensors are handed over by the policy of `ops`, those on plain tensors by decompositions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardlib.engine import _torch, ops
from shardlib.engine._torch import Op
from shardlib.engine.exact._calls import RANDOM, Caller
from shardlib.engine.exact._mode import current

__all__ = ["DECOMPOSITIONS", "traced"]

_thread = threading.local()


@contextmanager
def traced() -> Iterator[None]:
    """A compiled block may be called, and traced, inside; its random calls are as exact as those around it."""
    mode = current()
    if mode is None or _torch.innermost_mode() is not mode:
        yield
        return
    before = getattr(_thread, "caller", None)
    _thread.caller = Caller(mode.caller.place, traced=True)
    mode.__exit__(None, None, None)
    try:
        with ops.drawing_by(_thread.caller):
            yield
    finally:
        mode.__enter__()
        _thread.caller = before


def _draw(op: Op, *args: Any, **kwargs: Any) -> Any:
    caller = getattr(_thread, "caller", None)
    return NotImplemented if caller is None else caller(op, args, kwargs)


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """As autograd computes it from the ops that dropout comes apart into without a compiler, to the last bit."""
    noise = mask.to(grad.dtype.to_real())
    return grad * (noise.div(1 / scale) if scale else noise * 0)


DECOMPOSITIONS: dict[Op, Callable[..., Any]] = {
    **{op: partial(_draw, op) for op in RANDOM},
    torch.ops.aten.native_dropout_backward.default: _dropout_backward,
}
