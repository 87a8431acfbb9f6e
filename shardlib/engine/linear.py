"""Linear layers in eager mode: one local product each way, in place of a dozen DTensor ops.

`F.linear` on DTensors comes apart into views, transposes and products, each dispatched by itself, forward and backward.
Where the operands lie as Megatron's layers do, what these compute on every mesh axis is known beforehand:

    input     weight        output    gradients of (input, weight, bias)
    R         R             R         R, R, R
    S(k)      R             S(k)      S(k), P, P         k: any dim of the input but the last
    R         S(0)          S(last)   P, S(0), S(0)      column-parallel; also split inside a fused dim
    S(last)   S(1)          R         S(last), S(1), R   row-parallel: summed over the axis, then the bias is added

(R replicated, S split, P partial sum.) Everything else, and whatever is traced, autocast or differentiated twice, takes
the way of `F.linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardlib.engine import _torch

__all__ = ["compute_locally"]

Placements = tuple[Placement, ...]


def compute_locally(module: nn.Linear) -> Callable[[], None]:
    """Let one `nn.Linear` inside a region compute as above; returns what undoes it."""

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        traced = torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type)
        if not traced and isinstance(input, DTensor) and isinstance(weight, DTensor):
            way = _way(input.placements, weight.placements, input.ndim)
            if way is not None and _even(input, weight):
                return _Linear.apply(input, weight, bias, way)
        return F.linear(input, weight, bias)

    module.forward = forward  # type: ignore[method-assign]
    return lambda: delattr(module, "forward")


class _Way:
    """The placements of one call's results, and the mesh dims over which its product is summed."""

    def __init__(self, rows: list[tuple[Placement, Placement, Placement, Placement, bool]]) -> None:
        self.output: Placements = tuple(row[0] for row in rows)
        self.grad_input: Placements = tuple(row[1] for row in rows)
        self.grad_weight: Placements = tuple(row[2] for row in rows)
        self.grad_bias: Placements = tuple(row[3] for row in rows)
        self.product: Placements = tuple(Partial() if row[4] else row[0] for row in rows)
        self.summed = any(row[4] for row in rows)


@functools.cache
def _way(x: Placements, weight: Placements, ndim: int) -> _Way | None:
    rows = [_row(a, b, ndim - 1) for a, b in zip(x, weight, strict=True)]
    return None if None in rows else _Way(rows)  # type: ignore[arg-type]


def _row(x: Placement, weight: Placement, last: int) -> tuple[Placement, Placement, Placement, Placement, bool] | None:
    """One line of the table: output, gradients of input, weight and bias, and whether the product is a partial sum."""
    r = Replicate()
    if x.is_replicate() and weight.is_replicate():
        return r, r, r, r, False
    if x.is_replicate() and _torch.splits(weight, 0):
        return _torch.moved(weight, last), Partial(), weight, weight, False
    if type(x) is Shard and x.dim != last and weight.is_replicate():
        return x, x, Partial(), Partial(), False
    if type(x) is Shard and x.dim == last and type(weight) is Shard and weight.dim == 1:
        return r, x, weight, r, True
    return None


def _even(x: DTensor, weight: DTensor) -> bool:
    """Whether no split is uneven: only then do local strides say what global ones are."""
    pairs = [(t, p, n) for t in (x, weight) for p, n in zip(t.placements, t.device_mesh.shape, strict=True)]
    return all(t.shape[p.dim] % n == 0 for t, p, n in pairs if isinstance(p, Shard))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, way: _Way) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.way, ctx.has_bias = way, bias is not None
        local_bias = None if bias is None else _torch.local_of(bias)
        y = F.linear(_torch.local_of(x), _torch.local_of(weight), None if way.summed else local_bias)
        shape = (*x.shape[:-1], weight.shape[0])
        if not way.summed:
            return _torch.wrap(y, _torch.spec(x.device_mesh, way.output, shape, y.dtype))
        y = _torch.reduced(y, x.device_mesh, way.product, way.output, shape)
        y = y if local_bias is None else y.add_(local_bias)
        return _torch.wrap(y, _torch.spec(x.device_mesh, way.output, shape, y.dtype))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if grad.placements != ctx.way.output:
            grad = grad.redistribute(placements=ctx.way.output)
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, grad, x, weight), None)
        needs, way, mesh = ctx.needs_input_grad, ctx.way, x.device_mesh
        g, rows = _torch.local_of(grad), _torch.local_of(x).flatten(0, -2)
        flat = g.reshape(-1, g.shape[-1])
        grads: list[torch.Tensor | None] = [None, None, None]
        if needs[0]:
            grads[0] = _wrapped(g @ _torch.local_of(weight), mesh, way.grad_input, x.shape)
        if needs[1]:
            grads[1] = _wrapped(flat.t() @ rows, mesh, way.grad_weight, weight.shape)
        if ctx.has_bias and needs[2]:
            grads[2] = _wrapped(flat.sum(0), mesh, way.grad_bias, weight.shape[:1])
        return (*grads, None)


def _wrapped(local: torch.Tensor, mesh: Any, placements: Placements, shape: tuple[int, ...]) -> DTensor:
    return _torch.wrap(local, _torch.spec(mesh, placements, shape, local.dtype))


def _differentiable(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor | None]:
    """The same gradients by DTensor ops, for the gradient of a gradient."""
    flat = grad.flatten(0, -2)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_weight = flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return [grad_x, grad_weight, flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None]
