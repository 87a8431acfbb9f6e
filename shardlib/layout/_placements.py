"""Conversion between layout dims and DTensor placements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardlib._mesh_shape import MeshShape
from shardlib.layout._dims import Dim, Dims, Factor
from shardlib.layout._fit import Problem

__all__ = ["dims_of", "partials_of", "placements_of", "problems"]

_Cut: TypeAlias = tuple[str, int, int]
"""One sharding of a dim over an axis: (axis, its size, split factor)."""


def _cuts_of(dim: Dim, mesh: MeshShape) -> tuple[_Cut, ...]:
    """Return the steps by which the mesh cuts a dim, one per splitting axis in mesh order. Axes of size one cut
    nothing.

    The split factor of an axis is the number of pieces, at the moment it is applied, that are more major than it.
    Write the dim as digits, the most major first: the axes of each factor, then what is left of that factor. Digits
    already consumed by an earlier mesh axis have local length one. So an axis counts, among the digits before it,
    factors divided by the axes already applied to them, and axes still to come. With heads@(tp,dp) on the mesh
    (dp, tp), dp is applied first, inside each of the tp pieces: split factor tp.
    """
    splitting = set(dim.axes)
    return tuple((axis, n, _split_factor(dim, axis, mesh)) for axis, n in mesh.items() if axis in splitting and n > 1)


def _split_factor(dim: Dim, axis: str, mesh: MeshShape) -> int:
    earlier = mesh.names[: mesh.names.index(axis)]
    return math.prod(_digits_before(dim, axis, earlier, mesh))


def _digits_before(dim: Dim, axis: str, earlier: tuple[str, ...], mesh: MeshShape) -> Iterator[int]:
    for factor in dim.factors:
        if axis in factor.axes:
            outer = factor.axes[: factor.axes.index(axis)]
            yield from (mesh[other] for other in outer if other not in earlier)
            return
        assert factor.size is not None, "sizes are known where they matter, _fit.mesh_problems sees to it"
        yield factor.size // math.prod(mesh[other] for other in factor.axes if other in earlier)


def placements_of(dims: Dims, partial: Mapping[str, str], mesh: MeshShape) -> tuple[Placement, ...]:
    """Return one placement per mesh axis, in mesh order. An axis of size one replicates, whatever the layout says."""
    found: dict[str, Placement] = {axis: Partial(op) for axis, op in partial.items() if mesh[axis] > 1}
    for index, dim in enumerate(dims):
        assert isinstance(dim, Dim), "the ellipsis is expanded before"
        found |= {axis: _shard(index, factor) for axis, _, factor in _cuts_of(dim, mesh)}
    return tuple(found.get(axis, Replicate()) for axis in mesh.names)


def _shard(index: int, factor: int) -> Placement:
    return Shard(index) if factor == 1 else _StridedShard(index, split_factor=factor)


def problems(placements: Sequence[Placement], mesh: MeshShape, ndim: int) -> Iterator[Problem]:
    """Iterate over what no layout can express in placements, except the order of their splits, which `dims_of`
    checks."""
    if len(placements) != len(mesh):
        yield f"{len(placements)} placements were given for {len(mesh)} axes", "Give one placement per mesh axis."
        return
    for axis, placement in zip(mesh.names, placements, strict=True):
        if type(placement) not in (Shard, _StridedShard, Replicate, Partial):
            yield (
                f'{placement!r} on axis "{axis}" is not a Shard, _StridedShard, Replicate or Partial',
                "Redistribute the tensor to one of these first.",
            )
        elif isinstance(placement, Shard | _StridedShard) and not -ndim <= placement.dim < ndim:
            yield f'dim {placement.dim} on axis "{axis}" is out of range', "Name one of the dims that the tensor has."


def partials_of(placements: Iterable[Placement], mesh: MeshShape) -> tuple[tuple[str, str], ...]:
    """Return the pairs (axis, reduction) of the partial placements."""
    pairs = zip(mesh.names, placements, strict=True)
    return tuple((axis, p.reduce_op) for axis, p in pairs if isinstance(p, Partial) and mesh[axis] > 1)


def dims_of(placements: Sequence[Placement], mesh: MeshShape, names: Sequence[str]) -> tuple[Dim, ...]:
    """Return the dims that have these placements; the last factor of a fused dim has no size yet.

    Raises:
        ValueError: a split does not fall on a boundary of the shards before it; the text is a short fact.
    """
    cuts: list[list[_Cut]] = [[] for _ in names]
    for (axis, n), placement in zip(mesh.items(), placements, strict=True):
        if n > 1 and isinstance(placement, Shard | _StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            cuts[placement.dim].append((axis, n, factor))
    return tuple(_dim_of(cuts[index], name) for index, name in enumerate(names))


def _dim_of(cuts: Iterable[_Cut], name: str) -> Dim:
    digits: list[_Digit] = [None]
    sizes: dict[str, int] = {}
    for axis, n, factor in cuts:
        sizes[axis] = n
        digits = _insert(digits, axis, n, factor)
    return Dim(tuple(_factors(digits, sizes, name)))


_Digit: TypeAlias = int | str | None
"""A digit of a dim: a number of shards that a rank holds (None: all that is left), or an axis, of local length one."""


def _insert(digits: list[_Digit], axis: str, n: int, factor: int) -> list[_Digit]:
    """Insert an axis into the digits so that `factor` local pieces are more major than it."""
    passed = 1
    for at, digit in enumerate(digits):
        if isinstance(digit, str):
            continue
        if digit is None or factor < passed * digit:
            return digits[:at] + _cut(digit, axis, n, factor, passed) + digits[at + 1 :]
        passed *= digit
    raise AssertionError("the last digit is open")


def _cut(digit: int | None, axis: str, n: int, factor: int, passed: int) -> list[_Digit]:
    outer, rest = divmod(factor, passed)
    if rest or (digit is not None and digit % (outer * n)):
        raise ValueError(f'axis "{axis}" (split factor {factor}) does not fall on a boundary of the shards before it')
    inner = None if digit is None else digit // (outer * n)
    return [piece for piece in (outer, axis, inner) if piece != 1]


def _factors(digits: Iterable[_Digit], sizes: Mapping[str, int], name: str) -> Iterator[Factor]:
    """Group digits into factors: the axes that precede a digit split the factor that it belongs to."""
    axes: tuple[str, ...] = ()
    for digit in digits:
        if isinstance(digit, str):
            axes += (digit,)
            continue
        if digit is None:
            yield Factor(name, axes)
        elif axes:
            yield Factor("_", axes, digit * math.prod(sizes[axis] for axis in axes))
        else:
            yield Factor(str(digit), (), digit)
        axes = ()
