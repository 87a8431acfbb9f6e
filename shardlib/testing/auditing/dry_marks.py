"""Over which axes of a mesh a tensor differs from rank to rank, for tensors that share storages.

A mark says of a range of bytes that ranks of an axis may hold different values there. What has no mark is the same on
every rank. Marks belong to the storage, so that all views of it agree. The part that a rank cuts out of a tensor that
is the same everywhere differs from rank to rank, though the bytes do not: such a view has a mark of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from shardlib.engine import _torch
from shardlib.testing.auditing.dry_grid import NOTHING, Part, Parts

__all__ = ["Marks", "Sum"]

Range = tuple[int, int, Parts]


class Sum(NamedTuple):
    """A note on what a tensor is instead of a sum over a part of an axis, and what left it so.

    The sum is still to be done, or one rank alone has it, or it is lost: what differed is alike, and was not summed.
    """

    state: Literal["pending", "on one rank", "lost"]
    by: str


class _Held:
    """The marks of one storage: those of ranges of its bytes, which do not overlap, and those of single views."""

    __slots__ = ("ranges", "ref", "sums", "views")

    def __init__(self) -> None:
        self.ref: Any = None
        self.ranges: list[Range] = []
        self.views: dict[Hashable, Parts] = {}
        self.sums: Mapping[Part, Sum] = {}


class Marks:
    """The marks of all storages that are alive.

    >>> from shardlib import MeshShape
    >>> from shardlib.testing.auditing.dry_grid import Grid
    >>> tp = Grid(MeshShape("tp=2")).all
    >>> marks, whole = Marks(), torch.zeros(4, 2)
    >>> marks.write(whole[:1], tp)
    >>> marks.read(whole) == tp, marks.read(whole[1:]) == tp
    (True, False)
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def read(self, tensor: torch.Tensor) -> Parts:
        """Return the axes over which a tensor differs."""
        held = self._held.get(id(_torch.storage_of(tensor)))
        if held is None:
            return NOTHING
        found = held.views.get(_view(tensor), NOTHING) if held.views else NOTHING
        if held.ranges:
            start, end = _extent(tensor)
            found = found.union(*(axes for first, last, axes in held.ranges if first < end and start < last))
        return found

    def write(self, tensor: torch.Tensor, axes: Parts) -> None:
        """Note what has been written to a tensor. One with gaps keeps its old marks too."""
        start, end = _extent(tensor)
        if end - start > tensor.numel() * tensor.element_size():
            axes |= self.read(tensor)
        self._put(tensor, start, end, axes)

    def write_storage(self, tensor: torch.Tensor, axes: Parts) -> None:
        """Note what has been written to all of the storage of a tensor."""
        self._put(tensor, 0, _torch.storage_of(tensor).nbytes(), axes)

    def ranges(self, tensor: torch.Tensor) -> list[Range]:
        """Return the marks within a tensor, as ranges of elements that count from its first one.

        Between them only the marks of the view itself hold.
        """
        start, end = _extent(tensor)
        held, size, own = self._held.get(id(_torch.storage_of(tensor))), tensor.element_size(), self.own(tensor)
        found = [(0, (end - start) // size, own)] if own else []
        for first, last, axes in held.ranges if held is not None else ():
            if first < end and start < last:
                found.append(((max(first, start) - start) // size, (min(last, end) - start) // size, axes | own))
        return found

    def write_range(self, tensor: torch.Tensor, first: int, last: int, axes: Parts) -> None:
        """Note what has been written to a range of elements, counted from the first one of a tensor."""
        start, size = _extent(tensor)[0], tensor.element_size()
        self._put(tensor, start + first * size, start + last * size, axes)

    def own(self, tensor: torch.Tensor) -> Parts:
        """Return the marks of a view that others of the same storage do not have."""
        held = self._held.get(id(_torch.storage_of(tensor)))
        return held.views.get(_view(tensor), NOTHING) if held is not None else NOTHING

    def add_own(self, tensor: torch.Tensor, axes: Parts) -> None:
        """Mark a view, and no other one of the same storage; one of the whole storage is marked for all."""
        if axes <= self.read(tensor):
            return
        if _extent(tensor) == (0, _torch.storage_of(tensor).nbytes()):
            self.write(tensor, self.read(tensor) | axes)
        else:
            views = self._hold(tensor).views
            views[_view(tensor)] = views.get(_view(tensor), NOTHING) | axes

    def sums(self, tensor: torch.Tensor) -> Mapping[Part, Sum]:
        """Return the parts of axes over which a tensor is not the sum that it could be taken for."""
        held = self._held.get(id(_torch.storage_of(tensor)))
        return held.sums if held is not None else {}

    def set_sums(self, tensor: torch.Tensor, sums: Mapping[Part, Sum]) -> None:
        """Note over which parts of axes a tensor is not a sum."""
        if sums or self.sums(tensor):
            self._hold(tensor).sums = sums

    def _put(self, tensor: torch.Tensor, start: int, end: int, axes: Parts) -> None:
        held = self._held.get(id(_torch.storage_of(tensor)))
        if end <= start or (held is None and not axes):
            return
        held = held or self._hold(tensor)
        held.ranges = [piece for each in held.ranges for piece in _outside(each, start, end)]
        held.views = {key: kept for key, kept in held.views.items() if not start <= key[0] < end}  # type: ignore[index]
        if axes:
            held.ranges.append((start, end, axes))

    def _hold(self, tensor: torch.Tensor) -> _Held:
        storage = _torch.storage_of(tensor)
        key = id(storage)
        if key not in self._held:
            held = self._held[key] = _Held()
            held.ref = weakref.ref(storage, lambda _: self._held.pop(key, None))
        return self._held[key]


def _outside(span: Range, start: int, end: int) -> list[Range]:
    first, last, axes = span
    if last <= start or end <= first:
        return [span]
    return [(a, b, axes) for a, b in ((first, start), (end, last)) if a < b]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of its storage between which a tensor lies."""
    tensor = _torch.bare_tensor(tensor)
    size, start = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return int(start) * size, int(start) * size
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(start) * size, int(start + reach + 1) * size


def _view(tensor: torch.Tensor) -> Hashable:
    tensor = _torch.bare_tensor(tensor)
    return tensor.storage_offset() * tensor.element_size(), tuple(tensor.shape), tensor.stride()
