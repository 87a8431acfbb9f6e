"""A plan by the parts of its model: what is before the blocks, a block of each kind, and what is after them.

`Traffic` and memory of a stage are sums over its parts, so that they do not depend on the depth of the model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple, TypeAlias, TypeVar

from shardlib._mesh_shape import MeshShape
from shardlib._plan.buckets import (
    Bucket,
    gradient_buckets,
    unit_bytes,
    units_of,
    unshard_buckets,
    unsharded_bytes,
    update_buckets,
)
from shardlib._plan.cluster import Cluster
from shardlib._plan.memory import Blocks, blocks_per_stage
from shardlib._plan.movements import Movement, movements_of
from shardlib._plan.report import Recorded
from shardlib._plan.rows import Row
from shardlib._plan.schedules import default_schedule, rank_of_stage
from shardlib._plan.table import PlanTable
from shardlib._plan.work import Work
from shardlib.errors import PlanError

__all__ = [
    "Buffer",
    "Held",
    "Links",
    "Message",
    "Parts",
    "PlanPart",
    "Reduced",
    "StageShape",
    "parts_of",
    "schedule_of",
    "shapes_of",
    "stages_of_counts",
]


T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """Bytes that are sent, or copied, together.

    Attributes:
        kind: as in `Cluster.collective_time`, or "copy" between host and device.
        axes: the mesh axes.
        payload: bytes of one rank's local tensors.
        count: the number of collectives; a bucket that is shared with other parts counts as a fraction.
        packed: bytes that are copied into a bucket and out of it.
    """

    kind: str
    axes: tuple[str, ...]
    payload: float
    count: float = 1.0
    packed: float = 0.0


class Buffer(NamedTuple):
    """Bytes that are borrowed from the pool of workspaces, which has buffers of each dtype."""

    dtype: Hashable
    size: int


class Reduced(NamedTuple):
    """A bucket of gradients of one part.

    Attributes:
        form: what it has in common with those of other parts that fill one bucket with it; None where it is alone.
        full: bytes of the gradients, as they are sent.
        held: the same, in the dtype of the gradients.
        shards: bytes of the shards that replace them; 0 where they are reduced in place.
        borrowed: the buffers that it borrows from the pool of workspaces.
        dtype: in which they are sent.
        every_pass: whether they are reduced in each backward pass. Others are full until the last one of a step.
    """

    form: Hashable
    full: int
    held: int
    shards: int
    borrowed: tuple[int, ...]
    dtype: Hashable
    every_pass: bool

    @classmethod
    def of(cls, bucket: Bucket) -> Reduced:
        form = None if bucket.alone else bucket.form
        shards = bucket.shard_bytes if bucket.scattered else 0
        first = bucket.first
        held = bucket.full_bytes * (first.source.dtype or first.dtype).itemsize // first.dtype.itemsize
        return cls(
            form, bucket.full_bytes, held, shards, bucket.borrowed, bucket.first.dtype, bucket.ends == "pass ends"
        )

    def joined(self, other: Reduced) -> Reduced:
        """Return one bucket with the gradients of both."""
        borrowed = tuple(map(sum, zip_longest(self.borrowed, other.borrowed, fillvalue=0)))
        return self._replace(
            full=self.full + other.full,
            held=self.held + other.held,
            shards=self.shards + other.shards,
            borrowed=borrowed,
        )


@dataclass(frozen=True)
class Held:
    """Bytes of one part on the rank with the largest shards, in the memory of the device.

    Attributes:
        parameters, gradients, state, buffers: as in `Memory`.
        host: of all these, what is in host memory; the other fields do not contain it.
        made: the gradients that backward makes, before they are reduced.
        unsharded: parameters that are gathered for computation, and stay.
        turns: those of each unit that is resharded after forward.
        packed: buffers in which small ones of them arrive, by dtype.
        stepped: bytes that an element-wise optimizer reads and writes in a step.
        reduced: the buckets of gradients, in the order in which they are reduced.
        updated: buffers in which small parameters arrive that were updated.
        shards: this rank's shards of them, which are stepped on.
    """

    parameters: int = 0
    gradients: int = 0
    state: int = 0
    buffers: int = 0
    host: int = 0
    made: int = 0
    unsharded: int = 0
    turns: tuple[int, ...] = ()
    packed: tuple[Buffer, ...] = ()
    stepped: int = 0
    reduced: tuple[Reduced, ...] = ()
    updated: tuple[Buffer, ...] = ()
    shards: int = 0


@dataclass(frozen=True)
class PlanPart:
    """The rows of a plan that are in one part.

    Attributes:
        forward, backward: what gathers its parameters, in each pass.
        reduced: what reduces its gradients.
        every_pass: whether it is reduced in each backward pass, not only in the last one of a step.
        stepped: what moves for the optimizer, and the updated parameters, once a step.
        resharded: whether its parameters are resharded after forward.
        held: its memory.
    """

    forward: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()
    reduced: tuple[Message, ...] = ()
    every_pass: bool = False
    stepped: tuple[Message, ...] = ()
    resharded: bool = False
    held: Held = Held()


@dataclass(frozen=True)
class StageShape:
    """The parts that one stage of a pipeline runs; without one, those of the model.

    Attributes:
        kinds: of its blocks, in order.
        before, after: whether it runs what is before the first block, and after the last one.
        rank: its coordinate on the pipeline axis.
    """

    kinds: tuple[int, ...]
    before: bool = True
    after: bool = True
    rank: int = 0

    def parts(self, before: T, after: T, kinds: Sequence[T]) -> list[T]:
        """Return what it runs, in the order of forward."""
        return [before] * self.before + [kinds[kind] for kind in self.kinds] + [after] * self.after


Parts: TypeAlias = tuple[PlanPart, PlanPart, tuple[PlanPart, ...]]
"""The parts of a plan before and after the blocks, and of a block of each kind."""


def schedule_of(plan: PlanTable, shapes: Sequence[StageShape]) -> tuple[str, int, int]:
    """Return the schedule of a pipeline, its ranks, and its microbatches: twice as many as ranks where the plan leaves
    their number open."""
    ranks = 1 + max(shape.rank for shape in shapes)
    return plan.step.schedule or default_schedule(ranks, len(shapes)), ranks, plan.step.microbatches or 2 * ranks


def shapes_of(plan: PlanTable, work: Work) -> tuple[StageShape, ...]:
    """Return the stages of a plan: those that its rules name, or else equal runs of blocks."""
    axes = plan.mesh.pipeline_axes
    ranks = plan.mesh.only(axes).world_size if axes else 1
    if ranks == 1:
        return (StageShape(work.order),)
    if plan.stages and plan.blocks is not None:
        schedule = plan.step.schedule or default_schedule(ranks, len(plan.stages))
        names = [f"{plan.blocks.prefix}.{index}." for index in range(len(work.order))]
        made = []
        for number, stage in enumerate(plan.stages):
            inside = [any(name.startswith(f"{module}.") for module in stage.modules) for name in names]
            kinds = tuple(kind for kind, here in zip(work.order, inside, strict=True) if here)
            rank = rank_of_stage(schedule, ranks, number)
            made.append(StageShape(kinds, number == 0, number == len(plan.stages) - 1, rank))
        return tuple(made)
    return stages_of_counts(work.order, blocks_per_stage(len(work.order), ranks), ranks, plan.step.schedule)


def stages_of_counts(order: Sequence[int], counts: Sequence[int], ranks: int, schedule: str) -> tuple[StageShape, ...]:
    """Return stages with so many blocks each."""
    name = schedule or default_schedule(ranks, len(counts))
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    return tuple(
        StageShape(
            tuple(order[end - count : end]), number == 0, number == len(counts) - 1, rank_of_stage(name, ranks, number)
        )
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


def parts_of(plan: PlanTable, work: Work, examples: Sequence[int], *, state_tensors: int = 2) -> Parts:
    """Return the parts before and after the blocks, and of a block of each kind.

    Args:
        plan: the plan of the model, or of the model that is cut.
        work: a record of it.
        examples: the index of the block in the plan's rows that stands for each kind.
        state_tensors: tensors of optimizer state for each parameter.

    Raises:
        PlanError: that is not a number, or below 0.
    """
    if isinstance(state_tensors, bool) or not isinstance(state_tensors, int) or state_tensors < 0:
        raise PlanError(f"state_tensors={state_tensors!r} was given; give a number of 0 or more, such as 2 for Adam.")
    partial = dict(work.partial)
    rows = [row.replace(partial=partial.get(row.name, row.partial)) if row.grad else row for row in plan.rows]
    before, after, blocks = _divided(rows, plan.blocks)
    ranks = plan.mesh.only(plan.mesh.pipeline_axes).world_size if plan.mesh.pipeline_axes else 1
    shared = {row.name: 2 for row in before if ranks > 1 and _is_tied_across(row, plan.blocks)}

    def part(own: Sequence[Row]) -> PlanPart:
        return _part(own, plan, shared, state_tensors)

    return part(before), part(after), tuple(part(blocks.get(index, ())) for index in examples)


def _divided(rows: Sequence[Row], blocks: Blocks | None) -> tuple[list[Row], list[Row], dict[int, list[Row]]]:
    before: list[Row] = []
    after: list[Row] = []
    inside: dict[int, list[Row]] = {}
    for row in rows:
        index = blocks.index(row.name) if blocks else None
        if index is not None:
            inside.setdefault(index, []).append(row)
        else:
            (after if blocks is None or row.name in blocks.after else before).append(row)
    return before, after, inside


def _is_tied_across(row: Row, blocks: Blocks | None) -> bool:
    """Return whether a tensor is both before the blocks and after them, as a tied embedding."""
    return blocks is not None and len({name in blocks.after for name in row.tied}) > 1


def _part(rows: Sequence[Row], plan: PlanTable, shared: Mapping[str, int], state_tensors: int) -> PlanPart:
    mesh, step = plan.mesh, plan.step
    every = [*movements_of(rows, mesh, plan.units, step, holders=shared)]
    units = units_of(every, plan.units, mesh, step)
    gathered = [(unit, bucket) for unit in units for bucket in unshard_buckets(unit, mesh)]
    buckets = gradient_buckets(reversed(every), mesh, step)
    # Bytes that are copied into a bucket and out of it.
    forward = tuple(
        each for _, bucket in gathered for each in _messages(bucket.movements, mesh, packed=not bucket.alone)
    )
    again = tuple(
        each
        for unit, bucket in gathered
        if unit.resharded
        for each in _messages(bucket.movements, mesh, packed=not bucket.alone)
    )
    reduced = tuple(
        replace(each, count=each.count if bucket.alone else min(1.0, each.payload / step.bucket_bytes))
        for bucket in buckets
        for each in _messages(bucket.movements, mesh, packed=not bucket.alone)
    )
    rest = [one for one in every if one.purpose not in _PASSES]
    updates = update_buckets(rest, mesh, step, ())
    in_updates = {id(one) for bucket in updates for one in bucket.movements}
    stepped = [each for bucket in updates for each in _messages(bucket.movements, mesh, packed=not bucket.alone)]
    stepped += [each for one in rest if id(one) not in in_updates for each in _messages((one,), mesh)]
    return PlanPart(
        forward=forward,
        backward=again,
        reduced=reduced,
        every_pass=any(one.needed == "pass ends" for one in every if one.purpose == "gradients"),
        stepped=tuple(stepped),
        resharded=any(unit.resharded for unit in units),
        held=replace(
            _held(rows, mesh, state_tensors),
            unsharded=sum(unit_bytes(unit, mesh) for unit in units if not unit.resharded),
            turns=tuple(unit_bytes(unit, mesh) for unit in units if unit.resharded),
            packed=_packed(bucket for _, bucket in gathered),
            reduced=tuple(Reduced.of(bucket) for bucket in buckets),
            updated=_packed(updates),
            shards=sum(bucket.shard_bytes for bucket in updates if bucket.packed_bytes),
        ),
    )


def _packed(buckets: Iterable[Bucket]) -> tuple[Buffer, ...]:
    return tuple(Buffer(bucket.first.dtype, bucket.packed_bytes) for bucket in buckets if bucket.packed_bytes)


_PASSES = ("parameters, forward", "parameters, backward", "gradients")


def _messages(movements: Sequence[Movement], mesh: MeshShape, *, packed: bool = False) -> Iterator[Message]:
    """Iterate over the collectives of movements that travel together, one for each step."""
    first = movements[0]
    for number, step in enumerate(first.collectives):
        if step.kind == "slice":
            continue
        sent = sum(one.collectives[number].bytes for one in movements) * (first.times if _is_once(first) else 1)
        ranks = math.prod(mesh[axis] for axis in step.axes)
        kind, payload = _payload(step.kind, sent, ranks)
        full = sum(unsharded_bytes(one, mesh) for one in movements) if packed else 0
        yield Message(kind, step.axes, payload, packed=2.0 * full)


def _is_once(one: Movement) -> bool:
    """Return whether `times` counts tensors of state, not passes."""
    return one.purpose not in _PASSES


def _payload(kind: str, sent: float, ranks: int) -> tuple[str, float]:
    """Return the kind, as clusters name it, and the bytes that a rank contributes where it sends so many."""
    if kind == "copy" or ranks < 2:
        return kind, sent
    if kind == "all_reduce":
        return kind, sent * ranks / (2 * (ranks - 1))
    if kind == "all_gather":
        return kind, sent / (ranks - 1)
    # To and from owners, which are spread over the ranks.
    kind = "all_to_all" if kind in ("gather", "scatter") else kind
    return kind, sent * ranks / (ranks - 1)


def _held(rows: Sequence[Row], mesh: MeshShape, state_tensors: int) -> Held:
    total = dict.fromkeys(("parameters", "gradients", "state", "buffers", "host", "made", "stepped"), 0)

    def add(what: str, size: int, *, on_host: bool) -> None:
        total["host" if on_host else what] += size

    for row in rows:
        stored = row.local_bytes(mesh)
        add("parameters" if row.kind == "parameter" else "buffers", stored, on_host=row.stored.memory == "host")
        if row.grad is None or row.state is None:
            continue
        gradient, state = row.local_bytes(mesh, phase="grad"), row.local_bytes(mesh, phase="state")
        add("gradients", gradient, on_host=row.grad.memory == "host")
        copies = state_tensors + row.has_master
        add("state", copies * state, on_host=row.state.memory == "host")
        numel = math.prod(row.local_shape(mesh, phase="compute"))
        total["made"] += numel * max((row.grad.dtype or row.dtype).itemsize, (row.compute.dtype or row.dtype).itemsize)
        own = math.prod(row.local_shape(mesh, phase="state"))
        low = (row.stored.dtype or row.dtype).itemsize
        # Read the gradient, read and write each tensor of state and the parameter.
        total["stepped"] += (
            own * (row.grad.dtype or row.dtype).itemsize + 2 * copies * state + 2 * own * low * (not row.has_master)
            + own * low * row.has_master
        )  # fmt: skip
    return replace(Held(), **total)  # type: ignore[arg-type]


class Links:
    """Seconds of messages on a mesh of a cluster: a collective of some axes takes a + b * payload."""

    def __init__(self, cluster: Cluster, mesh: MeshShape) -> None:
        self.cluster, self.mesh = cluster, mesh
        self._lines: dict[tuple[str, tuple[str, ...], int], tuple[float, float]] = {}

    def seconds(self, message: Message) -> float:
        """Return the seconds of a message, with the copies into its bucket and out of it."""
        if message.kind == "copy":
            return self.cluster.host_time(message.payload)
        latency, per_byte = self._line(message.kind, message.axes, 0)
        packing = message.packed / self.cluster.memory_bandwidth.sustained
        return message.count * latency + message.payload * per_byte + packing

    def of_record(self, one: Recorded) -> float:
        """Return the seconds of a collective of a record."""
        kind = _KIND_OF.get(one.kind, one.kind)
        if kind == "":
            return 0.0
        latency, per_byte = self._line(kind, one.axes, one.size)
        return latency + one.bytes * per_byte

    def _line(self, kind: str, axes: tuple[str, ...], size: int) -> tuple[float, float]:
        key = (kind, axes, size if not axes else 0)
        if key not in self._lines:
            group = _group(self.mesh, axes) if axes else tuple(range(size))
            latency = self.cluster.collective_time(kind, 0, group)
            self._lines[key] = latency, (self.cluster.collective_time(kind, 2**30, group) - latency) / 2**30
        return self._lines[key]


# A receive is the other end of a send, and a barrier a message without bytes.
_KIND_OF = {
    "receive": "",
    "barrier": "all_reduce",
    "reduce": "reduce_scatter",
    "gather": "all_gather",
    "scatter": "broadcast",
}


@functools.lru_cache(maxsize=4096)
def _group(mesh: MeshShape, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Return the ranks that differ from rank 0 on some axes only."""
    strides, stride = {}, 1
    for axis, size in reversed(mesh.items()):
        strides[axis], stride = stride, stride * size
    ranks = [0]
    for axis in mesh.names:
        if axis in axes:
            ranks = [rank + index * strides[axis] for rank in ranks for index in range(mesh[axis])]
    return tuple(ranks)
