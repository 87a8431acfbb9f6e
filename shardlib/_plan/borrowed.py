"""Memory that a training step borrows beside parameters, gradients and state, from the table alone.

An upper bound for back ends that send parts straight to their owners, which is what the engine does over gloo; with a
real reduce-scatter it is less. Activations are not in it: `Plan.report` has those of a dry run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from shardlib._mesh import MeshShape
from shardlib._plan.rows import Phase, Row
from shardlib._plan.schedules import splits_backward
from shardlib._plan.step import Step
from shardlib._plan.units import join_small, unit_of

__all__ = ["ALONE_BYTES", "borrowed_bytes", "lets_go"]

ALONE_BYTES = 1 << 20
"""From this size on a tensor moves alone: the copies into a bucket then cost more than one more message."""


def lets_go(row: Row, step: Step) -> bool:
    """Whether a parameter that is stored in parts, once gathered, is let go between its forward and its backward.

    Under a schedule that computes gradients of weights late, all stay gathered until the step has ended.
    """
    return row.reshard and not splits_backward(step.schedule)


def borrowed_bytes(rows: Sequence[Row], mesh: MeshShape, units: Sequence[str], step: Step) -> int:
    """Bytes on the rank that borrows most: whole parameters of units, gradients on their way, updates on theirs."""
    return sum(_lent(rows, mesh, units, step)) + _gradients(rows, mesh, step) + _updates(rows, mesh)


def _lent(rows: Iterable[Row], mesh: MeshShape, units: Sequence[str], step: Step) -> Iterator[int]:
    """Buffers that units take turns in, memory of what stays whole until backward has ended, and what small tensors of
    two units are gathered in."""
    sizes: dict[str, int] = {}
    small: dict[str, int] = {}
    let_go: dict[str, bool] = {"": False}
    for row in rows:
        if _divisor(row, "stored", mesh) > 1:
            unit = unit_of(row.tied, units)
            size = row.local_bytes(mesh, phase="compute")
            sizes[unit] = sizes.get(unit, 0) + size
            small[unit] = small.get(unit, 0) + (size if size < ALONE_BYTES else 0)
            let_go[unit] = let_go.get(unit, False) or (lets_go(row, step) and unit != "")
    ordered = {unit: sizes[unit] for unit in units if unit in sizes}
    joined = join_small(ordered, let_go.__getitem__, min(ALONE_BYTES, int(step.bucket_mb * 2**20)))
    turns = [sum(sizes[unit] for unit in one) for one in joined if let_go[one[0]]]
    yield sum(size for unit, size in sizes.items() if not let_go[unit])
    yield from (max(turns[start::2], default=0) for start in (0, 1))
    packed = [small.get("", 0), *(sum(small[unit] for unit in one) for one in joined)]
    yield sum(sorted(packed)[-2:])


def _gradients(rows: Iterable[Row], mesh: MeshShape, step: Step) -> int:
    """What arrives from others, and buckets that are packed in memory of their own: of as many as may be under way."""
    limit = int(step.bucket_mb * 2**20)
    costs, small = [], dict[tuple[int, bool], int]()
    for row in rows:
        count = _divisor(row, "state", mesh)
        if row.grad is None or count == 1:  # an all-reduce borrows nothing
            continue
        size, kept = row.local_bytes(mesh, phase="compute"), _divisor(row, "grad", mesh) == 1
        if size >= ALONE_BYTES:
            costs.append(size * (count - 1) // count)
        else:
            small[count, kept] = small.get((count, kept), 0) + size
    for (count, kept), total in small.items():
        size = min(total, limit + ALONE_BYTES)
        costs += [size * (count - 1) // count + (0 if kept else size)] * -(-total // max(size, 1))
    return min(sum(costs), max(limit, *costs)) if costs else 0


def _updates(rows: Iterable[Row], mesh: MeshShape) -> int:
    """Small parameters in parts, and what they are gathered in; large ones are gathered where they lie."""
    total = 0
    for row in rows:
        count = _divisor(row, "state", mesh)
        if count > 1 and _divisor(row, "stored", mesh) == 1:
            size = row.local_bytes(mesh, phase="compute")
            total += size + size // count if size < ALONE_BYTES else 0
    return total


def _divisor(row: Row, phase: Phase, mesh: MeshShape) -> int:
    """Among how many data ranks a phase divides what is computed with."""
    return math.prod(mesh[axis] for axis in mesh.data_axes if axis in row.added(phase))
