"""Transitions from one layout to another: a short list of collectives, each with its bytes.

The model of cost. Without pending reductions a layout says which set of elements each rank holds, and a transition
must send every rank what it needs and lacks: |needs \\ holds| elements, averaged over ranks. That is zero from a layout
to itself and obeys the triangle inequality, because needs(c) \\ holds(a) lies inside the union of needs(c) \\ holds(b)
and needs(b) \\ holds(a). On the usual pairs it is what a ring sends: (n-1)/n of the result for an all-gather, (n-1)/n
of the shard for an all-to-all. A pending reduction adds (n-1)/n of what is reduced for a reduce-scatter, twice that
for an all-reduce (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.layout._dims import Dim, Factor
from shardlib.layout._layout import Layout
from shardlib.layout._local import Slices, dim_slices

if TYPE_CHECKING:
    import torch

__all__ = ["Collective", "Kind", "cost", "transition"]

Kind: TypeAlias = Literal[
    "slice", "reduce_scatter", "all_reduce", "all_gather", "all_to_all", "gather", "scatter", "copy"
]


@dataclass(frozen=True)
class Collective:
    """One step of a transition.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all"; "slice", where each rank keeps a part of
            its shard and sends nothing; "copy", between host and device memory. "gather" and "scatter", to and from one
            rank, are in no transition.
        axes: the mesh axes whose ranks take part together, in mesh order.
        bytes: bytes that one rank sends (for a copy: copies), averaged over ranks, rounded up.
    """

    kind: Kind
    axes: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.axes)}): {self.bytes} bytes"


def cost(collectives: Iterable[Collective]) -> int:
    """Return the bytes that one rank sends over the network; copies between host and device do not count."""
    return sum(step.bytes for step in collectives if step.kind != "copy")


def transition(
    src: Layout, dst: Layout, global_shape: Sequence[int], dtype: torch.dtype, mesh: MeshLike
) -> tuple[Collective, ...]:
    """Return the cheapest collectives that redistribute a tensor from the layout `src` to the layout `dst`.

    Laws: a transition from a layout to itself costs nothing, as does sharding a replicated tensor. Among layouts
    without pending reductions `cost` obeys the triangle inequality; a pending reduction costs no more than reducing
    first and moving then. Axes that neither layout names are not used, even where an idle axis could make a reduction
    cheaper.

    Args:
        src: the layout at hand; its partial axes are reduced where `dst` does not have them partial too.
        dst: the layout wanted.
        global_shape: the global shape of the tensor.
        dtype: the dtype that is sent.
        mesh: names and sizes of the axes. Axes of size one cost nothing and are not mentioned.

    Raises:
        LayoutError: a layout does not fit the tensor or the mesh.

    >>> stored, compute = Layout.parse("vocab@(tp,fsdp) embed"), Layout.parse("vocab@tp embed")
    >>> for step in transition(stored, compute, (1024, 64), torch.float32, "fsdp=4,tp=2"):
    ...     print(step)
    all_gather(fsdp): 98304 bytes
    >>> for step in transition(Layout.parse("a b + sum@dp"), Layout.parse("a b"), (8, 8), torch.float32, "dp=4"):
    ...     print(step)
    all_reduce(dp): 384 bytes
    """
    return _transition(src, dst, tuple(global_shape), dtype, MeshShape.of(mesh))


@lru_cache(maxsize=65536)
def _transition(
    src: Layout, dst: Layout, global_shape: tuple[int, ...], dtype: torch.dtype, mesh: MeshShape
) -> tuple[Collective, ...]:
    single = [axis for axis, n in mesh.items() if n == 1]
    here = src.resolve(global_shape, mesh).with_axes_dropped(single)
    there = dst.resolve(global_shape, mesh).with_axes_dropped(single)
    steps = min(_routes(_Space(global_shape, mesh), here, there), key=_route_cost)
    sent = tuple(step.collective(dtype, mesh) for step in steps)
    copied = _copied(here, there, global_shape, dtype, mesh)
    return copied + sent if here.memory == "host" else sent + copied


def _copied(
    src: Layout, dst: Layout, global_shape: tuple[int, ...], dtype: torch.dtype, mesh: MeshShape
) -> tuple[Collective, ...]:
    """Return the copy between host and device, of the shard at the host end; collectives run on the device."""
    if src.memory == dst.memory:
        return ()
    on_host = src if src.memory == "host" else dst
    return (Collective("copy", (), on_host.local_bytes(global_shape, dtype, mesh)),)


_Position: TypeAlias = tuple[int, int]
"""The position of an axis in a tensor: (dim, number of shards of that dim that are more major than the axis)."""
_Positions: TypeAlias = Mapping[str, _Position]


@dataclass(frozen=True)
class _Step:
    kind: Kind
    axes: frozenset[str]
    elements: Fraction

    def collective(self, dtype: torch.dtype, mesh: MeshShape) -> Collective:
        ordered = tuple(axis for axis in mesh.names if axis in self.axes)
        return Collective(self.kind, ordered, math.ceil(self.elements * dtype.itemsize))


_Route: TypeAlias = list[_Step]


def _route_cost(route: _Route) -> tuple[Fraction, int]:
    return sum((step.elements for step in route), Fraction(0)), len(route)


def _routes(space: _Space, src: Layout, dst: Layout) -> Iterator[_Route]:
    """Iterate over the candidate routes: slice what can be sliced, reduce, then exchange what is still missing."""
    here, there = space.positions(src), space.positions(dst)
    fresh = [axis for axis, op in dst.partial.items() if src.partial.get(axis) != op]
    pending = {axis: op for axis, op in src.partial.items() if dst.partial.get(axis) != op}
    last = _free(fresh)
    if not pending:
        yield _exchange(space, here, there) + last
        return
    early = {axis: position for axis, position in there.items() if axis not in here and axis not in pending}
    sliced = space.add(here, early)
    for targets in product(*(_targets(space, axis, there) for axis in pending)):
        reduced = space.add(
            sliced, {axis: position for axis, position in zip(pending, targets, strict=True) if position}
        )
        reduction = _reduction(space, pending, sliced, reduced)
        yield _free(set(sliced) - set(here)) + reduction + _exchange(space, reduced, there) + last


def _targets(space: _Space, axis: str, there: _Positions) -> list[_Position | None]:
    """Return what an axis can be reduced into: every rank's copy (None), its position in `dst`, or the inside of some
    dim."""
    wanted = [there[axis]] if axis in there else []
    return [None, *wanted, *((dim, _INNERMOST) for dim in range(len(space.global_shape)))]


def _reduction(space: _Space, pending: Mapping[str, str], before: _Positions, after: _Positions) -> _Route:
    """Reduce-scatter the axes that split a dim afterwards, then all-reduce the others, one collective per operator."""
    steps, size = [], space.size(before)
    for scatter in (True, False):
        for op in sorted(set(pending.values())):
            axes = frozenset(axis for axis in pending if pending[axis] == op and (axis in after) is scatter)
            n = math.prod(space.mesh[axis] for axis in axes)
            if axes:
                sent = size * Fraction(n - 1, n)
                steps.append(_Step("reduce_scatter", axes, sent) if scatter else _Step("all_reduce", axes, 2 * sent))
                size = size / n if scatter else size
    return steps


def _exchange(space: _Space, here: _Positions, there: _Positions) -> _Route:
    """Send each rank the elements that it needs and does not hold."""
    split = {axis: position for axis, position in there.items() if axis not in here}
    moved = {axis for axis in here if axis in there and here[axis] != there[axis]}
    gathered = set(here) - set(there)
    sliced = space.add(here, split)
    if not moved and len(sliced) == len(here) + len(split):
        return _free(split) + _sent("all_gather", gathered, space.size(there) - space.size(sliced))
    missing = space.size(there) - space.overlap(here, there)
    if not missing:
        return _free([*split, *moved, *gathered])
    return _sent("all_to_all", moved | gathered, missing)


def _free(axes: Iterable[str]) -> _Route:
    return _sent("slice", axes, Fraction(0))


def _sent(kind: Kind, axes: Iterable[str], elements: Fraction) -> _Route:
    return [_Step(kind, frozenset(axes), elements)] if frozenset(axes) else []


_INNERMOST = 0
"""In a wished position: inside whatever splits the dim already."""


@dataclass(frozen=True)
class _Space:
    """Positions of axes on one tensor and one mesh, and the sets of elements that they select."""

    global_shape: tuple[int, ...]
    mesh: MeshShape

    def positions(self, layout: Layout) -> dict[str, _Position]:
        """Map each axis of a concrete layout to its position; equal positions select equal elements, however they are
        written."""
        found: dict[str, _Position] = {}
        for index, dim in enumerate(layout.dims):
            assert isinstance(dim, Dim)
            found |= {axis: (index, major) for axis, major in self._majors(dim)}
        return found

    def _majors(self, dim: Dim) -> Iterator[tuple[str, int]]:
        outer = 1
        for factor in dim.factors:
            major = outer
            for axis in factor.axes:
                yield axis, major
                major *= self.mesh[axis]
            outer *= factor.size or 1  # only a plain dim, or none, is without a size in a concrete layout

    def add(self, positions: _Positions, wishes: _Positions) -> dict[str, _Position]:
        """Add each wished position that is possible, that is, where its axis can split without moving other axes."""
        granted = dict(positions)
        for axis, (dim, major) in wishes.items():
            trial = {**granted, axis: (dim, major or self._inside(granted, dim))}
            granted = trial if self.dim_at(trial, dim) else granted
        return granted

    def _inside(self, positions: _Positions, dim: int) -> int:
        return max((major * self.mesh[axis] for axis, (at, major) in positions.items() if at == dim), default=1)

    def size(self, positions: _Positions) -> Fraction:
        """Return the elements per rank, averaged over ranks; exact for uneven splits too, which omit no element."""
        return Fraction(math.prod(self.global_shape), math.prod(self.mesh[axis] for axis in positions))

    def overlap(self, here: _Positions, there: _Positions) -> Fraction:
        """Return the number of elements that a rank holds under both, averaged over ranks."""
        axes = sorted({*here, *there})
        shared = np.ones([self.mesh[axis] for axis in axes], dtype=np.int64)
        for dim in range(len(self.global_shape)):
            shared = shared * self._dim_overlap(dim, here, there, axes)
        return Fraction(int(shared.sum()), shared.size)

    def _dim_overlap(self, dim: int, here: _Positions, there: _Positions, axes: Sequence[str]) -> np.ndarray:
        """Return the overlap in one dim, over the coordinates of `axes`; of length one over axes that do not split the
        dim."""
        old, new = self.dim_at(here, dim), self.dim_at(there, dim)
        assert old is not None and new is not None, "positions of a layout, and granted ones, are a dim"
        own = [axis for axis in axes if axis in old.axes + new.axes]
        if len(old.factors) == len(new.factors) == 1:
            (a, b), (c, d) = (self._ranges(each.axes, self.global_shape[dim], axes) for each in (old, new))
            return np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
        counts = [
            _common(*(dim_slices(d, self.global_shape[dim], self.mesh, coordinate) for d in (old, new)))
            for coordinate in self._coordinates(own)
        ]
        return np.array(counts).reshape([self.mesh[axis] if axis in own else 1 for axis in axes])

    def _ranges(self, split: Sequence[str], size: int, axes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of the interval of a dim that the ranks hold, over the coordinates of `axes`, where
        `split` divides it, outermost first, in chunks as torch.chunk makes them."""
        start, stop = np.zeros([1] * len(axes), np.int64), np.full([1] * len(axes), size, np.int64)
        for axis in split:
            count = self.mesh[axis]
            index = np.arange(count).reshape([count if each == axis else 1 for each in axes])
            chunk = -(-(stop - start) // count)
            start, stop = np.minimum(start + index * chunk, stop), np.minimum(start + (index + 1) * chunk, stop)
        return start, stop

    def _coordinates(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        for index in product(*(range(self.mesh[axis]) for axis in axes)):
            yield dict(zip(axes, index, strict=True))

    def dim_at(self, positions: _Positions, dim: int) -> Dim | None:
        """Return the dim that is split so, or None where the splits cross or do not divide."""
        size, passed = self.global_shape[dim], 1
        factors: list[Factor] = []
        axes: tuple[str, ...] = ()
        for major, axis in sorted((major, axis) for axis, (at, major) in positions.items() if at == dim):
            if major % passed:
                return None
            if major > passed:
                factors.append(Factor("_", axes, major // math.prod(f.size or 1 for f in factors)))
                axes = ()
            axes, passed = (*axes, axis), major * self.mesh[axis]
        if factors and size % passed:
            return None
        rest = size // math.prod(factor.size or 1 for factor in factors) if factors else None
        return Dim((*factors, Factor("_", axes, rest)))


def _common(some: Slices, others: Slices) -> int:
    """Count the elements that two ascending runs of slices share."""
    count, i, j = 0, 0, 0
    while i < len(some) and j < len(others):
        count += max(0, min(some[i].stop, others[j].stop) - max(some[i].start, others[j].start))
        i, j = (i + 1, j) if some[i].stop <= others[j].stop else (i, j + 1)
    return count
