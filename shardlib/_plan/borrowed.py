"""Memory that a training step borrows beside parameters, gradients and state, from the table alone.

An upper bound for both ways in which shards travel (`engine/transport.py`). Where they are sent straight to their
owners, those of all ranks arrive one beside the other. Collectives add them up under way, but take a large tensor from
where it lies only if all its shards are of one size. Activations are not in it: `Plan.report` has those of a dry run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from shardlib._mesh import MeshShape
from shardlib._plan.movements import Movement
from shardlib._plan.step import Step
from shardlib._plan.units import join_small
from shardlib.layout import Layout

__all__ = ["ALONE_BYTES", "borrowed_bytes"]

ALONE_BYTES = 1 << 20
"""From this size on a tensor moves alone: the copies into a bucket then cost more than one more message."""


def borrowed_bytes(movements: Sequence[Movement], mesh: MeshShape, units: Sequence[str], step: Step) -> int:
    """Bytes on the rank that borrows most: whole parameters of units, gradients on their way, updates on theirs."""
    gathered = [one for one in movements if any(each.kind not in ("slice", "copy") for each in one.collectives)]
    return sum(_lent(gathered, mesh, units, step)) + _gradients(gathered, mesh, step) + sum(_updates(gathered, mesh))


def _lent(movements: Iterable[Movement], mesh: MeshShape, units: Sequence[str], step: Step) -> Iterator[int]:
    """Buffers that units take turns in, memory of what stays whole until backward has ended, and what small tensors of
    two units are gathered in."""
    sizes: dict[str, int] = {}
    small: dict[str, int] = {}
    let_go = {one.unit for one in movements if one.purpose == "parameters, backward"} - {""}
    for one in movements:
        if one.purpose == "parameters, forward":
            size = _bytes(one.target, one, mesh)
            sizes[one.unit] = sizes.get(one.unit, 0) + size
            small[one.unit] = small.get(one.unit, 0) + (0 if _goes_alone(size, one.source, one, mesh) else size)
    ordered = {unit: sizes[unit] for unit in units if unit in sizes}
    joined = join_small(ordered, let_go.__contains__, min(ALONE_BYTES, int(step.bucket_mb * 2**20)))
    turns = [sum(sizes[unit] for unit in one) for one in joined if one[0] in let_go]
    yield sum(size for unit, size in sizes.items() if unit not in let_go)
    yield from (max(turns[start::2], default=0) for start in (0, 1))
    packed = [small.get("", 0), *(sum(small[unit] for unit in one) for one in joined)]
    yield sum(sorted(packed)[-2:])


def _gradients(movements: Iterable[Movement], mesh: MeshShape, step: Step) -> int:
    """What arrives from others, and buckets that are packed in memory of their own: of as many as may be under way."""
    limit = int(step.bucket_mb * 2**20)
    costs, small = [], dict[tuple[int, bool], int]()
    for one in movements:
        count = _shards(one.target, one.source, mesh)
        if one.purpose != "gradients" or count == 1:  # an all-reduce borrows nothing
            continue
        size, kept = _bytes(one.source, one, mesh), one.needed == "step ends"
        if size >= ALONE_BYTES:
            costs.append(size * (count - 1) // count + (0 if _goes_alone(size, one.target, one, mesh) else size))
        else:
            small[count, kept] = small.get((count, kept), 0) + size
    for (count, kept), total in small.items():
        size = min(total, limit + ALONE_BYTES)
        costs += [size * (count - 1) // count + (0 if kept else size)] * -(-total // max(size, 1))
    return min(sum(costs), max(limit, *costs)) if costs else 0


def _updates(movements: Iterable[Movement], mesh: MeshShape) -> Iterator[int]:
    """Small parameters in parts, and what they are gathered in; large ones are gathered where they lie."""
    for one in movements:
        if one.purpose == "updated parameters":
            size = _bytes(one.target, one, mesh)
            if not _goes_alone(size, one.source, one, mesh):
                yield size + size // _shards(one.source, one.target, mesh)


def _goes_alone(size: int, shards: Layout, movement: Movement, mesh: MeshShape) -> bool:
    """Whether a tensor of so many bytes moves from and to where it lies, whatever moves it."""
    return size >= ALONE_BYTES and not shards.uneven_dims(movement.global_shape, mesh)


def _shards(layout: Layout, unsharded: Layout, mesh: MeshShape) -> int:
    """Into how many shards one end of a movement divides what the other end has whole, or as a pending sum."""
    return math.prod(mesh[axis] for axis in layout.axes - (unsharded.axes - {*unsharded.partial}))


def _bytes(layout: Layout, movement: Movement, mesh: MeshShape) -> int:
    """Of a tensor at one end of a movement, on the rank with the largest part."""
    return layout.local_bytes(movement.global_shape, movement.dtype, mesh)
