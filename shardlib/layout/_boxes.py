"""Boxes: parts of a tensor that are one interval in every dim. Arithmetic; nothing is sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardlib._mesh_shape import MeshShape
from shardlib.layout._layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["Box", "Part", "full_box", "parts", "tiles"]


@dataclass(frozen=True)
class Box:
    """An interval in every dim of a tensor, as offsets and sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def meet(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None.

        >>> Box((0, 0), (4, 4)).meet(Box((2, 3), (9, 9)))
        Box(offsets=(2, 3), sizes=(2, 1))
        """
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(a + n for a, n in zip(self.offsets, self.sizes, strict=True))
        top = tuple(a + n for a, n in zip(other.offsets, other.sizes, strict=True))
        sizes = tuple(min(h, t) - at for h, t, at in zip(high, top, low, strict=True))
        return Box(low, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """Return the same box with offsets relative to `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and its box in the local tensor of a rank that holds it."""

    box: Box
    local: Box

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the values of the box from the local tensor."""
        values = local[self.local.slices]
        return values if self.box.numel else values.reshape(self.box.sizes)  # of no elements, whose split is lost


def full_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def parts(layout: Layout, shape: Sequence[int], mesh: MeshShape, coordinate: Mapping[str, int]) -> list[Part]:
    """Return the non-empty boxes that the rank at a coordinate holds: several where a fused dim is split inside.

    >>> layout = Layout.parse("(qkv heads@tp)", sizes={"qkv": 2, "heads": 2})
    >>> [(part.box.offsets, part.local.offsets) for part in parts(layout, (4,), MeshShape("tp=2"), {"tp": 1})]
    [((1,), (0,)), ((3,), (1,))]
    """
    found = []
    for chosen in itertools.product(*map(_intervals, layout.local_slices(shape, mesh, coordinate))):
        sizes = tuple(size for _, size, _ in chosen)
        if all(sizes):
            found.append(
                Part(Box(tuple(at for at, _, _ in chosen), sizes), Box(tuple(at for _, _, at in chosen), sizes))
            )
    return found


def _intervals(slices: Sequence[slice]) -> Iterator[tuple[int, int, int]]:
    at = 0
    for piece in slices:
        yield piece.start, piece.stop - piece.start, at
        at += piece.stop - piece.start


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Return why boxes do not cover a tensor exactly once, or None if they do. Boxes must form a grid, as layouts do.

    >>> tiles([Box((0,), (2,)), Box((2,), (1,))], (3,))
    >>> tiles([Box((0,), (2,))], (3,))
    'elements from 2 to 3 of dim 0 are in no shard'
    """
    if math.prod(shape) == 0:
        return None if all(box == full_box(shape) for box in boxes) else "shards of an empty tensor that are not empty"
    cells = 1
    for dim, size in enumerate(shape):
        intervals = sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes})
        end = 0
        for start, length in intervals:
            if start < end or length <= 0:
                return f"shards overlap in dim {dim}"
            if start > end:
                return f"elements from {end} to {start} of dim {dim} are in no shard"
            end = start + length
        if end > size:
            return f"shards reach to {end} in dim {dim}, which has size {size}"
        if end != size:
            return f"elements from {end} to {size} of dim {dim} are in no shard"
        cells *= len(intervals)
    if len(set(boxes)) != len(boxes):
        return "a shard is given twice"
    return None if cells == len(boxes) else f"{cells - len(boxes)} shards of {cells} are missing"
