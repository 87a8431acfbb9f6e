"""Views that had to be redistributed are copies; here they are kept equal to what they are views of.

A view of a DTensor shares the local storage of its base, unless taking it needs communication: a slice of a split
dim, a `view` that breaks a split dim up. Such a view is a copy. Autograd and the user still take it for a view, so
writing to it must reach the base, and writing to the base must reach it. Both carry a `WatchedSpec`, which differs
from every other spec in DTensor's caches: an op on either comes to our policy each time, and one that writes ends with
`after_write`.

Each view of a watched tensor remembers how it was taken (`_Link`). A write goes up along the links to the first base,
and from there down to every copy. Views that were taken before the base was watched share its storage and have no
link: that they were written to shows in the version that a tensor has in common with its views, and `catch_up` looks
at that. All ranks take the same steps: what is communicated depends on links and versions alone, never on which Python
objects happen to be alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import DTensorSpec, local_of, pytree, set_local, spec_of
from shardlib.engine.ops._operands import Operands, redistributed, spec_like, whole
from shardlib.engine.ops._rows import Op
from shardlib.errors import ShardingError

__all__ = ["WatchedSpec", "after_write", "catch_up", "has_other_shape", "link_views", "refuse_write", "watched"]


class WatchedSpec(DTensorSpec):
    """The spec of a tensor that has, or is, a view that does not share its local storage."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatchedSpec) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((WatchedSpec, super().__hash__()))


@dataclass
class _Link:
    """How a view was taken, and whether it is a copy."""

    source: DTensor
    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int
    copied: bool

    def replay(self, source: torch.Tensor) -> torch.Tensor:
        """The same view of a plain tensor."""
        args, kwargs = pytree.tree_map(lambda x: source if x is self.source else x, (self.args, self.kwargs))
        return pytree.tree_leaves(self.op(*args, **kwargs))[self.output]


@dataclass
class _Family:
    """A watched tensor's own link, its views, and the version that all copies were last brought to.

    `reshaped` names the op that has changed its shape since, in place: its views were taken of another shape.
    """

    link: _Link | None = None
    views: list[weakref.ref[DTensor]] = field(default_factory=list)
    version: int | None = None
    reshaped: Op | None = None


def watched(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and isinstance(spec_of(tensor), WatchedSpec)


def link_views(operands: Operands, result: Any, *, copied: bool) -> None:
    """Remember that `result` holds views of the viewed operand: copies of it, or of a watched one."""
    (i,) = operands.viewed
    source = operands.tensors[i]
    if not isinstance(source, DTensor):
        return
    for output, view in enumerate(pytree.tree_leaves(result)):
        link = _Link(source, operands.op, operands.args, operands.kwargs, output, copied)
        _family(view).link = link
        _family(source).version = _version(source)
        _family(source).views.append(weakref.ref(view))


def has_other_shape(tensor: DTensor, op: Op) -> None:
    """A tensor's shape was changed in place. If it is watched, nothing is copied for that: the values are the same."""
    if "_shardlib_family" in tensor.__dict__:
        family, version = _family(tensor), _version(tensor)
        family.reshaped, family.version = op, None if version is None else version + 1  # counted once the op is over
        _watch(tensor)


def refuse_write(tensor: DTensor) -> None:
    """Refuse to write to a watched tensor that has had another shape, or to a view of one: how to tell the others?

    Raises:
        ShardingError: say to call the op that changed the shape out of place.
    """
    family = _family(tensor)
    while family.reshaped is None and family.link is not None:
        family = _family(family.link.source)
    if family.reshaped is not None:
        name = family.reshaped.overloadpacket.__name__
        raise ShardingError(
            f"A tensor of shape {tuple(tensor.shape)} is written to, after {name}() has changed its shape in place and "
            "a view of it was taken that lies otherwise on the mesh. Such a view is a copy, which the write would not "
            f"reach. Change the shape out of place, as in y = x.{name.rstrip('_')}(...)."
        )


def after_write(tensors: Sequence[DTensor]) -> None:
    """Bring the bases and all their views to what one op wrote to some of them."""
    for root in {id(root): root for root in map(_written_up, tensors)}.values():
        _refresh(root, _values(root))


def catch_up(tensor: DTensor) -> None:
    """Bring copies to what was written where nobody told: through a view that shares the storage of the base."""
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
    """How often a tensor or a view of it was written to; inference mode does not count."""
    return None if tensor.is_inference() else tensor._version


def _written_up(tensor: DTensor) -> DTensor:
    """The first base of a view, which now has the view's values."""
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
    return redistributed(local_of(tensor), spec_of(tensor), whole(tensor.device_mesh))


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
    spec = spec_like(tensor.device_mesh, whole(tensor.device_mesh), values)
    local_of(tensor).copy_(redistributed(values, spec, tensor.placements))


def _family(tensor: DTensor) -> _Family:
    """A tensor's family; from the first time on, the tensor is watched."""
    family = tensor.__dict__.get("_shardlib_family")
    if family is None:
        family = tensor.__dict__["_shardlib_family"] = _Family()
        _watch(tensor)
    return family


def _watch(tensor: DTensor) -> None:
    spec = spec_of(tensor)
    set_local(tensor, local_of(tensor), WatchedSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta))
