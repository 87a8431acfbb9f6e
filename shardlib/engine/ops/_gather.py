"""Execution of ops on gathered operands: every rank repeats the whole computation, which is correct and slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardlib.engine._torch import (
    DTensorSpec,
    is_view,
    local_of,
    pytree,
    return_and_correct_aliasing,
    schema_of,
    set_local,
    spec_of,
    wrap,
)
from shardlib.engine.ops import _alias
from shardlib.engine.ops._choose import returned_operands
from shardlib.engine.ops._operands import Operands, meta_of, redistributed, replicated, spec_like
from shardlib.engine.ops._rows import Op
from shardlib.errors import warn

__all__ = ["GatheredOp", "ShardlibGatherWarning", "draw_replicated", "gather", "note", "record", "with_aliases"]


def gather(operands: Operands, reason: str) -> Any:
    """Gather all operands and compute a call on every rank. Operands that it writes to keep their placements."""
    note(operands, reason)
    return _compute_replicated(operands, operands.local([replicated(operands.mesh)] * len(operands.specs)))


def _compute_replicated(operands: Operands, fulls: Sequence[torch.Tensor]) -> Any:
    args, kwargs = operands.rebuilt(fulls)
    result = operands.op(*args, **kwargs)
    for i in operands.written:
        _write_back(operands, i, fulls[i])
    wrapped = pytree.tree_map_only(torch.Tensor, lambda t: _wrap_replicated(t, operands), result)
    if operands.op is _PACK:
        wrapped = wrapped[0], result[1]
    return with_aliases(operands, wrapped, redistributed=not operands.all_replicated)


_PACK = torch.ops.aten._pack_padded_sequence.default  # recurrent layers read its batch sizes by their address


def _wrap_replicated(tensor: torch.Tensor, operands: Operands) -> DTensor:
    return wrap(tensor, spec_like(operands.mesh, replicated(operands.mesh), tensor))


def _write_back(operands: Operands, i: int, full: torch.Tensor) -> None:
    """Write the values of a gathered copy, and its shape if the op changed it, back to the operand."""
    tensor, spec = operands.tensors[i], operands.specs[i]
    if not isinstance(tensor, DTensor):
        return
    now = spec_like(spec.mesh, replicated(spec.mesh), full)
    if torch.Tag.inplace_view in operands.op.tags or full.shape != meta_of(spec).shape:
        set_local(tensor, full, now)
    elif full is not local_of(tensor):
        local_of(tensor).copy_(redistributed(full, now, spec.placements))


# --- random ops ---------------------------------------------------------------------------------------------------


def draw_replicated(operands: Operands) -> Any:
    """Draw a random op at the global shape on every rank, and keep the local shard.

    The ranks of a mesh share the state of their default generators, so that the numbers are those of one device,
    whatever the mesh. Dropout, and ops that only fill their first operand, need no communication.
    """
    if operands.op is torch.ops.aten.native_dropout.default and not operands.all_replicated:
        return _dropout(operands)
    if operands.op in _FILLS:
        fulls = [_empty(spec) for spec in operands.specs]
    else:
        if not operands.all_replicated:
            note(operands, "its random numbers are drawn for the full tensor")
        fulls = operands.local([replicated(operands.mesh)] * len(operands.specs))
    return _shard_as_first(operands, _compute_replicated(operands, fulls))


def _dropout(operands: Operands) -> Any:
    """Map x, p, train to x times its shard of a mask that is drawn at the global shape, and the mask."""
    (x,), (spec,), p = operands.tensors, operands.specs, operands.args[1]
    assert isinstance(x, DTensor)
    scale = 1.0 if operands.args[2] is False else 0.0 if p == 1 else 1 / (1 - p)
    _, drawn = operands.op(_empty(spec), *operands.args[1:])
    mask = _shard_as_first(operands, _wrap_replicated(drawn, operands))
    kept = local_of(x).mul(local_of(mask)).mul_(scale)
    return wrap(kept, DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)), mask


def _empty(spec: DTensorSpec) -> torch.Tensor:
    meta = meta_of(spec)
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=spec.mesh.device_type)


def _shard_as_first(operands: Operands, result: Any) -> Any:
    """Redistribute new tensors of the first operand's shape to its placements."""
    spec = operands.specs[0]
    placements: tuple[Placement, ...] = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)

    def split(new: torch.Tensor) -> torch.Tensor:
        existed = any(new is tensor for tensor in operands.tensors)
        if not isinstance(new, DTensor) or new.shape != meta_of(spec).shape or existed:
            return new
        local = redistributed(local_of(new), spec_of(new), placements)
        return wrap(local, DTensorSpec(spec.mesh, placements, tensor_meta=spec_of(new).tensor_meta))

    return pytree.tree_map_only(torch.Tensor, split, result)


# Ops that do not read their first operand.
_FILLS: set[Op] = {
    op
    for name in (
        "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "rand_like",
        "randn_like", "randint_like",
    )
    for packet in [getattr(torch.ops.aten, name)]
    for op in map(partial(getattr, packet), packet.overloads())
    if not any(argument.is_out for argument in schema_of(op).arguments)
} | {torch.ops.aten.bernoulli_.float}  # fmt: skip


# --- what an op returns -------------------------------------------------------------------------------------------


def with_aliases(operands: Operands, result: Any, *, redistributed: bool) -> Any:
    """Return the result with the aliases of the op's schema: written operands themselves, and views of their base.

    `redistributed`: an operand was redistributed, so that views of it are copies.
    """
    op = operands.op
    written = [tensor for i in sorted(operands.written) if isinstance(tensor := operands.tensors[i], DTensor)]
    if torch.Tag.inplace_view in op.tags:
        for tensor in written:
            _alias.record_reshape(tensor, op)
        return return_and_correct_aliasing(op, operands.args, operands.kwargs, result)
    _alias.after_write([tensor for tensor in written if _alias.watched(tensor)])
    if returned := returned_operands(op, operands.names):
        several = len(schema_of(op).returns) > 1
        results = list(result) if several else [result]
        for output, operand in returned:
            results[output] = operands.tensors[operand]
        return tuple(results) if several else results[0]
    if is_view(op) and operands.viewed:
        if redistributed or any(_alias.watched(operands.tensors[i]) for i in operands.viewed):
            _alias.link_views(operands, result, copied=redistributed)
        args = operands.args
        if any(type(operands.tensors[i]) is not DTensor for i in operands.viewed):  # else torch refuses the classes
            args = pytree.tree_map_only(DTensor, lambda tensor: wrap(local_of(tensor), spec_of(tensor)), args)
        return return_and_correct_aliasing(op, args, operands.kwargs, result)
    return result


# --- reporting ----------------------------------------------------------------------------------------------------


class ShardlibGatherWarning(UserWarning):
    """An op had no sharding rule for its operands' placements, so every rank all-gathered them and repeated the
    work."""


@dataclass(frozen=True)
class GatheredOp:
    """One op that every rank computed on all-gathered operands.

    Attributes:
        op: its name, as in "aten.nonzero.default".
        reason: the reason why no rule applied.
        placements: each tensor operand's placements, as text.
        shapes: each tensor operand's global shape.
    """

    op: str
    reason: str
    placements: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


_LISTENERS: dict[int, list[GatheredOp]] = {}  # by identity, since two empty lists are equal
_WARNED: set[str] = set()


@contextmanager
def record() -> Iterator[list[GatheredOp]]:
    """Collect every op inside the block that ran on all-gathered operands, in order, repeats included.

    Example:
        >>> with record() as gathered:
        ...     pass
        >>> gathered
        []
    """
    listener: list[GatheredOp] = []
    _LISTENERS[id(listener)] = listener
    try:
        yield listener
    finally:
        del _LISTENERS[id(listener)]


def note(operands: Operands, reason: str) -> None:
    """Record a gathered call. The first rank of the mesh warns of each op once, if an operand was sharded."""
    specs = operands.specs
    placements = tuple(", ".join(str(p) for p in spec.placements) for spec in specs)
    shapes = tuple(tuple(meta_of(spec).shape) for spec in specs)
    op = GatheredOp(str(operands.op), reason, placements, shapes)
    for listener in _LISTENERS.values():
        listener.append(op)
    split = any(not isinstance(p, Replicate | Partial) for spec in specs for p in spec.placements)
    if split and op.op not in _WARNED and not any(operands.mesh.get_coordinate() or ()):
        _WARNED.add(op.op)
        texts = ", ".join(f"{list(shape)} {where}" for shape, where in zip(shapes, placements, strict=True))
        warn(
            f"{op.op} ran on all-gathered operands, so that every rank holds them in full and repeats the work, "
            f"because {reason} (operands: {texts}). The numbers are right. To make it fast, redistribute before "
            "the op, or register a rule with shardlib.engine.ops.rule. Each op is named once.",
            ShardlibGatherWarning,
        )
