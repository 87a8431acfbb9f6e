"""Which elements of a global tensor one rank holds.

A dim is cut one mesh axis after another, in mesh order, exactly as DTensor applies placements: an axis of n ranks with
split factor f chunks what the rank holds so far into f pieces, chunks every piece into n, and keeps one part of each
(f = 1 is plain `torch.chunk`). So nested uneven splits come out as DTensor's: 6 elements over 2 x 2 are [2, 1, 2, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

__all__ = ["Cut", "Slices", "cut_slices", "slice_length"]

Slices: TypeAlias = tuple[slice, ...]
Cut: TypeAlias = tuple[str, int, int]
"""How one axis cuts a dim: (axis, its size, split factor)."""

_Range: TypeAlias = tuple[int, int]


def cut_slices(size: int, cuts: Sequence[Cut], coordinate: Mapping[str, int]) -> Slices:
    """The elements of a dim that the rank at `coordinate` holds, as slices in local order; never an empty tuple.

    >>> [cut_slices(6, [("dp", 2, 1), ("tp", 2, 1)], {"dp": d, "tp": t}) for d in (0, 1) for t in (0, 1)]
    [(slice(0, 2, None),), (slice(2, 3, None),), (slice(3, 5, None),), (slice(5, 6, None),)]
    >>> cut_slices(12, [("tp", 2, 3)], {"tp": 1})
    (slice(2, 4, None), slice(6, 8, None), slice(10, 12, None))
    """
    return _slices(size, tuple((n, factor, coordinate[axis]) for axis, n, factor in cuts))


def slice_length(slices: Slices) -> int:
    """How many elements the slices of one dim hold together."""
    return sum(part.stop - part.start for part in slices)


@lru_cache(maxsize=65536)
def _slices(size: int, steps: tuple[tuple[int, int, int], ...]) -> Slices:
    ranges = [(0, size)]
    for n, factor, index in steps:
        ranges = _part(ranges, n, factor, index)
    return tuple(slice(*r) for r in ranges) or (slice(0, 0),)


def _part(ranges: list[_Range], n: int, factor: int, index: int) -> list[_Range]:
    """Part `index` of n of each of `factor` equal pieces, joined."""
    total = _length(ranges)
    piece = math.ceil(total / factor)
    kept: list[_Range] = []
    for start in range(0, total, piece or 1):
        held = min(piece, total - start)
        chunk = math.ceil(held / n)
        _append(kept, _window(ranges, start + min(index * chunk, held), start + min((index + 1) * chunk, held)))
    return kept


def _window(ranges: list[_Range], start: int, stop: int) -> list[_Range]:
    """The elements number `start` to `stop` of those that the ranges hold."""
    window, passed = [], 0
    for low, high in ranges:
        window.append((max(low, low + start - passed), min(high, low + stop - passed)))
        passed += high - low
    return [(low, high) for low, high in window if low < high]


def _append(ranges: list[_Range], more: list[_Range]) -> None:
    for low, high in more:
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))


def _length(ranges: list[_Range]) -> int:
    return sum(high - low for low, high in ranges)
