"""Workspace of a training step beside parameters, gradients and state, computed from the plan alone.

The result is an upper bound for both transports (`engine/transport.py`). Point-to-point transport receives the shards
of all ranks side by side. Collectives reduce them in transfer, but read a large tensor in place only if all its shards
have the same size. Activations are not included: `Plan.report` has those of a dry run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from shardlib._mesh import MeshShape
from shardlib._plan.movements import Movement
from shardlib._plan.step import Step
from shardlib._plan.units import join_small
from shardlib.layout import Layout

__all__ = ["workspace_bytes"]


def workspace_bytes(movements: Sequence[Movement], mesh: MeshShape, units: Sequence[str], step: Step) -> int:
    """Return the bytes on the rank that needs most: unsharded parameters, gradients and updates in transfer."""
    gathered = [one for one in movements if any(each.kind not in ("slice", "copy") for each in one.collectives)]
    return (
        sum(_unsharded(gathered, mesh, units, step)) + _gradients(gathered, mesh, step) + sum(_updates(gathered, mesh))
    )


def _unsharded(movements: Iterable[Movement], mesh: MeshShape, units: Sequence[str], step: Step) -> Iterator[int]:
    """Iterate over the bytes of the buffers that units alternate between, of parameters that stay unsharded until
    backward has ended, and of the buckets that gather small tensors of two units."""
    sizes: dict[str, int] = {}
    small: dict[str, int] = {}
    resharded = {one.unit for one in movements if one.purpose == "parameters, backward"} - {""}
    for one in movements:
        if one.purpose == "parameters, forward":
            size = _bytes(one.target, one, mesh)
            sizes[one.unit] = sizes.get(one.unit, 0) + size
            small[one.unit] = small.get(one.unit, 0) + (0 if _in_place(one, one.source, mesh) else size)
    ordered = {unit: sizes[unit] for unit in units if unit in sizes}
    joined = join_small(ordered, resharded.__contains__, step.joined_bytes)
    turns = [sum(sizes[unit] for unit in one) for one in joined if one[0] in resharded]
    yield sum(size for unit, size in sizes.items() if unit not in resharded)
    yield from (max(turns[start::2], default=0) for start in (0, 1))
    packed = [small.get("", 0), *(sum(small[unit] for unit in one) for one in joined)]
    yield sum(sorted(packed)[-2:])


def _gradients(movements: Iterable[Movement], mesh: MeshShape, step: Step) -> int:
    """Return the bytes of received shards and of packed buckets, for as many as can be in flight."""
    limit = step.bucket_bytes
    costs, small, largest = [], dict[int, int](), step.unbucketed_bytes
    for one in movements:
        count = _shards(one.target, one.source, mesh)
        if one.purpose != "gradients":
            continue
        size = _bytes(one.source, one, mesh)
        if one.unbucketed:
            in_place = count == 1 or _in_place(one, one.target, mesh)
            costs.append(size * (count - 1) // count + (0 if in_place else size))
        else:
            small[count], largest = small.get(count, 0) + size, max(largest, size)
    for count, total in small.items():
        size = min(total, limit + largest)
        costs += [size * (count - 1) // count + size] * -(-total // max(size, 1))
    return min(sum(costs), max(limit, *costs)) if costs else 0


def _updates(movements: Iterable[Movement], mesh: MeshShape) -> Iterator[int]:
    """Iterate over the bytes of small shards and of their gathered bucket; large parameters are gathered in place."""
    for one in movements:
        if one.purpose == "updated parameters":
            size = _bytes(one.target, one, mesh)
            if not _in_place(one, one.source, mesh):
                yield size + size // _shards(one.source, one.target, mesh)


def _in_place(movement: Movement, shards: Layout, mesh: MeshShape) -> bool:
    """Return whether a tensor is sent from and received in its own memory, by either transport."""
    return movement.unbucketed and not shards.uneven_dims(movement.global_shape, mesh)


def _shards(layout: Layout, unsharded: Layout, mesh: MeshShape) -> int:
    """Return the number of shards into which `layout` divides a tensor that `unsharded` has in full, or as a pending
    sum."""
    return math.prod(mesh[axis] for axis in layout.axes - (unsharded.axes - {*unsharded.partial}))


def _bytes(layout: Layout, movement: Movement, mesh: MeshShape) -> int:
    """Return the bytes of the largest local shard at one end of a movement."""
    return layout.local_bytes(movement.global_shape, movement.dtype, mesh)
