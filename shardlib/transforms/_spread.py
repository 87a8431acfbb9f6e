"""Where data axes split a tensor: one dim, inside whatever splits it already.

A piece is then a part of what its rank computes with, so that it is gathered along data axes alone. Which dim does not
change what is computed, only how even the pieces are and how they lie in memory:

1. dim 0 if its pieces come out even, or if they waste less than 1/16; pieces of it are contiguous;
2. else the first dim whose pieces come out even;
3. else, for one axis, a fused dim that nothing splits yet, on its last factor that it divides: PyTorch (2.13) gathers
   a DTensor with a fused dim over two axes in the wrong order;
4. else the largest dim of at least as many elements as pieces, unevenly;
5. else none: scalars and tiny tensors stay whole.

A dim that data axes split already comes before all others wherever it would do, so that the axes of a tensor gather
on one dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from shardlib._mesh import MeshLike, MeshShape
from shardlib.layout import Dim, Layout

__all__ = ["Place", "axes_at", "find_place", "spread", "with_axes_at"]

Place = tuple[int, int]
"""A dim and one of its factors."""

_LITTLE = Fraction(1, 16)


def spread(layout: Layout, global_shape: Sequence[int], mesh: MeshLike, axes: Iterable[str]) -> Layout:
    """The layout with these axes innermost on one dim, or as it is where they fit nowhere.

    Laws: the piece that a rank holds lies inside the one it held; pieces of all ranks joined are the whole; they are
    even wherever an even choice exists, but for a first dim that wastes less than 1/16.

    >>> spread(Layout.parse("vocab@tp embed"), (512, 64), "dp=2,tp=4", ["dp"])
    Layout("vocab@(tp,dp) embed")
    >>> spread(Layout.parse("(qkv heads head)", sizes={"qkv": 3, "heads": 8}), (384,), "dp=2,tp=4", ["dp"])
    Layout("(qkv=3 heads=8 head=16@dp)")
    >>> spread(Layout.parse("few"), (3,), "dp=4", ["dp"])
    Layout("few")
    """
    shape, added = MeshShape.of(mesh), tuple(axes)
    resolved = layout.resolve(global_shape, shape)
    place = find_place(resolved, global_shape, shape, added)
    return layout if place is None else with_axes_at(resolved, place, (*axes_at(resolved, place), *added))


def find_place(layout: Layout, global_shape: Sequence[int], mesh: MeshShape, axes: Sequence[str]) -> Place | None:
    """The dim and factor of a concrete layout that the axes are to split."""
    pieces = math.prod(mesh[axis] for axis in axes)
    if 0 in global_shape or pieces == 1:
        return None
    local = layout.local_shape(global_shape, mesh, dict.fromkeys(mesh.names, 0))
    order = sorted(range(len(global_shape)), key=lambda dim: not _on_data(layout, dim, mesh))
    plain = [dim for dim in order if not _dim(layout, dim).fused]

    def even(dim: int) -> bool:
        held = math.prod(mesh[axis] for axis in layout.axes_of(dim))
        return global_shape[dim] % (held * pieces) == 0

    if plain and plain[0] == order[0] and (even(plain[0]) or _waste(local[plain[0]], pieces) < _LITTLE):
        return plain[0], 0
    if found := [(dim, 0) for dim in plain if even(dim)]:
        return found[0]
    alone = sum(mesh[axis] > 1 for axis in axes) == 1
    if found := [place for dim in order if alone for place in _inside(layout, dim, mesh, pieces)]:
        return found[0]
    largest = max(plain, key=lambda dim: local[dim], default=None)
    return (largest, 0) if largest is not None and local[largest] >= pieces else None


def axes_at(layout: Layout, place: Place) -> tuple[str, ...]:
    """The axes that split one factor."""
    return _dim(layout, place[0]).factors[place[1]].axes


def with_axes_at(layout: Layout, place: Place, axes: Sequence[str]) -> Layout:
    """The layout with exactly these axes on one factor."""
    return layout.with_axes(place[0], axes, factor=place[1])


def _waste(size: int, pieces: int) -> Fraction:
    """What part of equal pieces that hold everything is empty."""
    return 1 - Fraction(size, pieces * math.ceil(size / pieces)) if size else Fraction(0)


def _inside(layout: Layout, dim: int, mesh: MeshShape, pieces: int) -> Iterator[Place]:
    """The factors of a fused dim that may be split, the last one first."""
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
