"""Aliasing of views that needed a redistribution: such views are copies, and writes are propagated to and from them.

A view of a DTensor shares the local storage of its base, unless the view needs communication: a slice of a sharded
dim, or a `view` that regroups a sharded dim. Such a view is a copy. For autograd and the user it is still a view, so
that a write to it must update the base, and a write to the base must update it. Both have a `WatchedSpec`, which equals
no other spec in DTensor's caches: ops on either call the policy each time, and an op that writes ends with
`after_write`.

Each view of a watched tensor records how it was made (`_Link`). A write is propagated along the links to the first
base, and from there to every copy. Views from before the base was watched share its storage and have no link: writes to
them change the version counter that a tensor shares with its views, which `catch_up` compares. All ranks take the same
steps: communication depends on links and versions only, never on which Python objects are alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import DTensorSpec, local_of, pytree, set_local, spec_of
from shardlib.engine.ops._operands import Operands, redistributed, replicated, spec_like
from shardlib.engine.ops._rows import Op
from shardlib.errors import ShardingError

__all__ = ["WatchedSpec", "after_write", "catch_up", "link_views", "record_reshape", "refuse_write", "watched"]


class WatchedSpec(DTensorSpec):
    """The spec of a tensor that has, or is, a view that does not share its local storage."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchedSpec) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((WatchedSpec, super().__hash__()))


@dataclass
class _Link:
    """The op that made a view, and whether the view is a copy."""

    source: DTensor
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    copied: bool

    def replay(self, source: torch.Tensor) -> torch.Tensor:
        """Return the same view of a plain tensor."""
        args, kwargs = pytree.tree_map(lambda x: source if x is self.source else x, (self.args, self.kwargs))
        return pytree.tree_leaves(self.op(*args, **kwargs))[self.output]


@dataclass
class _Family:
    """A watched tensor's own link, its views, and the version at which all copies were last updated.

    `reshaped` is the op that has changed its shape in place since then: its views belong to another shape.
    """

    link: _Link | None = None
    views: list[weakref.ref[DTensor]] = field(default_factory=list)
    version: int | None = None
    reshaped: Op | None = None


def watched(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and isinstance(spec_of(tensor), WatchedSpec)


def link_views(operands: Operands, result: Any, *, copied: bool) -> None:
    """Record that `result` contains views of the viewed operand, which are copies or views of a watched tensor."""
    (i,) = operands.viewed
    source = operands.tensors[i]
    if not isinstance(source, DTensor):
        return
    for output, view in enumerate(pytree.tree_leaves(result)):
        link = _Link(source, operands.op, operands.args, operands.kwargs, output, copied)
        _family(view).link = link
        _family(source).version = _version(source)
        _family(source).views.append(weakref.ref(view))


def record_reshape(tensor: DTensor, op: Op) -> None:
    """Record that an op changed a tensor's shape in place. No copy is updated, since the values are the same."""
    if "_shardlib_family" in tensor.__dict__:
        family, version = _family(tensor), _version(tensor)
        family.reshaped, family.version = op, None if version is None else version + 1  # counted once the op is over
        _watch(tensor)


def refuse_write(tensor: DTensor) -> None:
    """Refuse to write to a watched tensor whose shape was changed, or to a view of one: copies cannot be updated.

    Raises:
        ShardingError: the write would not reach all views; the op that changed the shape has to be out of place.
    """
    family = _family(tensor)
    while family.reshaped is None and family.link is not None:
        family = _family(family.link.source)
    if family.reshaped is not None:
        name = family.reshaped.overloadpacket.__name__
        raise ShardingError(
            f"A tensor of shape {tuple(tensor.shape)} is written to, after {name}() has changed its shape in place and "
            "a view of it was taken that has another layout. Such a view is a copy, which the write would not "
            f"reach. Change the shape out of place, as in y = x.{name.rstrip('_')}(...)."
        )


def after_write(tensors: Sequence[DTensor]) -> None:
    """Update the bases and all their views after an op wrote to some of them."""
    for root in {id(root): root for root in map(_write_to_bases, tensors)}.values():
        _refresh(root, _values(root))


def catch_up(tensor: DTensor) -> None:
    """Update copies after unrecorded writes: those through a view that shares the storage of the base."""
    root = tensor
    while (link := _family(root).link) is not None:
        root = link.source
    version = _version(root)
    if _family(root).reshaped is not None:
        if version != _family(root).version:
            refuse_write(tensor)
    elif version is None or version != _family(root).version:
        _refresh(root, _values(root))
        _family(root).version = version


def _version(tensor: DTensor) -> int | None:
    """Return the version counter of a tensor and its views; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def _write_to_bases(tensor: DTensor) -> DTensor:
    """Write a view's values to its bases, and return the first base."""
    values = _values(tensor)
    while (link := _family(tensor).link) is not None:
        base = link.source
        full = _values(base).clone()
        if link.copied:
            link.replay(full).copy_(values)
            _store(base, full)
        tensor, values = base, full
    return tensor


def _values(tensor: DTensor) -> torch.Tensor:
    return redistributed(local_of(tensor), spec_of(tensor), replicated(tensor.device_mesh))


def _refresh(tensor: DTensor, values: torch.Tensor) -> None:
    for reference in _family(tensor).views:
        view = reference()
        link = None if view is None else _family(view).link
        if view is not None and link is not None:
            new = link.replay(values)
            if link.copied:
                _store(view, new)
            _refresh(view, new)


def _store(tensor: DTensor, values: torch.Tensor) -> None:
    spec = spec_like(tensor.device_mesh, replicated(tensor.device_mesh), values)
    local_of(tensor).copy_(redistributed(values, spec, tensor.placements))


def _family(tensor: DTensor) -> _Family:
    """Return a tensor's family. The first call makes the tensor watched."""
    family = tensor.__dict__.get("_shardlib_family")
    if family is None:
        family = tensor.__dict__["_shardlib_family"] = _Family()
        _watch(tensor)
    return family


def _watch(tensor: DTensor) -> None:
    spec = spec_of(tensor)
    set_local(tensor, local_of(tensor), WatchedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta))
