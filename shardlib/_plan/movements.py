"""Movements of a training step between the phases of its tensors, computed from the plan alone.

A movement is the transition between two phases of a tensor (`shardlib.layout.transition`), with its time. Where the
stored layout is split further than the compute layout, parameters are gathered before forward, and again before
backward if they were resharded. Gradients leave backward as a pending sum over the data axes. Where state is split
further than the stored layout, updated parameters are gathered after the optimizer step. Copies between host and device
memory belong to the same transitions. Rajbhandari et al. 2020, section 7, count the same: 2 P (n-1)/n elements of P
parameters without splits and at stages 1 and 2, 3 P (n-1)/n at stage 3.

What the step itself needs depends on the optimizer, which no plan knows: `Optimizer` names the three kinds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from shardlib._dtypes import keeps_dtype_names
from shardlib._mesh_shape import MeshShape
from shardlib._plan.readable import aligned, human_bytes
from shardlib._plan.rows import Row
from shardlib._plan.schedules import splits_backward
from shardlib._plan.step import Step
from shardlib._plan.units import unit_of
from shardlib.errors import LayoutError
from shardlib.layout import Collective, Layout, cost, shard_spec, transition

if TYPE_CHECKING:
    import torch

__all__ = [
    "Movement",
    "Optimizer",
    "Purpose",
    "StateShapes",
    "Traffic",
    "TrafficTable",
    "like_parameter",
    "movements_of",
    "needs_owner",
    "reshards_after_forward",
    "state_update",
    "sum_up",
]

Purpose: TypeAlias = Literal[
    "parameters, forward",
    "parameters, backward",
    "gradients",
    "gradients, stages",
    "parameters, step",
    "gradients, step",
    "state, step",
    "updated parameters",
    "updated state",
]
_ORDER: tuple[Purpose, ...] = get_args(Purpose)

Optimizer: TypeAlias = Literal["elementwise", "per_tensor", "unknown"]
"""What an optimizer needs: local shards, as one that is registered as element-wise does; full tensors, each on one
rank, its owner, as one that is registered as per-tensor does; full gradients on every rank."""

StateShapes: TypeAlias = Callable[[tuple[int, ...]], Iterable[tuple[int, ...]]]
"""Returns the shapes of the tensors of optimizer state, given the global shape of a parameter."""

Event: TypeAlias = Literal["step begins", "forward", "backward", "gradient", "pass ends", "optimizer", "step ends"]
"""The time at which a tensor exists, or is needed: "forward" and "backward" are those of its unit; "gradient" is when
backward has computed its gradient, "pass ends" the end of a backward pass, "optimizer" the update of the tensor."""


@keeps_dtype_names
@dataclass(frozen=True)
class Movement:
    """One tensor redistributed from one phase of the plan to another.

    Attributes:
        name, global_shape: name and global shape of the tensor, as in its row.
        purpose: "parameters, forward" and "parameters, backward" unshard stored shards; "gradients" reduces the
            gradients of backward; "gradients, stages" sums those of a parameter that several stages of a pipeline
            hold; "parameters, step", "gradients, step" and "state, step" bring to the optimizer what it steps on;
            "updated parameters" and "updated state" bring the results to their stored layout and to that of the state.
        source, target: the layouts at both ends, with dtype and memory.
        dtype: the dtype that is sent.
        collectives: the steps of `shardlib.layout.transition`, copies between host and device memory included; and
            "gather" and "scatter", to and from the one rank that steps a full tensor.
        ready: the time at which its source exists.
        needed: the time at which its target must exist. The movement can run at any time between the two.
        unit: the unit whose forward or backward needs it; "" for the model.
        times: the number of times per step.
        unbucketed: whether it moves by itself, without a copy into a bucket: the tensor is large, and each rank's shard
            is contiguous in it.
    """

    name: str
    global_shape: tuple[int, ...]
    purpose: Purpose
    source: Layout
    target: Layout
    dtype: torch.dtype
    collectives: tuple[Collective, ...]
    ready: Event
    needed: Event
    unit: str = ""
    times: int = 1
    unbucketed: bool = False

    @property
    def moves(self) -> bool:
        """Whether anything is sent or copied; else each rank has all elements that it needs."""
        return any(step.kind != "slice" for step in self.collectives)

    @property
    def is_sent(self) -> bool:
        """Whether anything is sent over the network."""
        return any(step.kind not in ("slice", "copy") for step in self.collectives)

    @property
    def bytes(self) -> int:
        """The bytes that one rank sends in a step, averaged over ranks; copies between host and device do not count."""
        return self.times * cost(self.collectives)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind for one purpose, in a training step.

    Attributes:
        what: the purpose, as in `Movement`.
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "gather" or "scatter".
        axes: the axes that they run over, in mesh order.
        bytes: the bytes that one rank sends in all of them, averaged over ranks.
        tensors: the number of tensors.
        times: the number of times per step that each is sent; `bytes` counts all.
    """

    what: Purpose
    kind: str
    axes: tuple[str, ...]
    bytes: int
    tensors: int
    times: int = 1


class TrafficTable(tuple[Traffic, ...]):
    """The bytes that one rank sends in a training step; prints as a table.

    >>> print(TrafficTable([Traffic("gradients", "all_reduce", ("dp",), 49152, 4)]))
    what       collective  over  tensors  times     bytes
    gradients  all_reduce  dp          4      1  48.0 KiB
    """

    columns = "what", "collective", "over", "tensors", "times", "bytes"

    def cells(self) -> list[list[str]]:
        """Return the rows of the table, below `columns`."""
        return [
            [each.what, each.kind, ",".join(each.axes), str(each.tensors), str(each.times), human_bytes(each.bytes)]
            for each in self
        ]

    def __str__(self) -> str:
        sums = [["total", "", "", "", "", human_bytes(sum(each.bytes for each in self))]] if len(self) > 1 else []
        return aligned([list(self.columns), *self.cells(), *sums], left=3) if self else "nothing is sent"


def sum_up(movements: Iterable[Movement]) -> TrafficTable:
    """Sum up the bytes of movements by purpose, collective and axes."""
    total: dict[tuple[Purpose, str, tuple[str, ...], int], tuple[int, int]] = {}
    for one in movements:
        for step in one.collectives:
            if step.kind not in ("slice", "copy"):
                key = (one.purpose, step.kind, step.axes, one.times)
                sent, tensors = total.get(key, (0, 0))
                total[key] = sent + one.times * step.bytes, tensors + 1
    summed = (Traffic(*key[:3], sent, tensors, key[3]) for key, (sent, tensors) in total.items())
    return TrafficTable(sorted(summed, key=lambda each: _ORDER.index(each.what)))


def reshards_after_forward(row: Row, step: Step) -> bool:
    """Return whether a parameter that is stored sharded is resharded between its forward and its backward.

    Under a schedule that defers gradients of weights, all parameters stay unsharded until the step has ended.
    """
    return row.reshard and not splits_backward(step.schedule)


def like_parameter(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of state that is one tensor of the parameter's shape, such as momentum."""
    return (shape,)


def movements_of(
    rows: Sequence[Row],
    mesh: MeshShape,
    units: Iterable[str],
    step: Step,
    *,
    holders: Mapping[str, int] | None = None,
    optimizer: Optimizer = "elementwise",
    state: StateShapes = like_parameter,
) -> Iterator[Movement]:
    """Iterate over the movements of a step for some rows, in their order; phases with equal layouts have none.

    Args:
        rows: rows of the plan.
        mesh: its mesh.
        units: modules whose parameters are gathered together.
        step: the settings of the step.
        holders: the number of pipeline ranks that hold a parameter, by name, where there are several.
        optimizer: what the optimizer needs.
        state: the shapes of its state, for one that needs full tensors.
    """
    inside, shared = frozenset(units), holders or {}
    known: dict[tuple[object, ...], list[Movement]] = {}  # of rows of one form
    for row in rows:
        count = shared.get(row.name, 1)
        if (key := (row.form, count)) not in known:
            through = (
                _unshard(row, mesh, step),
                _reduce(row, mesh, step, count),
                _step(row, mesh, step, optimizer, state),
            )
            known[key] = [one for part in through for one in part if one.moves]
        unit = unit_of(row.tied, inside) if known[key] else ""
        for one in known[key]:
            ends = one.purpose, one.source, one.target, one.dtype, one.collectives, one.ready, one.needed
            # Several times faster than `replace`.
            yield Movement(row.name, one.global_shape, *ends, unit, one.times, one.unbucketed)


def _unshard(row: Row, mesh: MeshShape, step: Step) -> Iterator[Movement]:
    reshards = reshards_after_forward(row, step)
    passes = step.accumulate * (step.microbatches or 1 if reshards else 1)  # through a pipeline
    stored, compute, dtype = _phase(row, row.stored), _phase(row, row.compute), _dtype(row, row.compute)
    forward = _movement(row, mesh, "parameters, forward", stored, compute, dtype, "step begins", "forward", passes)
    forward = replace(forward, unbucketed=_is_unbucketed(row, compute, stored, mesh, step))
    yield forward
    if reshards:
        yield replace(forward, purpose="parameters, backward", needed="backward")


def _reduce(row: Row, mesh: MeshShape, step: Step, holders: int) -> Iterator[Movement]:
    """Iterate over the reductions of a gradient. Each rank reduces the shard that it updates: where state is split and
    the gradient is not, the rest of the gradient keeps its memory and is not summed."""
    if row.grad is None or row.state is None:
        return
    summed = [axis for axis in mesh.data_axes if mesh[axis] > 1 and axis not in row.compute.axes]
    made = replace(_phase(row, row.compute), partials=tuple((axis, "sum") for axis in (*summed, *row.partial)))
    if row.stored.axes.isdisjoint(row.grad.axes - row.compute.axes):  # it adds up in `p.grad` before it is reduced
        made = replace(made, dtype=_dtype(row, row.grad))
    reduced, dtype, end = _reduced(row), _dtype(row, row.grad), _end(row, mesh)
    passes = 1 if end == "step ends" else step.accumulate
    travels = step.reduce_dtype or _dtype(row, row.compute)
    alone = travels == made.dtype and _is_unbucketed(row, _phase(row, row.compute), reduced, mesh, step)
    reduction = _movement(row, mesh, "gradients", made, reduced, travels, "gradient", end, passes)
    yield replace(reduction, unbucketed=alone)
    if holders > 1:
        (axis,) = mesh.pipeline_axes
        among = MeshShape({**dict(mesh.items()), axis: holders})
        own = replace(reduced, partials=((axis, "sum"),))
        yield _movement(row, among, "gradients, stages", own, reduced, dtype, end, "optimizer")


def _end(row: Row, mesh: MeshShape) -> Event:
    """Return the time at which the gradient is reduced."""
    split = any(mesh[axis] > 1 and axis in mesh.data_axes for axis in row.added("grad"))
    return "pass ends" if split else "step ends"


def _step(row: Row, mesh: MeshShape, step: Step, optimizer: Optimizer, shapes: StateShapes) -> Iterator[Movement]:
    """Iterate over the movements to what the optimizer steps on, and from there to the stored parameter."""
    if row.grad is None or row.state is None:
        return
    if optimizer == "per_tensor":
        yield from _step_on_owner(row, mesh, shapes)
        return
    stored, state, reduced = _phase(row, row.stored), _phase(row, row.state), _reduced(row)
    low, dtype, end = _dtype(row, row.stored), _dtype(row, row.grad), _end(row, mesh)
    if optimizer == "unknown":
        yield _movement(row, mesh, "gradients, step", reduced, stored, dtype, end, "optimizer")
        return
    if state.memory != stored.memory:  # the optimizer steps on a copy of the parameter
        yield _movement(row, mesh, "parameters, step", stored, state, low, "step begins", "optimizer")
    yield _movement(row, mesh, "gradients, step", reduced, state, dtype, end, "optimizer")
    back: Event = "forward" if step.overlap else "step ends"
    update = _movement(row, mesh, "updated parameters", state, stored, low, "optimizer", back)
    yield replace(update, unbucketed=_is_unbucketed(row, stored, state, mesh, step))


def needs_owner(row: Row, mesh: MeshShape) -> bool:
    """Return whether no rank has the full tensors of a row that an optimizer steps on; else each rank steps them."""
    on_host = any(layout.memory == "host" for layout in row.layouts.values())
    return row.state is not None and (_count(row.state, mesh) > 1 or row.has_master or on_host)


def _step_on_owner(row: Row, mesh: MeshShape, shapes: StateShapes) -> Iterator[Movement]:
    assert row.state is not None and row.grad is not None
    stored, state, reduced = _phase(row, row.stored), _phase(row, row.state), _reduced(row)
    full = state.with_axes_dropped(state.axes)
    counted = Counter(map(tuple, shapes(row.global_shape)))
    split = counted[row.global_shape] if row.global_shape and _count(state, mesh) > 1 else 0
    if not row.has_master:
        yield _to_owner(row, mesh, "parameters, step", stored, full)
    elif state.memory != stored.memory:  # compared with the master copy, which is state
        yield _movement(row, mesh, "parameters, step", stored, state, _dtype(row, stored), "step begins", "optimizer")
    yield _to_owner(row, mesh, "gradients, step", reduced, full)
    if split + row.has_master:
        yield replace(_to_owner(row, mesh, "state, step", state, full), times=split + row.has_master)
    yield _from_owner(row, mesh, "updated parameters", row.global_shape, full, stored)
    for shape, times in (counted + Counter([row.global_shape] if row.has_master else [])).items():
        yield replace(state_update(row, mesh, shape), times=times)


def state_update(row: Row, mesh: MeshShape, shape: tuple[int, ...]) -> Movement:
    """Return the movement of a tensor of optimizer state, of some global shape, from the owner of a parameter."""
    assert row.state is not None
    state = _phase(row, row.state)
    if shape == row.global_shape:
        return _from_owner(row, mesh, "updated state", shape, state.with_axes_dropped(state.axes), state)
    full = replace(Layout.replicate(len(shape)), dtype=state.dtype, memory=state.memory)
    return _from_owner(row, mesh, "updated state", shape, full, full)


def _to_owner(row: Row, mesh: MeshShape, purpose: Purpose, source: Layout, full: Layout) -> Movement:
    """One replica of each shard is sent to the owner, unless it is there; any rank may be the owner."""
    ranks, numel = _ranks(mesh), math.prod(row.global_shape)
    dtype = _dtype(row, source)
    sent = _sent("gather", mesh, Fraction(numel * (ranks - 1), ranks * ranks), dtype)
    steps = (*_copy(row.global_shape, mesh, source), *sent, *_copy(row.global_shape, mesh, full))
    return Movement(row.name, row.global_shape, purpose, source, full, dtype, steps, _end(row, mesh), "optimizer")


def _from_owner(
    row: Row, mesh: MeshShape, purpose: Purpose, shape: tuple[int, ...], full: Layout, target: Layout
) -> Movement:
    """The owner sends each other rank its shard."""
    ranks, dtype = _ranks(mesh), _dtype(row, target)
    shard = Fraction(math.prod(shape), _count(target, mesh))
    sent = _sent("scatter", mesh, shard * (ranks - 1) / ranks, dtype)
    steps = sent
    if sent or full.memory != target.memory:
        steps = (*_copy(shape, mesh, full), *sent, *_copy(shape, mesh, target))
    return Movement(row.name, shape, purpose, full, target, dtype, steps, "optimizer", "step ends")


def _sent(
    kind: Literal["gather", "scatter"], mesh: MeshShape, elements: Fraction, dtype: torch.dtype
) -> tuple[Collective, ...]:
    axes = tuple(axis for axis, size in mesh.items() if size > 1 and axis not in mesh.pipeline_axes)
    return (Collective(kind, axes, math.ceil(elements * dtype.itemsize)),) if axes else ()


def _copy(shape: tuple[int, ...], mesh: MeshShape, end: Layout) -> tuple[Collective, ...]:
    """Return the copy between device and host at one end: tensors are sent from device to device."""
    if end.memory != "host":
        return ()
    assert end.dtype is not None
    return (Collective("copy", (), end.local_bytes(shape, end.dtype, mesh)),)


def _ranks(mesh: MeshShape) -> int:
    """Return the number of ranks that may own a tensor: those of one stage."""
    return math.prod(size for axis, size in mesh.items() if axis not in mesh.pipeline_axes)


def _count(layout: Layout, mesh: MeshShape) -> int:
    """Return the number of shards."""
    return math.prod(mesh[axis] for axis in layout.axes)


def _is_unbucketed(row: Row, full: Layout, shards: Layout, mesh: MeshShape, step: Step) -> bool:
    if full.local_bytes(row.global_shape, row.dtype, mesh) < step.unbucketed_bytes:
        return False
    try:
        spec = shard_spec(full, shards, row.global_shape, mesh, dict.fromkeys(mesh.names, 0))
    except LayoutError:  # no engine divides it so
        return False
    return spec is None or spec.in_runs


def _movement(
    row: Row,
    mesh: MeshShape,
    purpose: Purpose,
    source: Layout,
    target: Layout,
    dtype: torch.dtype,
    ready: Event,
    needed: Event,
    times: int = 1,
) -> Movement:
    found = transition(source, target, row.global_shape, dtype, mesh)
    return Movement(row.name, row.global_shape, purpose, source, target, dtype, found, ready, needed, times=times)


def _reduced(row: Row) -> Layout:
    """Return the layout of the reduced gradient."""
    assert row.grad is not None and row.state is not None
    return replace(row.state, dtype=_dtype(row, row.grad), memory=row.grad.memory)


def _phase(row: Row, layout: Layout) -> Layout:
    return replace(layout, dtype=_dtype(row, layout))


def _dtype(row: Row, layout: Layout) -> torch.dtype:
    return layout.dtype or row.dtype
