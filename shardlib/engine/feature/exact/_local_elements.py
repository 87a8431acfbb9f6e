"""The elements of a global tensor that a local tensor has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardlib.engine import _torch

__all__ = ["LocalElements", "blocks_of", "holds_slices", "local_elements"]

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LocalElements:
    """A product of local indices per dim: ordered intervals [start, stop) of a global tensor of that shape."""

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> LocalElements:
        """Return all elements of a tensor.

        >>> LocalElements.all_of((2, 3))
        LocalElements(shape=(2, 3), runs=(((0, 2),), ((0, 3),)))
        """
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    def block_of(self, dim: int, index: int, count: int) -> LocalElements:
        """Return these elements in a larger tensor, of whose `count` equal blocks on a dim this is block `index`.

        >>> LocalElements.all_of((2, 3)).block_of(0, 1, 4)
        LocalElements(shape=(8, 3), runs=(((2, 4),), ((0, 3),)))
        """
        size = self.shape[dim]
        moved = tuple((start + index * size, stop + index * size) for start, stop in self.runs[dim])
        return LocalElements(
            (*self.shape[:dim], size * count, *self.shape[dim + 1 :]),
            (*self.runs[:dim], moved, *self.runs[dim + 1 :]),
        )

    def flat(self) -> list[int]:
        """Encode as a list of integers, for an op's argument: for each dim the number of runs, then the runs."""
        return [n for runs in self.runs for n in (len(runs), *itertools.chain.from_iterable(runs))]

    @classmethod
    def from_flat(cls, shape: Sequence[int], numbers: Sequence[int]) -> LocalElements:
        """Decode the result of `flat`.

        >>> elements = LocalElements((4, 6), (((0, 4),), ((0, 1), (3, 4))))
        >>> LocalElements.from_flat((4, 6), elements.flat()) == elements
        True
        """
        return cls(tuple(shape), tuple(_unflatten(iter(numbers))))


def _unflatten(numbers: Iterator[int]) -> Iterator[Runs]:
    for count in numbers:
        yield tuple((next(numbers), next(numbers)) for _ in range(count))


@lru_cache(maxsize=256)
def blocks_of(elements: LocalElements) -> tuple[Sequence[int], int]:
    """Return runs of adjacent elements in row-major order: the global index of the start of each, and their length.

    >>> blocks_of(LocalElements((4, 6), (((0, 4),), ((2, 4),))))
    ([2, 8, 14, 20], 2)
    >>> blocks_of(LocalElements((4, 6), (((2, 4),), ((0, 6),))))
    ([12], 12)
    """
    inner, cut = 1, len(elements.shape)
    strides = [math.prod(elements.shape[dim + 1 :]) for dim in range(cut)]
    while cut and elements.runs[cut - 1] == ((0, elements.shape[cut - 1]),):
        cut -= 1
        inner *= elements.shape[cut]
    start = 0
    if cut and len(elements.runs[cut - 1]) == 1:
        cut -= 1
        first, stop = elements.runs[cut][0]
        start = first * strides[cut]
        inner *= stop - first
    starts = torch.tensor([start])
    for dim in reversed(range(cut)):
        indices = torch.tensor(_indices(elements.runs[dim]), dtype=torch.int64)
        starts = (indices.unsqueeze(1) * strides[dim] + starts).flatten()
    return starts.tolist(), inner


@_torch.cached_by_mesh
def local_elements(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> LocalElements:
    """Return this rank's elements of a DTensor. Each mesh axis splits the elements that the axes before it leave."""
    runs: list[Runs] = [((0, size),) for size in shape]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for index, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        for dim in range(len(shape)):
            if _torch.splits(placement, dim):
                runs[dim] = _cut(runs[dim], index, count, _torch.split_factor(placement))
    return LocalElements(shape, tuple(runs))


def holds_slices(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], slices: Sequence[Sequence[slice]]
) -> bool:
    """Tell whether this rank has these slices of a DTensor: layouts and DTensor differ on some uneven splits."""
    runs = local_elements(shape, mesh, placements).runs
    return [_indices(of_dim) for of_dim in runs] == [_indices([(s.start, s.stop) for s in each]) for each in slices]


def _indices(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [index for run in runs for index in range(*run)]


def _cut(runs: Runs, index: int, count: int, factor: int) -> Runs:
    """Return one of `count` chunks of some runs; for a fused split, of each of `factor` pieces of them.

    >>> _cut(((0, 12),), 1, 2, factor=3), _cut(((0, 7),), 2, 3, factor=1), _cut(((0, 7),), 1, 2, factor=2)
    (((2, 4), (6, 8), (10, 12)), ((6, 7),), ((2, 4), (6, 7)))
    """
    size = sum(stop - start for start, stop in runs)
    chunks = _torch.chunks_of(size, count, index, factor)
    return tuple(run for start, length in chunks for run in _between(runs, start, start + length))


def _between(runs: Runs, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the indices at positions [low, high) of the concatenated runs."""
    at = 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            yield start + first, start + last
        at += stop - start
