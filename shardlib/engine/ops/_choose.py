"""Choice of a row for each mesh axis of one call: the cheapest valid row, one axis after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlib.engine._torch import _StridedShard, chunks_of, schema_of, split_factor
from shardlib.engine.ops._rows import Call, Compute, Meta, Op, R, Row, Rule, is_split

__all__ = ["Choice", "choose", "returned_operands"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Choice:
    """Placements of operands and outputs on every mesh axis, and the computation on local tensors."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]
    compute: Compute | None
    compute_axes: tuple[int, ...]
    gathered: bool  # on some axis all operands are replicated, though one was sharded


def choose(
    rule: Rule | None,
    call: Call,
    placements: Sequence[Placements],
    sizes: Sequence[int],
    *,
    axes: Sequence[str] = (),
    fixed: frozenset[int] = frozenset(),
) -> Choice | None:
    """Choose the cheapest rows for a call; None when an operand that must not be redistributed fits no row.

    Args:
        rule: the op's rule.
        call: the call, with global shapes.
        placements: those of each operand on every mesh axis.
        sizes: sizes of the mesh axes.
        axes: names of the mesh axes, where they have names.
        fixed: operands that the op writes to, whose placements must not change.
    """
    picked: list[Row] = []
    gathered = False
    for axis, size in enumerate(sizes):
        current = tuple(of_operand[axis] for of_operand in placements)
        call = replace(call, current=current, size=size, axis=axes[axis] if axes else "")
        row = _cheapest(rule, call, fixed)
        if row is None:
            return None
        gathered |= size > 1 and any(map(is_split, current)) and all(p == R for p in row.ins)
        call = _after(call, row, size)
        picked.append(row)
    computes = {row.compute for row in picked} - {None}
    if len(computes) > 1:
        return None
    return Choice(
        inputs=tuple(zip(*(_placements(row) for row in picked), strict=True)) if placements else (),
        outputs=tuple(_column(picked, i) for i in range(len(call.outputs))),
        compute=next(iter(computes), None),
        compute_axes=tuple(axis for axis, row in enumerate(picked) if row.compute),
        gathered=gathered,
    )


def _placements(row: Row) -> Placements:
    return tuple(p for p in row.ins if isinstance(p, Placement))


def _column(picked: Sequence[Row], output: int) -> Placements | None:
    """Return an output's placements, or None for an absent output."""
    column = tuple(p for row in picked if (p := row.outs[output]) is not None)
    return column if len(column) == len(picked) else None


def _cheapest(rule: Rule | None, call: Call, fixed: frozenset[int]) -> Row | None:
    """Return the cheapest valid row. Rows are validated in order of cost, since validation is expensive."""
    priced = [(_cost(row, call, fixed), row) for row in _candidates(rule, call)]
    for cost, row in sorted(priced, key=lambda pair: pair[0]):
        if cost[0] < math.inf and _holds(row, call, empty=rule is not None and rule.empty):
            return replace(row, ins=_settled(row, call))
    return None


def _settled(row: Row, call: Call) -> Placements:
    return tuple(want if isinstance(want, Placement) else now for want, now in zip(row.ins, call.current, strict=True))


def _candidates(rule: Rule | None, call: Call) -> Iterator[Row]:
    """Yield the rows of this call, each also in its variants for operands with fused splits."""
    yield Row(tuple(None if meta is None else R for meta in call.outputs), (R,) * len(call.inputs))
    for row in rule.rows(call) if rule is not None else ():
        assert len(row.ins) == len(call.inputs) and len(row.outs) == len(call.outputs), (call.op, row)
        yield from _forms(row, call)


def _forms(row: Row, call: Call) -> Iterator[Row]:
    yield row
    if not row.parallel:
        return
    pairs = list(zip(row.ins, call.current, strict=True))
    factors = {
        now.split_factor
        for want, now in pairs
        if (row.compute is None or row.anywhere)
        and isinstance(now, _StridedShard)
        and isinstance(want, Shard)
        and want.dim == now.dim
    }
    for factor in sorted(factors):
        yield _mapped(row, lambda p, k=factor: _StridedShard(p.dim, split_factor=k) if isinstance(p, Shard) else p)
    if any(now == Partial("avg") and want == Partial("sum") for want, now in pairs):
        yield _mapped(row, lambda p: Partial("avg") if isinstance(p, Partial) else p)


def _mapped(row: Row, change: Any) -> Row:
    return replace(row, ins=tuple(change(p) for p in row.ins), outs=tuple(change(p) for p in row.outs))


def _holds(row: Row, call: Call, *, empty: bool) -> bool:
    """Return whether the shapes allow a row. Shards of dims with different sizes align only if each is even."""
    if any(row.outs[output] != row.ins[operand] for output, operand in returned_operands(call.op, call.names)):
        return False
    metas = (*call.inputs, *call.outputs)
    splits = [(m, p) for m, p in zip(metas, (*row.ins, *row.outs), strict=True) if is_split(p) and m is not None]
    found = {_cuts(m, now) for m, now in zip(call.inputs, call.current, strict=True) if is_split(now)}
    if any(p.dim >= m.ndim or not (_cuts(m, p) in found or _is_expressible(m, p, call.size)) for m, p in splits):
        return False
    sizes = [m.shape[p.dim] for m, p in splits]
    fused = any(isinstance(p, _StridedShard) for _, p in splits)
    equal = bool(sizes) and all(size == sizes[0] for size in sizes)
    if any(p.dim in m.ragged for m, p in splits):
        # Uneven shards are split again: they align as long as all operands were split in the same way.
        same = all(p.dim in m.ragged for m, p in splits) and (not fused or len({_cuts(m, p) for m, p in splits}) == 1)
        return empty and same and equal and row.parallel
    factors = {split_factor(p) for _, p in splits}
    if row.parallel and equal and len(factors) == 1:
        [factor] = factors
        return sizes[0] > 0 and (empty or (sizes[0] % factor == 0 and _nowhere_empty(sizes[0] // factor, call.size)))
    even = all(m.shape[p.dim] % (call.size * split_factor(p)) == 0 and m.shape[p.dim] > 0 for m, p in splits)
    return even and (equal or not (row.parallel and fused))


def _is_expressible(meta: Meta, placement: Shard | _StridedShard, size: int) -> bool:
    """Return whether placements can express a further split of a dim that is already split.

    DTensor reads a fused split and another split of the same dim as an order of mesh axes: the factor has to be the
    size of the later axis. Other results of a view cannot be expressed.
    """
    factors = [factor for dim, factor in meta.cut if dim == placement.dim]
    again = not isinstance(placement, _StridedShard) and all(factor in (1, size) for factor in factors)
    return not factors or (again and sum(factor != 1 for factor in factors) <= 1)


@functools.cache
def returned_operands(op: Op, names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Return (output, operand) pairs of an op that returns operands it wrote to, with unchanged shapes."""
    if torch.Tag.inplace_view in op.tags:
        return ()
    owners = {
        alias: argument.name
        for argument in schema_of(op).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    return tuple(
        (output, names.index(owner))
        for output, returned in enumerate(schema_of(op).returns)
        if returned.alias_info is not None and returned.alias_info.is_write
        for owner in {owners[alias] for alias in returned.alias_info.before_set}
        if owner in names
    )


def _nowhere_empty(size: int, ranks: int) -> bool:
    """Return whether chunking leaves every rank at least one index."""
    chunk = -(-size // ranks)
    return -(-size // chunk) == ranks


def _cost(row: Row, call: Call, fixed: frozenset[int]) -> tuple[float, int]:
    total, count = 0.0, 0
    for i, (now, want) in enumerate(zip(call.current, row.ins, strict=True)):
        if not isinstance(want, Placement) or now == want:
            continue
        if i in fixed:
            return (math.inf, 0)
        total += _move_cost(now, want, call.inputs[i], call.size, row.partition)
        count += 1
    return (total, count)


def _move_cost(now: Placement, want: Placement, meta: Meta, size: int, partition: bool) -> float:
    """Estimate the bytes that one rank sends. All-reduce and reduce-scatter count the same."""
    share = meta.numel * meta.dtype.itemsize * (size - 1) / size
    if isinstance(want, Partial):
        return 0.0 if partition and isinstance(now, Replicate) else math.inf
    if isinstance(now, Partial):
        return 2 * share
    if isinstance(now, Replicate):
        return 0.0
    if isinstance(want, Replicate) or isinstance(now, _StridedShard) or isinstance(want, _StridedShard):
        return share
    return share / size


def _after(call: Call, row: Row, size: int) -> Call:
    """Return the call as the next mesh axis sees it: shapes local to this axis (of its first rank, the largest)."""
    return replace(
        call,
        inputs=tuple(_shrunk(m, p, size) for m, p in zip(call.inputs, row.ins, strict=True)),
        outputs=tuple(None if m is None else _shrunk(m, p, size) for m, p in zip(call.outputs, row.outs, strict=True)),
    )


def _shrunk(meta: Meta, placement: Any, size: int) -> Meta:
    if not is_split(placement):
        return meta
    shape, dim, factor = list(meta.shape), placement.dim, split_factor(placement)
    ragged = (*meta.ragged, dim) if shape[dim] % (factor * size) else meta.ragged
    shape[dim] = sum(count for _, count in chunks_of(shape[dim], size, 0, factor))
    return Meta(tuple(shape), meta.dtype, ragged, (*meta.cut, (dim, factor)))


def _cuts(meta: Meta, placement: Shard | _StridedShard) -> tuple[int, ...]:
    """Return the split factors of the dim that a placement splits, by earlier axes and by this one."""
    return (*(factor for dim, factor in meta.cut if dim == placement.dim), split_factor(placement))
