"""Division of a local shard among the ranks of the axes that a finer layout adds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING

from shardlib._mesh_shape import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout._layout import Layout
from shardlib.layout._local import Slices, joined, runs

if TYPE_CHECKING:
    import torch

__all__ = ["ShardSpec", "shard_spec"]


@dataclass(frozen=True)
class ShardSpec:
    """A local tensor, and the part of it that each rank of a group gets.

    Attributes:
        shape: the local shape that is divided.
        dim: the dim that is divided.
        parts: for each rank of the group, in rank order, its slices of that dim; several of a fused one.

    >>> src, dst = Layout.parse("out@tp in"), Layout.parse("out@(tp,dp) in")
    >>> rows = shard_spec(src, dst, (8, 3), "dp=2,tp=2", {"dp": 0, "tp": 1})
    >>> rows.shape, rows.parts, rows.shard_shape(1)
    ((4, 3), ((slice(0, 2, None),), (slice(2, 4, None),)), (2, 3))
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Slices, ...]

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return self._part_shapes[rank]

    @cached_property
    def _part_shapes(self) -> tuple[tuple[int, ...], ...]:
        sizes = (sum(part.stop - part.start for part in parts) for parts in self.parts)
        return tuple((*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]) for size in sizes)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """The number of elements of each rank's part."""
        return tuple(map(math.prod, self._part_shapes))

    @cached_property
    def even(self) -> bool:
        return len(set(self.numels)) == 1

    @cached_property
    def in_runs(self) -> bool:
        """Whether the parts of a contiguous tensor are contiguous runs of its memory, in rank order."""
        outer = math.prod(self.shape[: self.dim]) == 1
        ends = [0, *(part.stop for parts in self.parts for part in parts)]
        starts = [part.start for parts in self.parts for part in parts]
        single = all(len(parts) == 1 for parts in self.parts)
        return outer and single and starts == ends[:-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each rank's run in memory, in elements; only for parts in runs."""
        return tuple(accumulate(self.numels[:-1], initial=0))

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part: a view where it is one slice, else a copy."""
        parts = [tensor.narrow(self.dim, part.start, part.stop - part.start) for part in self.parts[rank]]
        return parts[0] if len(parts) == 1 else joined(parts, self.dim)

    def places(self, tensor: torch.Tensor, rank: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Iterate over the views of `tensor` that a rank's part fills, each with its slice of that part along `dim`."""
        for part, chosen in runs(self.parts[rank]):
            yield tensor.narrow(self.dim, part.start, part.stop - part.start), chosen

    def put(self, tensor: torch.Tensor, rank: int, part: torch.Tensor) -> None:
        """Copy a rank's part into `tensor`."""
        for view, chosen in self.places(tensor, rank):
            view.copy_(part.narrow(self.dim, chosen.start, chosen.stop - chosen.start))


def shard_spec(
    src: Layout,
    dst: Layout,
    global_shape: Sequence[int],
    mesh: MeshShape | str,
    coordinate: Mapping[str, int],
) -> ShardSpec | None:
    """Divide the shard that a rank holds under `src` among the ranks of the axes that `dst` adds.

    Args:
        src: the layout of the shard.
        dst: a layout that shards one dim further.
        global_shape: the global shape of the tensor.
        mesh: names and sizes of the axes.
        coordinate: the rank's coordinate. Ranks of the group are in mesh order of the added axes, the last one fastest.

    Returns:
        The division, or None where `dst` shards no dim further.

    Raises:
        LayoutError: `dst` shards more than one dim further, or elements that the rank does not hold.
    """
    return _shard_spec(src, dst, tuple(global_shape), MeshShape.of(mesh), tuple(coordinate.items()))


@lru_cache(maxsize=65536)
def _shard_spec(
    src: Layout,
    dst: Layout,
    global_shape: tuple[int, ...],
    mesh: MeshShape,
    coordinate: tuple[tuple[str, int], ...],
) -> ShardSpec | None:
    added = [axis for axis, size in mesh.items() if size > 1 and axis in dst.axes - src.axes]
    if not added:
        return None
    at = dict(coordinate)
    ranks = [{**at, **dict(zip(added, index, strict=True))} for index in product(*(range(mesh[a]) for a in added))]
    local_slices = src.local_slices(global_shape, mesh, at)
    given = [dst.local_slices(global_shape, mesh, rank) for rank in ranks]
    changed = [dim for dim, slices in enumerate(local_slices) if any(part[dim] != slices for part in given)]
    local = tuple(sum(part.stop - part.start for part in slices) for slices in local_slices)
    if len(changed) > 1:
        raise LayoutError(
            f'Layout "{dst}" shards {len(changed)} dims of a tensor of global shape {global_shape} further than '
            f'"{src}" does; the axes {", ".join(added)} have to shard one dim of it.'
        )
    if not changed:
        return None
    dim = changed[0]
    parts: list[Slices] = []
    for part in given:
        end = parts[-1][-1].stop if parts else 0
        parts.append(tuple(_inside(local_slices[dim], part[dim], src, dst)) or (slice(end, end),))
    return ShardSpec(local, dim, tuple(parts))


def _inside(local_slices: Slices, wanted: Slices, src: Layout, dst: Layout) -> Iterator[slice]:
    """Iterate over `wanted`, given in the global dim, as slices of the local dim; an empty part yields nothing."""
    offsets = list(accumulate((part.stop - part.start for part in local_slices), initial=0))
    for piece in (piece for piece in wanted if piece.stop > piece.start):
        for part, offset in zip(local_slices, offsets, strict=False):
            if part.start <= piece.start and piece.stop <= part.stop:
                yield slice(offset + piece.start - part.start, offset + piece.stop - part.start)
                break
        else:
            raise LayoutError(
                f'Under layout "{dst}" a rank has elements of the tensor that it does not have under "{src}". Add the '
                "axes innermost, as in out@(tp,dp)."
            )
