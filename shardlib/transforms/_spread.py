"""Choice of the dim that data axes split: one dim, inside the axes that split it already.

A shard is then part of the compute shard of its rank, so that it is gathered over data axes alone. The dim does not
change the results, only the balance of the shards and their memory layout:

1. dim 0 if its pieces come out even, or if they waste less than 1/16; pieces of it are contiguous;
2. else the first dim whose pieces come out even;
3. else, for one axis, a fused dim that nothing splits yet, on its last factor that it divides: PyTorch (2.13) gathers
   a DTensor with a fused dim over two axes in the wrong order;
4. else the largest dim of at least as many elements as pieces, unevenly;
5. else none: scalars and tiny tensors stay replicated.

A dim that data axes split already is preferred wherever it qualifies, so that data axes split one dim of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.layout import Dim, Layout

__all__ = ["FactorIndex", "axes_at", "find_factor", "spread", "with_axes_at"]

FactorIndex = tuple[int, int]
"""A dim and one of its factors."""

_LITTLE = Fraction(1, 16)


def spread(layout: Layout, global_shape: Sequence[int], mesh: MeshLike, axes: Iterable[str]) -> Layout:
    """Return the layout with these axes innermost on one dim, or unchanged where no dim can be sharded.

    Laws: the shard of a rank is part of its shard under `layout`; the shards of all ranks cover the tensor; they are
    even wherever an even choice exists, except for a first dim whose padding is less than 1/16.

    >>> spread(Layout.parse("vocab@tp embed"), (512, 64), "dp=2,tp=4", ["dp"])
    Layout("vocab@(tp,dp) embed")
    >>> spread(Layout.parse("(qkv heads head)", sizes={"qkv": 3, "heads": 8}), (384,), "dp=2,tp=4", ["dp"])
    Layout("(qkv=3 heads=8 head=16@dp)")
    >>> spread(Layout.parse("few"), (3,), "dp=4", ["dp"])
    Layout("few")
    """
    shape, added = MeshShape.of(mesh), tuple(axes)
    resolved = layout.resolve(global_shape, shape)
    index = find_factor(resolved, global_shape, shape, added)
    return layout if index is None else with_axes_at(resolved, index, (*axes_at(resolved, index), *added))


def find_factor(
    layout: Layout, global_shape: Sequence[int], mesh: MeshShape, axes: Sequence[str]
) -> FactorIndex | None:
    """Return the dim and factor of a concrete layout that the axes should split, or None."""
    pieces = math.prod(mesh[axis] for axis in axes)
    if 0 in global_shape or pieces == 1:
        return None
    local = layout.local_shape(global_shape, mesh, dict.fromkeys(mesh.names, 0))
    order = sorted(range(len(global_shape)), key=lambda dim: not _on_data(layout, dim, mesh))
    plain = [dim for dim in order if not _dim(layout, dim).fused]

    def even(dim: int) -> bool:
        pieces_now = math.prod(mesh[axis] for axis in layout.axes_of(dim))
        return global_shape[dim] % (pieces_now * pieces) == 0

    if plain and plain[0] == order[0] and (even(plain[0]) or _padding(local[plain[0]], pieces) < _LITTLE):
        return plain[0], 0
    if found := [(dim, 0) for dim in plain if even(dim)]:
        return found[0]
    alone = sum(mesh[axis] > 1 for axis in axes) == 1
    if found := [index for dim in order if alone for index in _inside(layout, dim, mesh, pieces)]:
        return found[0]
    largest = max(plain, key=lambda dim: local[dim], default=None)
    return (largest, 0) if largest is not None and local[largest] >= pieces else None


def axes_at(layout: Layout, index: FactorIndex) -> tuple[str, ...]:
    """Return the axes that split one factor."""
    return _dim(layout, index[0]).factors[index[1]].axes


def with_axes_at(layout: Layout, index: FactorIndex, axes: Sequence[str]) -> Layout:
    """Return the layout with exactly these axes on one factor."""
    return layout.with_axes(index[0], axes, factor=index[1])


def _padding(size: int, pieces: int) -> Fraction:
    """Return the fraction of padding in equal pieces of a dim."""
    return 1 - Fraction(size, pieces * math.ceil(size / pieces)) if size else Fraction(0)


def _inside(layout: Layout, dim: int, mesh: MeshShape, pieces: int) -> Iterator[FactorIndex]:
    """Iterate over the factors of a fused dim that can be split, the last one first."""
    factors = _dim(layout, dim).factors
    split = any(mesh[axis] > 1 for factor in factors for axis in factor.axes)
    if len(factors) > 1 and not split:
        yield from ((dim, at) for at in reversed(range(len(factors))) if (factors[at].size or 0) % pieces == 0)


def _on_data(layout: Layout, dim: int, mesh: MeshShape) -> bool:
    return any(axis in mesh.data_axes for axis in layout.axes_of(dim))


def _dim(layout: Layout, dim: int) -> Dim:
    entry = layout.dims[dim]
    assert isinstance(entry, Dim)
    return entry
