"""Computing an op whole on every rank: always right, never fast."""

from __future__ import annotations

from collections.abc import Sequence
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
from shardlib.engine.ops._operands import Operands, arguments_by_name, meta_of, redistributed, spec_like, whole
from shardlib.engine.ops._record import GatheredOp, note_gather
from shardlib.engine.ops._rows import Op

__all__ = ["draw_whole", "finished", "gather", "note"]


def gather(operands: Operands, reason: str) -> Any:
    """Compute a call whole on every rank. Operands it writes to keep their placements."""
    note(operands, reason)
    return _compute_whole(operands, operands.local([whole(operands.mesh)] * len(operands.specs)))


def _compute_whole(operands: Operands, fulls: Sequence[torch.Tensor]) -> Any:
    args, kwargs = operands.rebuilt(fulls)
    result = operands.op(*args, **kwargs)
    for i in operands.written:
        _write_back(operands, i, fulls[i])
    wrapped = pytree.tree_map_only(torch.Tensor, lambda t: wrap_whole(t, operands), result)
    return finished(operands, wrapped, moved=not operands.all_whole)


def wrap_whole(tensor: torch.Tensor, operands: Operands) -> DTensor:
    return wrap(tensor, spec_like(operands.mesh, whole(operands.mesh), tensor))


def _write_back(operands: Operands, i: int, full: torch.Tensor) -> None:
    """Give an operand the values, and where the op changed it the shape, of its gathered copy."""
    tensor, spec = operands.tensors[i], operands.specs[i]
    if not isinstance(tensor, DTensor):
        return
    now = spec_like(spec.mesh, whole(spec.mesh), full)
    if torch.Tag.inplace_view in operands.op.tags or full.shape != meta_of(spec).shape:
        set_local(tensor, full, now)
    elif full is not local_of(tensor):
        local_of(tensor).copy_(redistributed(full, now, spec.placements))


# --- random ops ---------------------------------------------------------------------------------------------------


def draw_whole(operands: Operands) -> Any:
    """A random op drawn at the global shape on every rank, of which each keeps its part.

    The ranks of a mesh share the state of their default generators, so that the numbers are those of one device,
    whatever the mesh. Nothing is communicated for dropout and for ops that only fill their first operand.
    """
    if operands.op is torch.ops.aten.native_dropout.default and not operands.all_whole:
        return _dropout(operands)
    fills = operands.op in _FILLS
    if not fills and not operands.all_whole:
        note(operands, "its random numbers are drawn for the whole tensor")
    fulls = [_blank(s) if fills else f for s, f in zip(operands.specs, _fulls(operands, fills), strict=True)]
    return _split_as_first(operands, _compute_whole(operands, fulls))


def _dropout(operands: Operands) -> Any:
    """x, p, train -> x times its part of a mask that was drawn for the whole, mask."""
    (x,), (spec,), p = operands.tensors, operands.specs, operands.args[1]
    assert isinstance(x, DTensor)
    scale = 1.0 if operands.args[2] is False else 0.0 if p == 1 else 1 / (1 - p)
    _, drawn = operands.op(_blank(spec), *operands.args[1:])
    mask = _split_as_first(operands, wrap_whole(drawn, operands))
    kept = local_of(x).mul(local_of(mask)).mul_(scale)
    return wrap(kept, DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta)), mask


def _fulls(operands: Operands, fills: bool) -> Sequence[Any]:
    return operands.specs if fills else operands.local([whole(operands.mesh)] * len(operands.specs))


def _blank(spec: DTensorSpec) -> torch.Tensor:
    meta = meta_of(spec)
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=spec.mesh.device_type)


def _split_as_first(operands: Operands, result: Any) -> Any:
    """New tensors of the first operand's shape are laid out as it is."""
    spec = operands.specs[0]
    places: tuple[Placement, ...] = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)

    def split(new: torch.Tensor) -> torch.Tensor:
        existed = any(new is tensor for tensor in operands.tensors)
        if not isinstance(new, DTensor) or new.shape != meta_of(spec).shape or existed:
            return new
        local = redistributed(local_of(new), spec_of(new), places)
        return wrap(local, DTensorSpec(spec.mesh, places, tensor_meta=spec_of(new).tensor_meta))

    return pytree.tree_map_only(torch.Tensor, split, result)


def _existing(*names: str) -> set[Op]:
    packets = (getattr(torch.ops.aten, name, None) for name in names)
    return {getattr(p, overload) for p in packets if p is not None for overload in p.overloads()}


# They do not read their first operand.
_FILLS: set[Op] = {
    op
    for op in _existing(
        "normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "rand_like",
        "randn_like", "randint_like",
    )
    if not any(a.is_out for a in schema_of(op).arguments)
} | {torch.ops.aten.bernoulli_.float}  # fmt: skip


# --- what an op returns -------------------------------------------------------------------------------------------


def finished(operands: Operands, result: Any, *, moved: bool) -> Any:
    """The result as the op's schema has it: written operands themselves, and views that know their base.

    `moved`: some operand was redistributed, so that views of it are copies.
    """
    written = [tensor for i in sorted(operands.written) if isinstance(tensor := operands.tensors[i], DTensor)]
    op = operands.op
    if torch.Tag.inplace_view in op.tags:
        for tensor in written:
            _alias.has_other_shape(tensor, op)
    else:
        _alias.after_write([tensor for tensor in written if _alias.watched(tensor)])
    if any(r.alias_info is not None and r.alias_info.is_write for r in schema_of(op).returns):
        return _written_results(operands, result)
    if is_view(op) and operands.viewed:
        if moved or any(_alias.watched(operands.tensors[i]) for i in operands.viewed):
            _alias.link_views(operands, result, copied=moved)
        return return_and_correct_aliasing(op, operands.args, operands.kwargs, result)
    return result


def _written_results(operands: Operands, result: Any) -> Any:
    schema = schema_of(operands.op)
    values = arguments_by_name(operands.op, operands.args, operands.kwargs)
    by_alias = {
        alias: values[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    several = len(schema.returns) > 1
    results = list(result) if several else [result]
    for i, returned in enumerate(schema.returns):
        if returned.alias_info is not None and returned.alias_info.is_write:
            results[i] = by_alias[next(iter(returned.alias_info.before_set))]
    if torch.Tag.inplace_view in operands.op.tags:
        results = [return_and_correct_aliasing(operands.op, operands.args, operands.kwargs, results[0])]
    return tuple(results) if several else results[0]


# --- telling ------------------------------------------------------------------------------------------------------


def note(operands: Operands, reason: str) -> None:
    """Record a gathered call. Loud where a split operand was gathered, on one rank of the mesh."""
    specs = operands.specs
    places = tuple(", ".join(str(p) for p in spec.placements) for spec in specs)
    shapes = tuple(tuple(meta_of(spec).shape) for spec in specs)
    split = any(not isinstance(p, Replicate | Partial) for spec in specs for p in spec.placements)
    first = not any(operands.mesh.get_coordinate() or ())
    note_gather(GatheredOp(str(operands.op), reason, places, shapes), loud=split and first)
