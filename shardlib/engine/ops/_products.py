"""Which way a product with a weight is computed: one table, which linear layers and the rules of aten's ops read.

`y = x @ weight.T + bias`, as in `F.linear`: x (..., in), weight (out, in), y (..., out). On one mesh axis,

    x         weight      multiplied as         y          gradients of x, weight, bias
    R         R           R         R           R          R         R         R
    S(k)      R           S(k)      R           S(k)       S(k)      P         P         k: any dim of x but the last
    R         S(0)        R         S(0)        S(last)    P         S(0)      S(0)      column-parallel
    S(last)   S(1)        S(last)   S(1)        P          S(last)   S(1)      R         row-parallel

(R replicated, S sharded, plainly or inside a fused dim, P partial sum.) Where the two are sharded by dims that do not
go together, one of them is all-gathered over the axis, and the line for the rest holds. Its gradient is
reduce-scattered, and backward gathers it anew, so that what is kept for backward is sharded:

    S(last)   S(0)        R         S(0)        S(last)
    S(k)      S(1)        S(k)      R           S(k)
    S(k)      S(0)        R         S(0)        S(last)
                       or S(k)      R           S(k)       where y is wanted so

These are the steps of SUMMA (van de Geijn and Watts 1997), which 2D, 2.5D and 3D tensor parallelism consist of. All
other operands are dispatched as DTensor ops: one of them is replicated, so that slicing it costs nothing, or a partial
sum. The rules of `aten.mm` and `aten.addmm` read the same lines (`_rules/_matmul.py`). In the last case they do not
know what is wanted, and gather the smaller operand.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlib.engine._torch import _StridedShard, moved, splits

__all__ = ["LinearPlan", "Product", "plan_linear", "products"]

Placements = tuple[Placement, ...]


class Product(NamedTuple):
    """One line of the table: placements of both as they are multiplied, and of what comes of it."""

    x: Placement
    weight: Placement
    y: Placement


def products(x: Placement, weight: Placement, last: int) -> tuple[Product, ...]:
    """Return the lines for operands that lie so on one mesh axis, that of linear layers first.

    Args:
        x: of the input.
        weight: of the weight, (out, in).
        last: the input's last dim.

    >>> [line.y for line in products(Shard(1), Shard(1), last=1)]
    [Partial(sum)]
    """
    whole = Replicate()
    by_rows, by_columns = Product(x, whole, x), Product(whole, weight, moved(weight, last))
    if x.is_replicate():
        return (by_columns,) if splits(weight, 0) else (by_rows,) if weight.is_replicate() else ()
    if splits(x, last):
        if weight == moved(x, 1):
            return (Product(x, weight, Partial()),)
        return (by_columns,) if splits(weight, 0) else ()
    if not _is_split(x):
        return ()
    if splits(weight, 0):
        return by_columns, by_rows
    return (by_rows,) if splits(weight, 1) or weight.is_replicate() else ()


class LinearPlan(NamedTuple):
    """How one linear layer is computed: placements on all mesh axes.

    Attributes:
        x: of the input as it is multiplied.
        weight: of the weight as it is multiplied.
        product: of what comes of it.
        y: of the output, which the bias is added to.
        grad_y: of the output's gradient as backward multiplies it.
        grad_x: of the input's gradient as it is computed, and as it is handed on.
        grad_weight: the same of the weight's gradient.
        grad_bias: of the bias's gradient.
        bias: that the bias must have.
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
    border: Placements | None = None,
) -> LinearPlan | None:
    """Return how a linear layer is computed, or None where the table has no line or a dim is sharded unevenly.

    Args:
        x: placements of the input.
        weight: of the weight, (out, in).
        shape: the input's global shape.
        weight_shape: the weight's.
        sizes: of the mesh axes.
        border: that the output is brought into afterwards. A partial sum is reduce-scattered at once where it shards
            another dim than the features, along which the bias would have to be sharded too.
    """
    last = len(shape) - 1
    wanted = (None,) * len(x) if border is None else border
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
        grad_x=(grad_x, _handed_on(grad_x, used_x, x)),
        grad_weight=(grad_weight, _handed_on(grad_weight, used_weight, weight)),
        grad_bias=grad_bias,
        bias=_summed(grad_bias),
    )


def _line(x: Placement, weight: Placement, last: int, want: Placement | None) -> Product | None:
    """Return the line of one mesh axis: the one whose output is wanted, or else the first."""
    lines = products(x, weight, last)
    for line in lines:
        if line.y == want:
            return line
    return lines[0] if lines else None


def _is_by_rows(line: Product) -> bool:
    """Whether ranks have other rows of the input, so that gradients of weight and bias are partial sums."""
    return _is_split(line.y) and line.weight.is_replicate()


def _reduced(y: Placement, want: Placement | None, last: int) -> Placement:
    if not y.is_partial():
        return y
    return want if type(want) is Shard and want.dim != last else Replicate()


def _handed_on(grad: Placements, used: Placements, came: Placements) -> Placements:
    """Return the placements of an operand where it was all-gathered, elsewhere those of its gradient."""
    return tuple(c if u != c else g for g, u, c in zip(grad, used, came, strict=True))


def _summed(placements: Placements) -> Placements:
    return tuple(Replicate() if place.is_partial() else place for place in placements)


def _is_even(shape: tuple[int, ...], placements: Placements, sizes: tuple[int, ...]) -> bool:
    """Whether no dim is sharded unevenly, not even by all axes of it together.

    Only then do local strides say what global ones are.
    """
    return all(size % _pieces(dim, placements, sizes) == 0 for dim, size in enumerate(shape))


def _pieces(dim: int, placements: Placements, sizes: tuple[int, ...]) -> int:
    return math.prod(n for place, n in zip(placements, sizes, strict=True) if splits(place, dim))


def _is_split(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)
