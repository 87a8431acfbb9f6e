"""The table of products with a weight, which linear layers and the rules of aten's ops share.

`y = x @ weight.T + bias`, as in `F.linear`: x (..., in), weight (out, in), y (..., out). On one mesh axis,

    x         weight      multiplied as         y          gradients of x, weight, bias
    R         R           R         R           R          R         R         R
    S(k)      R           S(k)      R           S(k)       S(k)      P         P         k: any dim of x but the last
    R         S(0)        R         S(0)        S(last)    P         S(0)      S(0)      column-parallel
    S(last)   S(1)        S(last)   S(1)        P          S(last)   S(1)      R         row-parallel

(R replicated, S sharded, fused or not, P partial sum.) Where the two are sharded on dims that do not match, one of them
is all-gathered over the axis, and then one of the lines above applies. Its gradient is reduce-scattered, and backward
gathers it again, so that the tensors saved for backward are sharded:

    S(last)   S(0)        R         S(0)        S(last)
    S(k)      S(1)        S(k)      R           S(k)
    S(k)      S(0)        R         S(0)        S(last)
                       or S(k)      R           S(k)       if y is to have these placements

These are the steps of SUMMA (van de Geijn and Watts 1997), which 2D, 2.5D and 3D tensor parallelism consist of. All
other operands are dispatched as DTensor ops: one of them is replicated, so that slicing it costs nothing, or a partial
sum. The rules of `aten.mm` and `aten.addmm` use the same lines (`_rules/_matmul.py`). In the last case they do not know
the desired placements of y, and gather the smaller operand.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlib.engine._torch import on_dim, splits
from shardlib.engine.ops._operands import pieces_of
from shardlib.engine.ops._rows import is_split

__all__ = ["LinearPlan", "Product", "plan_linear", "products"]

Placements = tuple[Placement, ...]


class Product(NamedTuple):
    """One line of the table: placements of both operands as they are multiplied, and of the product."""

    x: Placement
    weight: Placement
    y: Placement


def products(x: Placement, weight: Placement, last: int) -> tuple[Product, ...]:
    """Return the lines for operands with these placements on one mesh axis, that of linear layers first.

    Args:
        x: placement of the input.
        weight: placement of the weight, (out, in).
        last: the input's last dim.

    >>> [line.y for line in products(Shard(1), Shard(1), last=1)]
    [Partial(sum)]
    """
    replicated = Replicate()
    by_rows, by_columns = Product(x, replicated, x), Product(replicated, weight, on_dim(weight, last))
    if x.is_replicate():
        return (by_columns,) if splits(weight, 0) else (by_rows,) if weight.is_replicate() else ()
    if splits(x, last):
        if weight == on_dim(x, 1):
            return (Product(x, weight, Partial()),)
        return (by_columns,) if splits(weight, 0) else ()
    if not is_split(x):
        return ()
    if splits(weight, 0):
        return by_columns, by_rows
    return (by_rows,) if splits(weight, 1) or weight.is_replicate() else ()


class LinearPlan(NamedTuple):
    """Placements on all mesh axes in the computation of one linear layer.

    Attributes:
        x: placements of the input as it is multiplied.
        weight: placements of the weight as it is multiplied.
        product: placements of the product.
        y: placements of the output, which the bias is added to.
        grad_y: placements of the output's gradient as backward multiplies it.
        grad_x: placements of the input's gradient as it is computed, and as it is returned.
        grad_weight: the same for the weight's gradient.
        grad_bias: placements of the bias's gradient.
        bias: placements that the bias must have.
    """

    x: Placements
    weight: Placements
    product: Placements
    y: Placements
    grad_y: Placements
    grad_x: tuple[Placements, Placements]
    grad_weight: tuple[Placements, Placements]
    grad_bias: Placements
    bias: Placements


def plan_linear(
    x: Placements,
    weight: Placements,
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    sizes: tuple[int, ...],
    out: Placements | None = None,
) -> LinearPlan | None:
    """Return the plan of a linear layer, or None where the table does not cover it or a dim is sharded unevenly.

    Args:
        x: placements of the input.
        weight: placements of the weight, (out, in).
        shape: global shape of the input.
        weight_shape: global shape of the weight.
        sizes: sizes of the mesh axes.
        out: placements that the output is redistributed to afterwards. A partial sum is reduce-scattered directly,
            unless that shards the features, along which the bias would have to be sharded too.
    """
    last = len(shape) - 1
    wanted = (None,) * len(x) if out is None else out
    found = [
        line for a, b, want in zip(x, weight, wanted, strict=True) if (line := _line(a, b, last, want)) is not None
    ]
    if len(found) < len(x) or not (_is_even(shape, x, sizes) and _is_even(weight_shape, weight, sizes)):
        return None
    used_x, used_weight, product = (tuple(places) for places in zip(*found, strict=True))
    grad_x = tuple(Partial() if splits(line.weight, 0) else line.x for line in found)
    grad_weight = tuple(Partial() if _is_by_rows(line) else line.weight for line in found)
    grad_bias = tuple(Replicate() if y.is_partial() else g for y, g in zip(product, grad_weight, strict=True))
    return LinearPlan(
        x=used_x,
        weight=used_weight,
        product=product,
        y=tuple(_reduced(y, want, last) for y, want in zip(product, wanted, strict=True)),
        grad_y=_summed(product),
        grad_x=(grad_x, _returned(grad_x, used_x, x)),
        grad_weight=(grad_weight, _returned(grad_weight, used_weight, weight)),
        grad_bias=grad_bias,
        bias=_summed(grad_bias),
    )


def _line(x: Placement, weight: Placement, last: int, want: Placement | None) -> Product | None:
    """Return the line of one mesh axis: the one with the wanted output, or else the first."""
    lines = products(x, weight, last)
    for line in lines:
        if line.y == want:
            return line
    return lines[0] if lines else None


def _is_by_rows(line: Product) -> bool:
    """Return whether ranks have different rows of the input, so that gradients of weight and bias are partial sums."""
    return is_split(line.y) and line.weight.is_replicate()


def _reduced(y: Placement, want: Placement | None, last: int) -> Placement:
    if not y.is_partial():
        return y
    return want if type(want) is Shard and want.dim != last else Replicate()


def _returned(grad: Placements, used: Placements, original: Placements) -> Placements:
    """Return the operand's original placements on axes where it was all-gathered, elsewhere those of its gradient."""
    return tuple(o if u != o else g for g, u, o in zip(grad, used, original, strict=True))


def _summed(placements: Placements) -> Placements:
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def _is_even(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> bool:
    """Return whether no dim is sharded unevenly, not even by all its axes together.

    Only then do local strides determine the global strides.
    """
    return all(size % pieces_of(dim, placements, sizes) == 0 for dim, size in enumerate(shape))
