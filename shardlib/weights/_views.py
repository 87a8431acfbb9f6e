"""Finds what code reads of tensors, by running it on tensors without values, whose views tell where they lie.

A view of a tensor knows its offset and strides in the memory of that tensor, also on the meta device. So a loader that
an engine has for checkpoints tells which elements it reads on this rank, whatever it narrows, fuses and pads; and a
function that renames and splits tensors tells what its results are made of. Nothing is written down by class of models.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardlib._mesh_shape import MeshShape
from shardlib._plan.moves import Laid, Moves, Pair, Pieces
from shardlib.engine import _torch
from shardlib.errors import InputError
from shardlib.layout._boxes import Box, Part, full_box

__all__ = ["Read", "View", "in_groups", "on_meta", "reads_of", "views_of"]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class View:
    """A tensor that is a part of another one.

    Attributes:
        name: its name.
        source: the name of the tensor that it is a part of.
        box: the part.
        dims: for each of its dims the dim of the source; -1 for one of size 1 that the source does not have.
    """

    name: str
    source: str
    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if dim < 0 else self.box.sizes[dim] for dim in self.dims)

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Return the view of the box of its source."""
        kept = [dim for dim in self.dims if dim >= 0]
        rest = [dim for dim in range(part.ndim) if dim not in kept]
        return part.permute((*kept, *rest)).view(self.shape)

    def in_source(self, box: Box) -> Box:
        """Return a box of the view in its source."""
        offsets, sizes = list(self.box.offsets), list(self.box.sizes)
        for at, size, dim in zip(box.offsets, box.sizes, self.dims, strict=True):
            if dim >= 0:
                offsets[dim], sizes[dim] = self.box.offsets[dim] + at, size
        return Box(tuple(offsets), tuple(sizes))

    def laid(self, source: Laid, boxes: Mapping[int, Iterable[Box]], dtype: torch.dtype | None = None) -> Laid:
        """Return the view as ranks need it: boxes of the source, in local tensors of the view's box.

        Args:
            source: how the source lies.
            boxes: what each rank needs of the view.
            dtype: the dtype of the local tensors; that of the source by default.
        """
        of_source = [[self.in_source(box) for box in of_rank] for of_rank in boxes.values()]
        pieces = tuple(tuple(Part(box, box.within(self.box)) for box in of_rank) for of_rank in of_source)
        mesh = MeshShape(dp=max(1, len(boxes)))
        ranks = tuple(enumerate(boxes))
        return Laid((self.name,), source.shape, dtype or source.dtype, Pieces(pieces), mesh, ranks)


@dataclass(frozen=True)
class Read:
    """The part of a tensor that is read.

    Attributes:
        boxes: disjoint boxes that hold all elements that are read.
        dtype: the dtype that they are read in.
    """

    boxes: tuple[Box, ...]
    dtype: torch.dtype


def on_meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def in_groups(
    wanted: Iterable[tuple[View, Laid]], sources: Mapping[str, Laid], limit: int, node: int
) -> Iterator[tuple[list[tuple[View, Laid]], Moves]]:
    """Cut tensors into runs of which no more than `limit` bytes are there at a time, or a larger one alone.

    Args:
        wanted: each tensor, and how ranks need it.
        sources: how what they are views of lies, by name.
        limit: the bytes.
        node: the number of ranks that share a node.

    Yields:
        The tensors of a run, and what moves for them.
    """
    for group in _cut(wanted, limit):
        yield group, Moves(tuple(Pair(sources[view.source], laid) for view, laid in group), node)


def _cut(wanted: Iterable[tuple[View, Laid]], limit: int) -> Iterator[list[tuple[View, Laid]]]:
    group, size = list[tuple[View, Laid]](), 0
    for view, laid in wanted:
        each = view.box.numel * laid.dtype.itemsize
        if group and size + each > limit:
            yield group
            group, size = [], 0
        group.append((view, laid))
        size += each
    if group:
        yield group


def views_of(convert: Callable[[dict[str, torch.Tensor]], Tensors], tensors: Tensors) -> list[View]:
    """Return the results of a function that renames, splits, permutes tensors, as views of what it was given.

    Args:
        convert: a function from tensors by name to others by name. It gets tensors on the meta device.
        tensors: tensors on the meta device.

    Raises:
        InputError: a result is not a part of one tensor.
    """
    with _Following(tensors) as following, torch.no_grad():
        results = convert(dict(tensors))
    found = []
    for name, tensor in results.items():
        source = following.source(tensor)
        view = None if source is None else _view(name, source, tuple(tensors[source].shape), tensor)
        if view is None:
            raise InputError(
                f'The function that names tensors for the engine computes "{name}" from others. It may rename, split, '
                "permute; what is computed has to be a parameter of the model first, as merged adapters are."
            )
        found.append(view)
    return found


def reads_of(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any], tensors: Tensors, into: Tensors | None = None
) -> tuple[dict[str, Read], list[str]]:
    """Return what a loader reads of tensors, by name; of those that it does not read, nothing. Return also the names of
    parameters of which it does not write all elements.

    Args:
        load: takes pairs of name and tensor, and copies them into parameters on the meta device.
        tensors: tensors on the meta device.
        into: the parameters.
    """
    with _Following(tensors) as following, torch.no_grad():
        load(iter(tensors.items()))
    left = [
        name
        for name, param in (into or {}).items()
        if sum(following.written[_torch.memory_of(param)].values()) < param.numel()
    ]
    read = {
        name: Read(_disjoint([box for box, _ in following.read[name]]), _widest([d for _, d in following.read[name]]))
        for name in tensors
        if name in following.read
    }
    return read, left


class _Following(_torch.TorchDispatchMode):
    """Follow tensors through views and copies, and note what is read of them."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors
        self._names = {_torch.memory_of(tensor): name for name, tensor in tensors.items()}
        self.read: dict[str, list[tuple[Box, torch.dtype]]] = defaultdict(list)
        self.written: dict[int, dict[tuple[Any, ...], int]] = defaultdict(dict)

    def source(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the tensor that one is a view of."""
        return self._names.get(_torch.memory_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and self.source(args[0]) is not None:
            return torch.ops.aten.alias.default(args[0])  # a copy has the same values: it is followed
        result = func(*args, **kwargs)
        if func in _WRITES:
            at = (args[0].storage_offset(), *args[0].shape, *args[0].stride())
            self.written[_torch.memory_of(args[0])][at] = args[0].numel()
        given = list(_torch.tensors_in((args, kwargs)))
        if not any(self.source(tensor) is not None for tensor in _torch.tensors_in(result)):
            for tensor in given:
                if (name := self.source(tensor)) is not None:
                    dtype = args[0].dtype if func is torch.ops.aten.copy_.default else tensor.dtype
                    self.read[name].append((_box_of(tuple(self._tensors[name].shape), tensor), dtype))
        return result


_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


def _view(name: str, source: str, shape: tuple[int, ...], tensor: torch.Tensor) -> View | None:
    """Return a tensor as a view of its source; None where its dims are not dims of the source."""
    box, dims = _box_of(shape, tensor), list[int]()
    strides = _contiguous(shape)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        match = [dim for dim, (each, n) in enumerate(zip(strides, shape, strict=True)) if each == stride and n > 1]
        if size > 1 and not match:
            return None
        dims.append(match[0] if size > 1 else -1)
    view = View(name, source, box, tuple(dims))
    return view if view.shape == tuple(tensor.shape) and box.numel == tensor.numel() else None


def _box_of(shape: tuple[int, ...], view: torch.Tensor) -> Box:
    """Return a box of a contiguous tensor that holds all elements of a view; all of it where no smaller one is easy."""
    if not shape or not view.numel():
        return full_box(shape)
    low, rest = [], view.storage_offset()
    strides = _contiguous(shape)
    for stride in strides:
        low.append(rest // stride)
        rest %= stride
    high = list(low)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size > 1 and stride and not _extend(low, high, strides, shape, size, stride):
            return full_box(shape)
    return Box(tuple(low), tuple(top - at + 1 for at, top in zip(low, high, strict=True)))


def _extend(
    low: Sequence[int], high: list[int], strides: Sequence[int], shape: Sequence[int], size: int, stride: int
) -> bool:
    """Extend a box by a dim of a view; return whether it is a dim of the tensor, or several that lie together."""
    dim = next((d for d, each in enumerate(strides) if each <= stride and shape[d] > 1), None)
    if dim is None or stride % strides[dim]:
        return False
    step = stride // strides[dim]
    if high[dim] + (size - 1) * step < shape[dim]:
        high[dim] += (size - 1) * step
        return True
    if step > 1 or low[dim] or high[dim] or size % shape[dim]:
        return False
    high[dim] = shape[dim] - 1
    return _extend(low, high, strides, shape, size // shape[dim], strides[dim] * shape[dim])


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Return disjoint boxes that hold all elements of some; those that meet are put into one."""
    found: list[Box] = []
    for box in boxes:
        while met := next((other for other in found if other.meet(box)), None):
            found.remove(met)
            box = _around(met, box)
        found.append(box)
    return tuple(found)


def _around(a: Box, b: Box) -> Box:
    low = tuple(map(min, a.offsets, b.offsets))
    high = [max(x + n, y + m) for x, n, y, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)]
    return dataclasses.replace(a, offsets=low, sizes=tuple(h - at for h, at in zip(high, low, strict=True)))


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: dtype.itemsize)
