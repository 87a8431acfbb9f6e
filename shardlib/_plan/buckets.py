"""Buckets: movements of a training step that one collective carries out together.

Tensors that move at the same time and in the same way share a bucket, which is one message in place of many. A large
tensor moves by itself, from its own memory and into it. Memory estimates read the buckets of a plan, and the executor
runs them, so that both agree on what is sent together.

A plan does not have the order of gradients in backward. It is that of the given movements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from shardlib._mesh_shape import MeshShape
from shardlib._plan.movements import Movement
from shardlib._plan.step import Step
from shardlib._plan.units import join_small
from shardlib.layout import Layout

__all__ = [
    "Bucket",
    "Unit",
    "gradient_buckets",
    "unit_bytes",
    "units_of",
    "unshard_buckets",
    "unsharded_bytes",
    "update_buckets",
    "workspace_bytes",
]


@dataclass(frozen=True)
class Bucket:
    """Movements that one collective carries out together.

    Attributes:
        movements: the movements, of one purpose, between layouts that are split over the same axes.
        mesh: the mesh of their layouts.
    """

    movements: tuple[Movement, ...]
    mesh: MeshShape

    @property
    def first(self) -> Movement:
        return self.movements[0]

    @property
    def alone(self) -> bool:
        """Whether the bucket is one tensor, which moves from its own memory and into it."""
        return self.first.unbucketed

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return tuple(one.name for one in self.movements)

    @property
    def ends(self) -> str:
        """The time at which the bucket must have arrived: the end of a backward pass, or that of a step."""
        return self.first.needed

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes over which gradients are summed, in mesh order."""
        return summed_over(self.first, self.mesh)

    @property
    def scattered(self) -> tuple[str, ...]:
        """The axes over which gradients are reduced to shards; none where every rank gets the full sum."""
        return next((step.axes for step in self.first.collectives if step.kind == "reduce_scatter"), ())

    @property
    def shard_bytes(self) -> int:
        """The bytes of one rank's shards, on the rank where they are largest."""
        return sum(_shard_bytes(one, self.mesh) for one in self.movements)

    @property
    def count(self) -> int:
        """The number of ranks among which the bucket is divided; 1 for an all-reduce."""
        unsharded, shards = _ends(self.first)
        return math.prod(self.mesh[axis] for axis in shards.axes - (unsharded.axes - {*unsharded.partial}))

    @property
    def workspace_bytes(self) -> int:
        """The bytes that the bucket borrows while it moves, at most.

        Shards of other ranks arrive beside each other where gradients are summed. Packed tensors have a buffer, as has
        a large one whose shards differ in size. A bound for both transports: collectives reduce in transfer.
        """
        packed = self.packed_bytes
        if self.first.purpose == "gradients":
            return sum(self.borrowed)
        if self.first.purpose == "updated parameters" and packed:
            return packed + self.shard_bytes  # which is stepped on
        return packed

    @property
    def borrowed(self) -> tuple[int, ...]:
        """The bytes of each buffer that a bucket of gradients borrows from the pool of workspaces, at most."""
        return tuple(size for size in (self.packed_bytes, self.shard_bytes * (self.count - 1)) if size)

    @property
    def form(self) -> tuple[Hashable, ...]:
        """The facts that movements which share a bucket have in common."""
        return _form(self.first)

    @property
    def full_bytes(self) -> int:
        """The bytes of the unsharded tensors."""
        return sum(unsharded_bytes(one, self.mesh) for one in self.movements)

    @property
    def packed_bytes(self) -> int:
        """The bytes of the buffer in which the tensors are packed."""
        in_place = self.alone and (self.count == 1 or not self._uneven())
        return 0 if in_place else self.shard_bytes * self.count

    def _uneven(self) -> bool:
        shards = _ends(self.first)[1]
        return bool(shards.uneven_dims(self.first.global_shape, self.mesh))


@dataclass(frozen=True)
class Unit:
    """Modules whose stored parameters are gathered together: a block, or several small modules.

    Attributes:
        modules: the names of the modules; "" stands for the parameters outside of units.
        movements: the movements that gather their parameters before forward.
        resharded: whether they are resharded after forward. Units that are alternate between two buffers.
    """

    modules: tuple[str, ...]
    movements: tuple[Movement, ...]
    resharded: bool


def units_of(movements: Iterable[Movement], units: Sequence[str], mesh: MeshShape, step: Step) -> tuple[Unit, ...]:
    """Return the units of parameters that are stored in shards, in the model's order, those outside of units last.

    Args:
        movements: movements of a step.
        units: the modules that are units, in the model's order. Small neighbours are joined.
        mesh: the mesh of the movements.
        step: the settings of the step.
    """
    every = [one for one in movements if one.is_sent]
    again = {one.name for one in every if one.purpose == "parameters, backward"}
    groups: dict[str, list[Movement]] = {}
    for one in every:
        if one.purpose == "parameters, forward":
            groups.setdefault(one.unit, []).append(one)
    resharded = {unit: unit != "" and any(one.name in again for one in group) for unit, group in groups.items()}
    for unit in [unit for unit in groups if resharded[unit]]:
        # A tensor that stays unsharded, as one that another stage has too, is with those outside of units.
        staying = [one for one in groups[unit] if one.name not in again]
        groups[unit] = [one for one in groups[unit] if one.name in again]
        if staying:
            groups.setdefault("", []).extend(staying)
    sizes = {unit: sum(unsharded_bytes(one, mesh) for one in groups[unit]) for unit in units if unit in groups}
    joined = join_small(sizes, resharded.__getitem__, step.joined_bytes)
    made = [Unit(names, tuple(one for name in names for one in groups[name]), resharded[names[0]]) for names in joined]
    return (*made, Unit(("",), tuple(groups[""]), resharded=False)) if "" in groups else tuple(made)


def unshard_buckets(unit: Unit, mesh: MeshShape) -> list[Bucket]:
    """Return the buckets that gather the parameters of a unit."""
    return _buckets(unit.movements, mesh, limit=None)


def gradient_buckets(movements: Iterable[Movement], mesh: MeshShape, step: Step) -> list[Bucket]:
    """Return the buckets in which gradients are summed, in the order in which they become full.

    Args:
        movements: movements of a step. Those of gradients are in the order in which backward makes them.
        mesh: the mesh of the movements.
        step: the settings of the step.
    """
    every = list(movements)
    stored = {one.name for one in every if one.purpose == "parameters, forward" and one.is_sent}
    summed = [one for one in every if one.purpose == "gradients" and summed_over(one, mesh)]
    return _buckets(summed, mesh, step.bucket_bytes, lambda one: one.name in stored)


def update_buckets(
    movements: Iterable[Movement], mesh: MeshShape, step: Step, repeated: Collection[str]
) -> list[Bucket]:
    """Return the buckets that gather updated parameters, which are not stored in shards.

    Args:
        movements: movements of a step.
        mesh: the mesh of the movements.
        step: the settings of the step.
        repeated: the repeated blocks. Where updates overlap with the next forward, each waits for its own.
    """
    updates = [one for one in movements if one.purpose == "updated parameters" and one.is_sent]
    return _buckets(updates, mesh, step.bucket_bytes, lambda one: step.overlap and one.unit in repeated)


def workspace_bytes(movements: Iterable[Movement], units: Sequence[str], mesh: MeshShape, step: Step) -> int:
    """Return the bytes that a step borrows beside parameters, gradients and state, on the rank that needs most.

    Unsharded parameters, and what is packed and in transfer. An upper bound, for the order of gradients in which
    parameters are registered, reversed. Activations are not included: `Plan.report` has those of a dry run.
    """
    every = list(movements)
    gathered = units_of(every, units, mesh, step)
    turns = [unit_bytes(unit, mesh) for unit in gathered if unit.resharded]
    buffers = sum(max(turns[start::2], default=0) for start in (0, 1))
    buffers += sum(unit_bytes(unit, mesh) for unit in gathered if not unit.resharded)
    packed = sorted(sum(one.workspace_bytes for one in unshard_buckets(unit, mesh)) for unit in gathered)
    reduced = [one.workspace_bytes for one in gradient_buckets(reversed(every), mesh, step)]
    in_flight = min(sum(reduced), max(step.bucket_bytes, *reduced)) if reduced else 0
    updated = sum(one.workspace_bytes for one in update_buckets(every, mesh, step, ()))
    return buffers + sum(packed[-2:]) + in_flight + updated


def summed_over(movement: Movement, mesh: MeshShape) -> tuple[str, ...]:
    """Return the axes over which a movement sums, in mesh order."""
    pending = movement.source.partial.keys() - movement.target.partial.keys()
    return tuple(axis for axis, size in mesh.items() if size > 1 and axis in pending)


def _buckets(
    movements: Iterable[Movement],
    mesh: MeshShape,
    limit: int | None,
    apart: Callable[[Movement], Hashable] = lambda _: None,
) -> list[Bucket]:
    """Put movements together until they reach a size, of one form and with an equal `apart`; a tensor that moves by
    itself is a bucket."""
    made: list[Bucket] = []
    pending: dict[Hashable, list[Movement]] = {}
    filled: dict[Hashable, int] = {}
    for one in movements:
        if one.unbucketed:
            made.append(Bucket((one,), mesh))
            continue
        form = (*_form(one), apart(one))
        pending.setdefault(form, []).append(one)
        filled[form] = filled.get(form, 0) + unsharded_bytes(one, mesh)
        if limit is not None and filled[form] >= limit:
            made.append(Bucket(tuple(pending.pop(form)), mesh))
            del filled[form]
    return made + [Bucket(tuple(group), mesh) for group in pending.values()]


def _form(one: Movement) -> tuple[Hashable, ...]:
    """Return what the movements of one bucket have in common: collectives, dtypes, memory, time."""
    steps = tuple((step.kind, step.axes) for step in one.collectives)
    ends = ((layout.dtype, layout.memory) for layout in (one.source, one.target))
    return (one.purpose, steps, one.dtype, *ends, one.needed)


def _ends(one: Movement) -> tuple[Layout, Layout]:
    """Return the layouts of the unsharded tensor and of the shards."""
    return (one.source, one.target) if one.purpose == "gradients" else (one.target, one.source)


def unsharded_bytes(one: Movement, mesh: MeshShape) -> int:
    """Return the bytes of the unsharded tensor of a movement, in the dtype that is sent."""
    return _numel(_ends(one)[0], one.global_shape, mesh) * one.dtype.itemsize


def _shard_bytes(one: Movement, mesh: MeshShape) -> int:
    return _numel(_ends(one)[1], one.global_shape, mesh) * one.dtype.itemsize


@functools.lru_cache(maxsize=65536)
def _numel(layout: Layout, global_shape: tuple[int, ...], mesh: MeshShape) -> int:
    """Return the number of elements of the largest local shard, that of the first rank."""
    return math.prod(layout.local_shape(global_shape, mesh, dict.fromkeys(mesh.names, 0)))


def unit_bytes(unit: Unit, mesh: MeshShape) -> int:
    """Return the bytes of the unsharded parameters of a unit."""
    return sum(unsharded_bytes(one, mesh) for one in unit.movements)
