"""Linear layers in eager mode: one local product each way, in place of a dozen DTensor ops.

`F.linear` on DTensors comes apart into views, transposes and products, each dispatched by itself, forward and backward.
Where the operands lie as Megatron's layers do, what these compute on every mesh axis is known beforehand:

    input     weight        output    gradients of (input, weight, bias)
    R         R             R         R, R, R
    S(k)      R             S(k)      S(k), P, P         k: any dim of the input but the last
    R         S(0)          S(last)   P, S(0), S(0)      column-parallel; also split inside a fused dim
    S(last)   S(1)          R         S(last), S(1), R   row-parallel: summed over the axis, then the bias is added
                            S(k)                         or summed and scattered, where the module's border says so

(R replicated, S split, P partial sum.) Where both operands are split, by dims that do not go together, one of them is
gathered over the axis and the line for the rest holds; its gradient is scattered again, and backward gathers anew, so
that what is kept is split. These are the steps of SUMMA (van de Geijn and Watts 1997), which 2D, 2.5D and 3D tensor
parallelism are made of:

    S(last)   S(0)          the input is gathered
    S(k)      S(1)          the weight is gathered
    S(k)      S(0)          the input is, unless the module's border wants the output split as the input

A compiled block gathers by the same table; what it keeps for backward is its compiler's choice. Everything else, and
whatever is autocast or differentiated twice, takes the way of the module's own forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardlib.engine import _torch
from shardlib.engine._torch import DTensorSpec
from shardlib.engine.ops._operands import redistributed

__all__ = ["compute_locally", "is_linear"]

Border = tuple[tuple[Placement, ...] | None, ...]


def is_linear(module: nn.Module) -> bool:
    """Whether a module's forward is a product with its weight, and a bias or none, and nothing else."""
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """Hugging Face's Conv1D, a linear layer whose weight is (in, out)."""
    return f"{type(module).__module__}.{type(module).__name__}" == "transformers.pytorch_utils.Conv1D"


def compute_locally(module: nn.Module, border: Border | None = None) -> Callable[[], None]:
    """Let one linear layer inside a region compute as above; returns what undoes it.

    `border`: the placements that its output is brought into, by its number of dims.
    """
    transposed, own_forward = _is_transposed(module), module.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        bias: Any = module.bias
        autocast = torch.is_autocast_enabled(input.device.type)
        if autocast or not isinstance(input, DTensor) or not isinstance(weight, DTensor):
            return own_forward(input)
        weight = weight.t() if transposed else weight
        want = None if border is None else border[input.ndim]
        if torch.compiler.is_compiling():
            input, weight = _as_multiplied(input, weight, want)
            return F.linear(input, weight, bias)
        way = _way(_torch.spec_of(input), _torch.spec_of(weight), want)
        if way is None or not (bias is None or _lies_as(bias, way.bias)):
            return own_forward(input)
        return _Linear.apply(input, weight, bias, way)

    module.forward = forward  # type: ignore[method-assign]
    return lambda: delattr(module, "forward")


@dataclass(frozen=True)
class _Way:
    """How one call is computed: the specs of its operands, as they come and as they are multiplied, and of results.

    The product is a partial sum where it is not the output; so is the product that a gradient is, of an operand that
    was gathered. `whole` is the output's gradient as the products of backward take it, `bias` what a bias has to lie
    like.
    """

    x: tuple[Placement, ...]
    weight: tuple[Placement, ...]
    product: DTensorSpec
    output: DTensorSpec
    whole: tuple[Placement, ...]
    grad_x: tuple[DTensorSpec, DTensorSpec]
    grad_weight: tuple[DTensorSpec, DTensorSpec]
    grad_bias: DTensorSpec
    bias: tuple[Placement, ...]

    @property
    def summed(self) -> bool:
        return self.product is not self.output


@_torch.cached_by_mesh
def _way(x: DTensorSpec, weight: DTensorSpec, border: tuple[Placement, ...] | None) -> _Way | None:
    assert x.tensor_meta is not None and weight.tensor_meta is not None
    last = len(x.shape) - 1
    wanted = border or (None,) * len(x.placements)
    used = [_gathered(a, b, last, want) for a, b, want in zip(x.placements, weight.placements, wanted, strict=True)]
    rows = [_row(a, b, last) for a, b in used]
    if None in rows or x.tensor_meta.dtype != weight.tensor_meta.dtype or not (_even(x) and _even(weight)):
        return None
    whole, grad_x, grad_weight, grad_bias, partial = zip(*rows, strict=True)  # type: ignore[arg-type]
    product = tuple(Partial() if summed else place for place, summed in zip(whole, partial, strict=True))
    output = _scattered(whole, partial, border, last)
    spec = functools.partial(_torch.spec, x.mesh, dtype=weight.tensor_meta.dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    result = spec(output, shape)
    used_x, used_weight = (tuple(pair[i] for pair in used) for i in range(2))
    return _Way(
        x=used_x,
        weight=used_weight,
        product=spec(product, shape) if any(partial) else result,
        output=result,
        whole=whole,
        grad_x=(spec(grad_x, x.shape), spec(_back(grad_x, used_x, x.placements), x.shape)),
        grad_weight=(
            spec(grad_weight, weight.shape),
            spec(_back(grad_weight, used_weight, weight.placements), weight.shape),
        ),
        grad_bias=spec(grad_bias, weight.shape[:1]),
        bias=tuple(Replicate() if place.is_partial() else place for place in grad_bias),
    )


def _as_multiplied(x: DTensor, weight: DTensor, border: tuple[Placement, ...] | None) -> tuple[DTensor, DTensor]:
    """The operands, gathered as the table says, by ops that can be traced and differentiated."""
    wanted = border or (None,) * len(x.placements)
    pairs = zip(x.placements, weight.placements, wanted, strict=True)
    used = [_gathered(a, b, x.ndim - 1, want) for a, b, want in pairs]
    return x.redistribute(placements=[a for a, _ in used]), weight.redistribute(placements=[b for _, b in used])


def _gathered(x: Placement, weight: Placement, last: int, want: Placement | None) -> tuple[Placement, Placement]:
    """The operands on one axis as they are multiplied."""
    if type(x) is not Shard or weight.is_replicate():
        return x, weight
    if x.dim != last and (_torch.splits(weight, 1) or want == x):
        return x, Replicate()
    return (Replicate(), weight) if _torch.splits(weight, 0) else (x, weight)


def _back(
    grad: tuple[Placement, ...], used: tuple[Placement, ...], came: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    """A gradient's placements: those of the operand on axes over which it was gathered."""
    return tuple(c if u != c else g for g, u, c in zip(grad, used, came, strict=True))


def _lies_as(bias: torch.Tensor, placements: tuple[Placement, ...]) -> bool:
    """A rule may name the weight alone."""
    return isinstance(bias, DTensor) and bias.placements == placements


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


def _scattered(
    whole: tuple[Placement, ...], partial: tuple[bool, ...], border: tuple[Placement, ...] | None, last: int
) -> tuple[Placement, ...]:
    """The output's placements: a sum goes where the border wants it, unless that splits the features, and the bias."""
    if border is None:
        return whole
    return tuple(
        want if summed and type(want) is Shard and want.dim != last else place
        for place, summed, want in zip(whole, partial, border, strict=True)
    )


def _even(spec: DTensorSpec) -> bool:
    """Whether no split is uneven, not even by all axes of a dim together: only then do local strides say what global
    ones are."""
    return all(size % _pieces(spec, dim) == 0 for dim, size in enumerate(spec.shape))


def _pieces(spec: DTensorSpec, dim: int) -> int:
    pairs = zip(spec.placements, spec.mesh.shape, strict=True)
    return math.prod(n for place, n in pairs if _torch.splits(place, dim))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, way: _Way) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.way, ctx.has_bias = way, bias is not None
        local_bias = None if bias is None else _torch.local_of(bias)
        y = F.linear(_local(x, way.x), _local(weight, way.weight), None if way.summed else local_bias)
        if way.summed:
            y = redistributed(y, way.product, way.output.placements)
            y = y if local_bias is None else y.add_(local_bias)
        return _torch.wrap(y, way.output)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        way: _Way = ctx.way
        if torch.is_grad_enabled():
            return (*_differentiable(ctx, grad.redistribute(placements=way.whole), x, weight), None)
        needs = ctx.needs_input_grad
        g = _local(grad, way.whole)
        flat = g.reshape(-1, g.shape[-1])
        return (
            _scattered_back(g @ _local(weight, way.weight), *way.grad_x) if needs[0] else None,
            _scattered_back(flat.t() @ _local(x, way.x).flatten(0, -2), *way.grad_weight) if needs[1] else None,
            _torch.wrap(flat.sum(0), way.grad_bias) if ctx.has_bias and needs[2] else None,
            None,
        )


def _local(tensor: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The local tensor, gathered over axes on which it is wanted whole."""
    return redistributed(_torch.local_of(tensor), _torch.spec_of(tensor), placements)


def _scattered_back(product: torch.Tensor, spec: DTensorSpec, wanted: DTensorSpec) -> torch.Tensor:
    return _torch.wrap(redistributed(product, spec, wanted.placements), wanted)


def _differentiable(ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor | None]:
    """The same gradients by DTensor ops, for the gradient of a gradient."""
    flat = grad.flatten(0, -2)
    grad_x = grad @ weight if ctx.needs_input_grad[0] else None
    grad_weight = flat.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return [grad_x, grad_weight, flat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None]
