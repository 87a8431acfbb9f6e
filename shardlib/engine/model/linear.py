"""Linear layers in a region: one local product in forward and two in backward, instead of a dozen DTensor ops.

`F.linear` on DTensors is decomposed into views, transposes and products, each of which is dispatched, forward and
backward. `ops/_products.py` decides how a layer is computed, by the placements of its operands and of its output. This
module executes the decision: in eager mode on local tensors, by steps that are cached by the operands' specs; in a
compiled block by traced redistributions. Operands that the table does not cover, uneven shards and layers under
autocast use the module's own forward. Second derivatives are computed by DTensor ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from shardlib.engine import _torch
from shardlib.engine._torch import DTensorSpec
from shardlib.engine.ops._operands import redistributed
from shardlib.engine.ops._products import LinearPlan, plan_linear
from shardlib.engine.undo import replace_forward
from shardlib.rules.dims import linear_dims

__all__ = ["compute_locally"]

Out = tuple[tuple[Placement, ...] | None, ...]
Move = Callable[[torch.Tensor], torch.Tensor]


def compute_locally(module: nn.Module, out: Out | None = None) -> Callable[[], None]:
    """Let a linear layer inside a region compute on local tensors, and return an undo function.

    Args:
        module: of a class that is registered as linear.
        out: the placements that its output is redistributed to, by its number of dims.
    """
    dims, own_forward = linear_dims(module), module.forward
    transposed = dims is not None and dims.is_transposed

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        bias: Any = getattr(module, "bias", None)
        if not isinstance(input, DTensor) or not isinstance(weight, DTensor):
            return own_forward(input)
        if torch.is_autocast_enabled(weight.device_mesh.device_type):
            return own_forward(input)
        weight = weight.t() if transposed else weight
        want = None if out is None else out[input.ndim]
        if torch.compiler.is_compiling():
            traced = _traced(input, weight, bias, want)
            return own_forward(input) if traced is None else traced
        spec = _torch.spec_of
        steps = _steps(spec(input), spec(weight), spec(bias) if isinstance(bias, DTensor) else bias is not None, want)
        return own_forward(input) if steps is None else _apply(input, weight, bias, steps)

    return replace_forward(module, forward)


# --- in a compiled block -------------------------------------------------------------------------------------------


def _traced(x: DTensor, weight: DTensor, bias: Any, out: tuple[Placement, ...] | None) -> torch.Tensor | None:
    """Compute a layer by traceable and differentiable ops, or return None where the table does not cover it."""
    mesh = x.device_mesh
    plan = _constant_plan(x.placements, weight.placements, x.shape, weight.shape, mesh.shape, out)
    if plan is None or (bias is not None and not (isinstance(bias, DTensor) and bias.placements == plan.bias)):
        return None
    summed = plan.product != plan.y
    local_x, local_weight = _local(x, plan.x, plan.grad_x[0]), _local(weight, plan.weight, plan.grad_weight[0])
    local_bias = None if bias is None else bias.to_local(grad_placements=plan.grad_bias)
    local = F.linear(local_x, local_weight, None if summed else local_bias)
    gathers = plan.grad_y != plan.y  # only then is the gradient of the bias not that of the sum, row by row
    if summed and local_bias is not None and gathers:
        local = _BiasGradient.apply(local, local_bias)
    y = DTensor.from_local(local, mesh, plan.product, run_check=False)
    if not summed:
        return y
    y = y.redistribute(placements=plan.y)
    if bias is None or local_bias is None:
        return y
    if gathers:
        return y + bias.detach()
    return DTensor.from_local(y.to_local(grad_placements=plan.grad_y) + local_bias, mesh, plan.y, run_check=False)


class _BiasGradient(torch.autograd.Function):
    """Give a bias its gradient where the product's is full, as eager layers do, though it is added after the sum."""

    @staticmethod
    def forward(ctx: Any, product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return grad, grad.reshape(-1, grad.shape[-1]).sum(0)


@_torch.constant_in_graphs  # plan_linear itself cannot be: dynamo is kept out of shardlib.engine.ops
def _constant_plan(*given: Any) -> LinearPlan | None:
    return plan_linear(*given)


def _local(tensor: DTensor, placements: tuple[Placement, ...], grad: tuple[Placement, ...]) -> torch.Tensor:
    """Return the local tensor in other placements; its gradient has placements `grad`."""
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local(grad_placements=grad)


# --- eagerly -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Steps:
    """The steps for operands of some specs: redistributions of local tensors, and specs of results.

    `gather_x` and `gather_weight` precede the products, in forward and backward; `reduce_y` precedes the addition of
    the bias (None: the product is the output); `reduce_x` and `reduce_weight` are applied to gradients before they are
    returned.
    """

    plan: LinearPlan
    gather_x: Move
    gather_weight: Move
    reduce_y: Move | None
    reduce_x: Move
    reduce_weight: Move
    y: DTensorSpec
    grad_x: DTensorSpec
    grad_weight: DTensorSpec
    grad_bias: DTensorSpec


@_torch.cached_by_mesh
def _steps(
    x: DTensorSpec, weight: DTensorSpec, bias: DTensorSpec | bool, out: tuple[Placement, ...] | None
) -> _Steps | None:
    """Return the steps of a layer, or None where it uses the module's own forward.

    A rule may match the weight but not the bias, which then has other placements. `bias` is False where the layer has
    none, and True where it is a plain tensor.
    """
    assert x.tensor_meta is not None and weight.tensor_meta is not None
    dtype = weight.tensor_meta.dtype
    plan = plan_linear(x.placements, weight.placements, x.shape, weight.shape, x.mesh.shape, out)
    if plan is None or x.tensor_meta.dtype != dtype:
        return None
    if bias and (bias is True or bias.placements != plan.bias):
        return None
    spec = partial(_torch.spec, x.mesh, dtype=dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    return _Steps(
        plan=plan,
        gather_x=_move(x, plan.x),
        gather_weight=_move(weight, plan.weight),
        reduce_y=_sum(spec(plan.product, shape), plan.y),
        reduce_x=_move(spec(plan.grad_x[0], x.shape), plan.grad_x[1]),
        reduce_weight=_move(spec(plan.grad_weight[0], weight.shape), plan.grad_weight[1]),
        y=spec(plan.y, shape),
        grad_x=spec(plan.grad_x[1], x.shape),
        grad_weight=spec(plan.grad_weight[1], weight.shape),
        grad_bias=spec(plan.grad_bias, weight.shape[:1]),
    )


def _move(spec: DTensorSpec, placements: tuple[Placement, ...]) -> Move:
    """Return a redistribution of local tensors."""
    return _unchanged if spec.placements == placements else partial(redistributed, spec=spec, want=placements)


def _unchanged(local: torch.Tensor) -> torch.Tensor:
    return local


def _sum(spec: DTensorSpec, placements: tuple[Placement, ...]) -> Move | None:
    """Return the reduction of a new local product, if any: in place, where it is all-reduced over one mesh axis."""
    if spec.placements == placements:
        return None
    group = _torch.group_to_sum_over(spec.mesh, spec.placements, placements)
    return _move(spec, placements) if group is None else partial(_torch.sum_in_place, group=group)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, steps: _Steps) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.steps, ctx.has_bias = steps, bias is not None
        local_x, local_weight = steps.gather_x(_torch.local_of(x)), steps.gather_weight(_torch.local_of(weight))
        local_bias = None if bias is None else _torch.local_of(bias)
        if steps.reduce_y is None:
            return _torch.wrap(F.linear(local_x, local_weight, local_bias), steps.y)
        y = steps.reduce_y(F.linear(local_x, local_weight))
        return _torch.wrap(y if local_bias is None else y.add_(local_bias), steps.y)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if given is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        grad = _torch.as_replicated(given, x.device_mesh)  # autograd makes plain ones, as behind a packed sequence
        steps: _Steps = ctx.steps
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, grad.redistribute(placements=steps.plan.grad_y), x, weight), None)
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        local = redistributed(_torch.local_of(grad), _torch.spec_of(grad), steps.plan.grad_y)
        rows = local.reshape(-1, local.shape[-1])
        local_x, local_weight = steps.gather_x(_torch.local_of(x)), steps.gather_weight(_torch.local_of(weight))
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = _torch.wrap(steps.reduce_x(local @ local_weight), steps.grad_x)
        if needs_weight:
            grad_weight = _torch.wrap(steps.reduce_weight(rows.t() @ local_x.flatten(0, -2)), steps.grad_weight)
        if ctx.has_bias and needs_bias:
            grad_bias = _torch.wrap(rows.sum(0), steps.grad_bias)
        return grad_x, grad_weight, grad_bias, None


_apply = _torch.direct_apply(_Linear)


def _differentiable(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor | None]:
    """Compute the gradients by differentiable DTensor ops, for create_graph=True."""
    flat = grad.flatten(0, -2)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_weight = flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return [grad_x, grad_weight, flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None]
