"""Movements of a training step between the phases of its tensors, computed from the plan alone.

A movement is the transition between two phases of a tensor (`shardlib.layout.transition`), with its time. Where the
stored layout is split further than the compute layout, parameters are gathered before forward, and again before
backward if they were resharded. Gradients leave backward as a pending sum over the data axes. Where state is split
further than the stored layout, updated parameters are gathered after the optimizer step. Copies between host and device
memory belong to the same transitions. Rajbhandari et al. 2020, section 7, count the same: 2 P (n-1)/n elements of P
parameters without splits and at stages 1 and 2, 3 P (n-1)/n at stage 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch

from shardlib._mesh import MeshShape
from shardlib._plan.rows import Row
from shardlib._plan.schedules import splits_backward
from shardlib._plan.step import Step
from shardlib._plan.units import unit_of
from shardlib.layout import Collective, Layout, cost, transition

__all__ = ["Movement", "Purpose", "Traffic", "movements_of", "reshards_after_forward", "sum_up"]

Purpose: TypeAlias = Literal[
    "parameters, forward", "parameters, backward", "gradients", "gradients, step", "updated parameters"
]
_ORDER: tuple[Purpose, ...] = get_args(Purpose)

Event: TypeAlias = Literal["step begins", "forward", "backward", "gradient", "pass ends", "optimizer", "step ends"]
"""The time at which a tensor exists, or is needed: "forward" and "backward" are those of its unit; "gradient" is when
backward has computed its gradient, "pass ends" the end of a backward pass, "optimizer" the update of the tensor."""


@dataclass(frozen=True)
class Movement:
    """One tensor redistributed from one phase of the plan to another.

    Attributes:
        name, global_shape: name and global shape of the tensor, as in its row.
        purpose: "parameters, forward" and "parameters, backward" unshard stored shards; "gradients" reduces the
            gradients of backward; "gradients, step" copies the reduced gradient to the memory of the state; "updated
            parameters" gathers and copies updated parameters to their stored layout.
        source, target: the layouts at both ends, with dtype and memory.
        dtype: the dtype that is sent.
        collectives: the steps of `shardlib.layout.transition`, copies between host and device memory included.
        ready: the time at which its source exists.
        needed: the time at which its target must exist. The movement can run at any time between the two.
        unit: the unit whose forward or backward needs it; "" for the model.
        times: the number of times per step.
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

    @property
    def moves(self) -> bool:
        """Whether anything is sent or copied; else each rank has all elements that it needs."""
        return any(step.kind != "slice" for step in self.collectives)

    @property
    def bytes(self) -> int:
        """The bytes that one rank sends in a step, averaged over ranks; copies between host and device do not count."""
        return self.times * cost(self.collectives)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind for one purpose, in a training step.

    Attributes:
        what: "parameters, forward", "parameters, backward", "gradients" or "updated parameters".
        kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
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


def sum_up(movements: Iterable[Movement]) -> tuple[Traffic, ...]:
    """Sum up the bytes of movements by purpose, collective and axes."""
    total: dict[tuple[Purpose, str, tuple[str, ...], int], tuple[int, int]] = {}
    for one in movements:
        for step in one.collectives:
            if step.kind not in ("slice", "copy"):
                key = (one.purpose, step.kind, step.axes, one.times)
                sent, tensors = total.get(key, (0, 0))
                total[key] = sent + one.times * step.bytes, tensors + 1
    summed = (Traffic(*key[:3], sent, tensors, key[3]) for key, (sent, tensors) in total.items())
    return tuple(sorted(summed, key=lambda each: _ORDER.index(each.what)))


def reshards_after_forward(row: Row, step: Step) -> bool:
    """Return whether a parameter that is stored sharded is resharded between its forward and its backward.

    Under a schedule that defers gradients of weights, all parameters stay unsharded until the step has ended.
    """
    return row.reshard and not splits_backward(step.schedule)


def movements_of(rows: Iterable[Row], mesh: MeshShape, units: Iterable[str], step: Step) -> Iterator[Movement]:
    """Iterate over the movements of a step for some rows, in their order; phases with equal layouts have none.

    Args:
        rows: rows of the plan.
        mesh: its mesh.
        units: modules whose parameters are gathered together.
        step: the settings of the step.
    """
    inside = frozenset(units)
    known: dict[tuple[object, ...], list[Movement]] = {}  # of rows that differ in their names alone, as blocks' do
    for row in rows:
        key = (row.global_shape, row.dtype, row.stored, row.compute, row.grad, row.state, row.reshard)
        if key not in known:
            known[key] = [one for one in (*_unshard(row, mesh, step), *_update(row, mesh, step)) if one.moves]
        unit = unit_of(row.tied, inside) if known[key] else ""
        for one in known[key]:
            yield replace(one, name=row.name, unit=unit)


def _unshard(row: Row, mesh: MeshShape, step: Step) -> Iterator[Movement]:
    reshards = reshards_after_forward(row, step)
    passes = step.accumulate * (step.microbatches or 1 if reshards else 1)  # through a pipeline
    stored, compute, dtype = _phase(row, row.stored), _phase(row, row.compute), _dtype(row, row.compute)
    forward = _movement(row, mesh, "parameters, forward", stored, compute, dtype, "step begins", "forward", passes)
    yield forward
    if reshards:
        yield replace(forward, purpose="parameters, backward", needed="backward")


def _update(row: Row, mesh: MeshShape, step: Step) -> Iterator[Movement]:
    """Iterate over the movements from the gradient to the parameter. Each rank reduces the shard that it updates: where
    state is split and the gradient is not, the rest of the gradient keeps its memory and is not summed."""
    if row.grad is None or row.state is None:
        return
    pending = tuple((axis, "sum") for axis in mesh.data_axes if mesh[axis] > 1 and axis not in row.compute.axes)
    made = replace(_phase(row, row.compute), partials=pending)
    state, stored, dtype = _phase(row, row.state), _phase(row, row.stored), _dtype(row, row.grad)
    reduced = replace(state, dtype=dtype, memory=row.grad.memory)
    end: Event
    if row.added("grad").isdisjoint(mesh.data_axes):
        end, passes = "step ends", 1
    else:
        end, passes = "pass ends", step.accumulate
    travels = step.reduce_dtype or dtype
    yield _movement(row, mesh, "gradients", made, reduced, travels, "gradient", end, passes)
    yield _movement(row, mesh, "gradients, step", reduced, state, dtype, end, "optimizer")
    back: Event = "forward" if step.overlap else "step ends"
    yield _movement(row, mesh, "updated parameters", state, stored, _dtype(row, row.stored), "optimizer", back)


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


def _phase(row: Row, layout: Layout) -> Layout:
    return replace(layout, dtype=_dtype(row, layout))


def _dtype(row: Row, layout: Layout) -> torch.dtype:
    return layout.dtype or row.dtype
