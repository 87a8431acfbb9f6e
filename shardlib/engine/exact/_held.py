"""Which elements of a global tensor a local one holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardlib.engine import _torch
from shardlib.engine._torch import _StridedShard

__all__ = ["Held", "held_by", "is_cut_so"]

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Held:
    """The product of what is held of each dim: intervals [start, stop) of a global tensor of that shape, in order."""

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int]) -> Held:
        """The whole tensor.

        >>> Held.all_of((2, 3))
        Held(shape=(2, 3), runs=(((0, 2),), ((0, 3),)))
        """
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    def block_of(self, dim: int, index: int, count: int) -> Held:
        """The same, where this tensor is the block `index` of `count` equal ones, side by side on a dim.

        >>> Held.all_of((2, 3)).block_of(0, 1, 4)
        Held(shape=(8, 3), runs=(((2, 4),), ((0, 3),)))
        """
        size = self.shape[dim]
        moved = tuple((start + index * size, stop + index * size) for start, stop in self.runs[dim])
        return Held(
            (*self.shape[:dim], size * count, *self.shape[dim + 1 :]),
            (*self.runs[:dim], moved, *self.runs[dim + 1 :]),
        )

    def blocks(self) -> tuple[Sequence[int], int]:
        """Runs of neighbouring elements in row-major order: the global index of each one's first, and their length.

        >>> Held((4, 6), (((0, 4),), ((2, 4),))).blocks()
        ([2, 8, 14, 20], 2)
        >>> Held((4, 6), (((2, 4),), ((0, 6),))).blocks()
        ([12], 12)
        """
        return _blocks(self)

    def flat(self) -> list[int]:
        """As plain numbers, for an op's argument: for each dim how many runs, then the runs."""
        return [n for runs in self.runs for n in (len(runs), *itertools.chain.from_iterable(runs))]

    @classmethod
    def from_flat(cls, shape: Sequence[int], numbers: Sequence[int]) -> Held:
        """The undoing of `flat`.

        >>> held = Held((4, 6), (((0, 4),), ((0, 1), (3, 4))))
        >>> Held.from_flat((4, 6), held.flat()) == held
        True
        """
        return cls(tuple(shape), tuple(_unflatten(iter(numbers))))


def _unflatten(numbers: Iterator[int]) -> Iterator[Runs]:
    for count in numbers:
        yield tuple((next(numbers), next(numbers)) for _ in range(count))


@lru_cache(maxsize=256)
def _blocks(held: Held) -> tuple[Sequence[int], int]:
    inner, cut, strides = 1, len(held.shape), _strides(held.shape)
    while cut and held.runs[cut - 1] == ((0, held.shape[cut - 1]),):
        cut -= 1
        inner *= held.shape[cut]
    start = 0
    if cut and len(held.runs[cut - 1]) == 1:
        cut -= 1
        first, stop = held.runs[cut][0]
        start = first * strides[cut]
        inner *= stop - first
    starts = torch.tensor([start])
    for dim in reversed(range(cut)):
        places = torch.tensor(_places(held.runs[dim]), dtype=torch.int64)
        starts = (places.unsqueeze(1) * strides[dim] + starts).flatten()
    return starts.tolist(), inner


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@_torch.cached_by_mesh
def held_by(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Held:
    """What this rank holds of a DTensor. One axis of the mesh after the other cuts what those before it left."""
    runs: list[Runs] = [((0, size),) for size in shape]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for index, count, placement in zip(coordinate, mesh.shape, placements, strict=True):
        for dim in range(len(shape)):
            if _torch.splits(placement, dim):
                runs[dim] = _cut(runs[dim], index, count, _factor(placement))
    return Held(shape, tuple(runs))


def is_cut_so(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], slices: Sequence[Sequence[slice]]
) -> bool:
    """Whether this rank holds these slices of a DTensor: layouts and DTensor differ on some uneven splits."""
    runs = held_by(shape, mesh, placements).runs
    return [_places(held) for held in runs] == [_places([(s.start, s.stop) for s in each]) for each in slices]


def _places(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [place for run in runs for place in range(*run)]


def _factor(placement: Any) -> int:
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _cut(runs: Runs, index: int, count: int, factor: int) -> Runs:
    """One of `count` parts of what is held; inside each of `factor` equal pieces of it, for a fused split.

    >>> _cut(((0, 12),), 1, 2, factor=3), _cut(((0, 7),), 2, 3, factor=1)
    (((2, 4), (6, 8), (10, 12)), ((6, 7),))
    """
    size = sum(stop - start for start, stop in runs)
    piece = size // factor
    chunk = -(-piece // count)
    low = min(index * chunk, piece)
    high = min(low + chunk, piece)
    return tuple(run for i in range(factor) for run in _between(runs, i * piece + low, i * piece + high))


def _between(runs: Runs, low: int, high: int) -> Iterator[tuple[int, int]]:
    """What stands at the places [low, high) of all that the runs hold."""
    at = 0
    for start, stop in runs:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            yield start + first, start + last
        at += stop - start
