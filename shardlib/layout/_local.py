"""The elements of a global tensor that one rank holds.

The axes of a factor cut it one after another, outermost first, each as `torch.chunk` does: chunks of ceil(size / n),
the last ones shorter or empty. So a rank holds one interval of every factor, 6 elements over 2 x 2 are [2, 1, 2, 1]
(one flat split over 4 would be [2, 2, 2, 0]), and a fused dim is the product of its factors' intervals.

DTensor agrees, wherever DTensor agrees with itself. On uneven dims whose axes come in another order than the mesh's,
`distribute_tensor` cuts in mesh order, but `redistribute` and `full_tensor` cut outermost first as we do (seen in torch
2.13; the mixture can hang). Outermost first is also what lets one axis be gathered while the outer ones stay split.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shardlib._mesh_shape import MeshShape
from shardlib.layout._dims import Dim

if TYPE_CHECKING:
    import torch

__all__ = ["Slices", "dim_slices", "intervals", "joined", "put_shard", "replica_id", "runs"]

Slices: TypeAlias = tuple[slice, ...]
_Range: TypeAlias = tuple[int, int]
K = TypeVar("K")  # names of axes, or their numbers


def replica_id(split: Container[K], mesh: Mapping[K, int], coordinate: Mapping[K, int]) -> int:
    """Return the index of a rank among those that hold the same shard of a tensor that some axes split."""
    index = 0
    for axis, size in mesh.items():
        if axis not in split:
            index = index * size + coordinate[axis]
    return index


def intervals(dim: Dim, size: int, mesh: MeshShape, coordinate: Mapping[str, int]) -> tuple[_Range, ...]:
    """Return the interval [start, stop) of each factor that the rank at `coordinate` holds of a dim of global size
    `size`."""
    return tuple(
        _nested_chunk(
            size if factor.size is None else factor.size,
            tuple((mesh[axis], coordinate[axis]) for axis in factor.axes),
        )
        for factor in dim.factors
    )


def dim_slices(dim: Dim, size: int, mesh: MeshShape, coordinate: Mapping[str, int]) -> Slices:
    """Return the elements of a dim that the rank at `coordinate` holds, as slices in local order; never an empty
    tuple."""
    ranges = intervals(dim, size, mesh, coordinate)
    sizes = tuple(size if factor.size is None else factor.size for factor in dim.factors)
    return _product(ranges, sizes)


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return tensors one after another along a dim."""
    import torch

    return torch.cat(list(parts), dim)


def put_shard(full: torch.Tensor, slices: tuple[Slices, ...], shard: torch.Tensor) -> None:
    """Copy a local shard into the elements of the global tensor that it holds, dim by dim as `dim_slices`."""
    for chosen in product(*map(runs, slices)):
        full[tuple(there for there, _ in chosen)] = shard[tuple(here for _, here in chosen)]


def runs(slices: Slices) -> Iterator[tuple[slice, slice]]:
    """Iterate over the slices of a dim that a rank holds, each with the slice of the rank's own part that it is."""
    done = 0
    for part in slices:
        size = part.stop - part.start
        yield part, slice(done, done + size)
        done += size


@lru_cache(maxsize=65536)
def _nested_chunk(size: int, cuts: tuple[tuple[int, int], ...]) -> _Range:
    start, length = 0, size
    for n, index in cuts:
        chunk = math.ceil(length / n)
        first = min(index * chunk, length)
        start, length = start + first, min(chunk, length - first)
    return start, start + length


@lru_cache(maxsize=65536)
def _product(ranges: tuple[_Range, ...], sizes: tuple[int, ...]) -> Slices:
    """Return the elements of a product of intervals, the most minor factor last, as contiguous slices."""
    runs, block = [(0, 1)], 1
    for (start, stop), size in zip(reversed(ranges), reversed(sizes), strict=True):
        if runs == [(0, block)]:
            runs = [(start * block, stop * block)]
        else:
            runs = [(at * block + low, at * block + high) for at in range(start, stop) for low, high in runs]
        block *= size
    return tuple(slice(low, high) for low, high in runs if low < high) or (slice(0, 0),)
