"""Random calls in a compiled block: graph nodes that draw a key, and values from it, on every run.

Dynamo does not trace under a dispatch mode, so the mode is left for the call of a compiled block. While the graph is
traced, the policy of `ops` passes on random ops on DTensors, and decompositions pass on those on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from shardlib.engine import _torch, ops
from shardlib.engine._torch import Op
from shardlib.engine.feature.exact._calls import RANDOM, Caller
from shardlib.engine.feature.exact._mode import current

__all__ = ["DECOMPOSITIONS", "traced"]


@contextmanager
def traced() -> Iterator[None]:
    """Allow calls and traces of a compiled block inside; its random calls are exact if those around it are."""
    mode = current()
    if mode is None or _torch.innermost_mode() is not mode:
        yield
        return
    mode.__exit__(None, None, None)
    try:
        with ops.drawing_by(Caller(mode.caller.data_rank, traced=True)):
            yield
    finally:
        mode.__enter__()


def _draw(op: Op, *args: Any, **kwargs: Any) -> Any:
    return ops.drawn(op, args, kwargs)


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the gradient as autograd does for the eager decomposition of dropout, bit for bit."""
    noise = mask.to(grad.dtype.to_real())
    return grad * (noise.div(1 / scale) if scale else noise * 0)


DECOMPOSITIONS: dict[Op, Callable[..., Any]] = {
    **{op: partial(_draw, op) for op in RANDOM},
    torch.ops.aten.native_dropout_backward.default: _dropout_backward,
}
