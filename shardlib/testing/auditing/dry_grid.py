"""Axes of a mesh, in the parts into which foreign code divides them.

Code that makes its own mesh may split an axis of ours: HSDP of 4 by 8 ranks runs on "dp=32". A part of an axis is a
digit of a rank's coordinate on it. What differs over one part of an axis is then told apart from what differs over the
other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from shardlib._mesh_shape import MeshShape

__all__ = ["NOTHING", "Grid", "Part", "Parts"]


@dataclass(frozen=True)
class Part:
    """The digit `coordinate % high // low` of a rank's coordinate on an axis."""

    axis: str
    low: int
    high: int


Parts = frozenset[Part]
NOTHING: Parts = frozenset()


class Grid:
    """The parts of a mesh's axes of several ranks, as some groups of ranks divide them.

    >>> grid = Grid(MeshShape("dp=8,tp=2"), [(0, 4), (0, 1)])
    >>> [len(grid.of_axes([axis])) for axis in ("dp", "tp")], grid.axes(grid.of_ranks((0, 4)))
    ([3, 1], ('dp',))
    >>> grid.of_ranks((0, 2, 4)) == grid.of_ranks((0, 3))  # neither is a group along the axes
    True
    """

    def __init__(self, mesh: MeshShape, groups: Iterable[tuple[int, ...]] = ()) -> None:
        self.mesh = mesh
        strides: dict[str, set[int]] = {axis: set() for axis in mesh.names}
        for ranks in groups:
            coordinates = [mesh.coordinate(rank) for rank in ranks]
            for axis in mesh.names:
                strides[axis] |= _divisions(sorted({each[axis] for each in coordinates}))
        self._parts = {axis: _parts(axis, mesh[axis], strides[axis]) for axis in mesh.names}
        self.of_ranks = lru_cache(maxsize=None)(self._of_ranks)

    @cached_property
    def all(self) -> Parts:
        """All parts of all axes of several ranks."""
        return self.of_axes(self.mesh.names)

    def of_axes(self, axes: Iterable[str]) -> Parts:
        """Return all parts of some axes."""
        return frozenset(part for axis in axes for part in self._parts[axis])

    def axes(self, parts: Parts) -> tuple[str, ...]:
        """Return the axes of some parts, in the order of the mesh."""
        found = {part.axis for part in parts}
        return tuple(axis for axis in self.mesh.names if axis in found)

    def whole_axes(self, parts: Parts) -> tuple[str, ...]:
        """Return the axes of several ranks of which all parts are among these."""
        return tuple(axis for axis in self.axes(parts) if parts.issuperset(self._parts[axis]))

    def _of_ranks(self, ranks: tuple[int, ...]) -> Parts:
        """Return the parts that a group of ranks goes along; nothing for one that does not follow the parts."""
        coordinates = [self.mesh.coordinate(rank) for rank in ranks]
        found = frozenset(
            part for part in self.all if len({each[part.axis] % part.high // part.low for each in coordinates}) > 1
        )
        return found if math.prod(part.high // part.low for part in found) == len(ranks) else NOTHING


def _divisions(places: list[int]) -> set[int]:
    """Return where a group that has these places on an axis divides it: every t-th place, n of them."""
    if len(places) < 2:
        return set()
    step = places[1] - places[0]
    return {step, step * len(places)} if places == list(range(places[0], places[-1] + 1, step)) else set()


def _parts(axis: str, size: int, divisions: set[int]) -> tuple[Part, ...]:
    bounds = [1]
    for each in sorted({*divisions, size}):
        if each > bounds[-1] and each % bounds[-1] == 0 and size % each == 0:
            bounds.append(each)
    return tuple(Part(axis, low, high) for low, high in pairwise(bounds))
