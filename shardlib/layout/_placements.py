"""Layout dims to DTensor placements, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardlib._mesh import MeshShape
from shardlib.layout._dims import Dim, Dims
from shardlib.layout._local import Cut

__all__ = ["cuts_of_dim", "placements_of"]


@lru_cache(maxsize=65536)
def cuts_of_dim(dim: Dim, mesh: MeshShape) -> tuple[Cut, ...]:
    """How the mesh cuts a dim, one step per splitting axis in mesh order. Axes of size one cut nothing.

    The split factor of an axis is the number of pieces, at the moment it is applied, that are more major than it.
    Write the dim as digits, the most major first: the axes of each factor, then what is left of that factor. Digits
    already consumed by an earlier mesh axis have local length one. So an axis counts, among the digits before it,
    factors divided by the axes already applied to them, and axes still to come. With heads@(tp,dp) on the mesh
    (dp, tp), dp is applied first, inside each of the tp pieces: split factor tp.
    """
    held = set(dim.axes)
    return tuple((axis, n, _split_factor(dim, axis, mesh)) for axis, n in mesh.items() if axis in held and n > 1)


def _split_factor(dim: Dim, axis: str, mesh: MeshShape) -> int:
    earlier = mesh.names[: mesh.names.index(axis)]
    return math.prod(_digits_before(dim, axis, earlier, mesh))


def _digits_before(dim: Dim, axis: str, earlier: tuple[str, ...], mesh: MeshShape) -> Iterator[int]:
    for factor in dim.factors:
        if axis in factor.axes:
            outer = factor.axes[: factor.axes.index(axis)]
            yield from (mesh[other] for other in outer if other not in earlier)
            return
        assert factor.size is not None, "factor sizes are checked by Layout before"
        yield factor.size // math.prod(mesh[other] for other in factor.axes if other in earlier)


def placements_of(dims: Dims, partial: dict[str, str], mesh: MeshShape) -> tuple[Placement, ...]:
    """One placement per mesh axis, in mesh order. An axis of size one replicates, whatever it was to do."""
    found: dict[str, Placement] = {axis: Partial(op) for axis, op in partial.items() if mesh[axis] > 1}
    for index, dim in enumerate(dims):
        assert isinstance(dim, Dim), "the ellipsis is expanded before"
        found |= {axis: _shard(index, factor) for axis, _, factor in cuts_of_dim(dim, mesh)}
    return tuple(found.get(axis, Replicate()) for axis in mesh.names)


def _shard(index: int, factor: int) -> Placement:
    return Shard(index) if factor == 1 else _StridedShard(index, split_factor=factor)
