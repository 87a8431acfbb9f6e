"""The most bytes that a device holds in a training step: what a plan keeps, and what a record says of activations.

Forward and backward are replayed part by part. In a pipeline, a rank also keeps the activations of the microbatches
that are in flight. The margin that an allocator loses to fragmentation is not part of it, nor are a process's context
and the buffers of communication libraries.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from shardlib._plan.parts import PlanPart, StageShape
from shardlib._plan.readable import human_bytes
from shardlib._plan.schedules import Action, default_schedule, order, splits_backward
from shardlib._plan.table import PlanTable
from shardlib._plan.work import Part, Work

__all__ = ["Peak", "peak_of"]


@dataclass(frozen=True)
class Peak:
    """Bytes of the device of the rank that holds most, at the time when it holds most.

    Attributes:
        parameters, state, buffers: as they are stored.
        gradients: those that exist at that time.
        activations: of all microbatches in flight, and what computation borrows.
        workspace: unsharded parameters, and buckets in transfer.
        host: what layouts keep in the memory of the host; not part of `total`.
    """

    parameters: int
    state: int
    buffers: int
    gradients: int
    activations: int
    workspace: int
    host: int = 0

    @property
    def total(self) -> int:
        """All of them but `host`."""
        return self.parameters + self.state + self.buffers + self.gradients + self.activations + self.workspace

    def __str__(self) -> str:
        names = ("parameters", "state", "gradients", "activations", "workspace", "buffers")
        parts = ", ".join(f"{name} {human_bytes(size)}" for name in names if (size := getattr(self, name)))
        host = f"; on the host {human_bytes(self.host)}" if self.host else ""
        return f"{human_bytes(self.total)} ({parts}{host})"


def peak_of(
    plan: PlanTable,
    work: Work,
    parts: tuple[PlanPart, PlanPart, tuple[PlanPart, ...]],
    shapes: Sequence[StageShape],
) -> Peak:
    """Return the peak of the rank that holds most."""
    ranks = 1 + max(shape.rank for shape in shapes)
    keeps = splits_backward(plan.step.schedule)
    orders: Sequence[Sequence[Action]]
    if len(shapes) > 1:
        orders = order(_schedule(plan, shapes), ranks, len(shapes), _microbatches(plan, shapes))
    else:
        once = (Action("F", 0, 0), Action("B", 0, 0))
        orders = (once * min(plan.step.accumulate, 2),)
    limit = plan.step.bucket_bytes
    profiles = {shape: _profile(_pairs(shape, work, parts), limit) for shape in {*shapes}}
    found = []
    for rank in range(ranks):
        own = {number: profiles[shape] for number, shape in enumerate(shapes) if shape.rank == rank}
        pairs = [pair for number in own for pair in _pairs(shapes[number], work, parts)]
        found.append(_replay(orders[rank], own, [part for _, part in pairs], limit, keeps=keeps))
    return max(found, key=lambda peak: peak.total)


def _schedule(plan: PlanTable, shapes: Sequence[StageShape]) -> str:
    ranks = 1 + max(shape.rank for shape in shapes)
    return plan.step.schedule or default_schedule(ranks, len(shapes))


def _microbatches(plan: PlanTable, shapes: Sequence[StageShape]) -> int:
    """Return so many microbatches that more hold no more memory."""
    ranks = 1 + max(shape.rank for shape in shapes)
    count, schedule = plan.step.microbatches or 2 * ranks, _schedule(plan, shapes)
    return count if schedule == "gpipe" or count <= 4 * ranks else 4 * ranks + count % ranks


def _pairs(
    shape: StageShape, work: Work, parts: tuple[PlanPart, PlanPart, tuple[PlanPart, ...]]
) -> list[tuple[Part, PlanPart]]:
    made = [(work.before, parts[0])] if shape.before else []
    made += [(work.kinds[kind], parts[2][kind]) for kind in shape.kinds]
    return made + ([(work.after, parts[1])] if shape.after else [])


_ALIKE, _PASSES = 3, 10


class _Moment(NamedTuple):
    """Bytes at one time: of gradients, of activations, and of full gradients that are being reduced to shards."""

    gradients: float = 0
    activations: float = 0
    transfer: float = 0

    @property
    def total(self) -> float:
        return self.gradients + self.activations + self.transfer


class _Profile(NamedTuple):
    """A stage: what a forward keeps, the most in it, all gradients; and the most in a backward, relative to what is
    kept: in the first one of a step, in later ones, in the last one, and in one that is both."""

    left: int
    forward: int
    whole: int
    first: _Moment
    later: _Moment
    last: _Moment
    only: _Moment


def _profile(pairs: Sequence[tuple[Part, PlanPart]], limit: int) -> _Profile:
    left = most = 0
    for work, _ in pairs:
        most = max(most, left + work.forward.peak)
        left += work.forward.left
    every_pass = any(part.every_pass for _, part in pairs)
    return _Profile(
        left,
        most,
        sum(part.held.gradients for _, part in pairs),
        _backward(pairs, limit, first=True, reduces=every_pass),
        _backward(pairs, limit, first=False, reduces=every_pass),
        _backward(pairs, limit, first=False, reduces=True),
        _backward(pairs, limit, first=True, reduces=True),
    )


def _backward(pairs: Sequence[tuple[Part, PlanPart]], limit: int, *, first: bool, reduces: bool) -> _Moment:
    """Return the moment of a backward that holds most. Buckets are pending until their workspace reaches the limit."""
    active = 0.0
    gradients = 0.0 if first else float(sum(part.held.gradients for _, part in pairs))
    workspace = sent = 0.0
    moments = []
    for work, part in reversed(pairs):
        moments.append(_Moment(gradients, active + work.backward.peak, sent))
        active += work.backward.left - part.held.made
        # Shards that a later pass makes are added to the earlier ones when it ends.
        gradients += part.held.gradients if first or (reduces and part.every_pass) else 0
        if reduces and part.held.sent:
            sizes = [sum(buffers) for buffers in part.held.reduced]
            workspace, sent = workspace + sum(sizes), sent + part.held.sent
            if workspace > (most := max(limit, *sizes, 1)):
                workspace, sent = most, sent * most / workspace
    moments.append(_Moment(gradients, active, sent))
    return max(moments, key=lambda moment: moment.total)


def _replay(
    actions: Sequence[Action], stages: Mapping[int, _Profile], parts: Sequence[PlanPart], limit: int, *, keeps: bool
) -> Peak:
    """Replay the actions of a rank.

    Args:
        actions: in its order.
        stages: the profiles of its stages, by number.
        parts: the parts of all its stages.
        limit: workspace bytes of buckets that are pending together.
        keeps: whether unsharded parameters stay until the end of a step.
    """
    held = [part.held for part in parts]
    turns = [part.held.unsharded for part in parts if part.resharded and not keeps]
    unsharded = sum(one.unsharded for one in held) - sum(turns) + sum(sorted(turns)[-2:])
    count = Counter(action.stage for action in actions if action.kind in "BW")
    done: Counter[int] = Counter()
    active = 0.0
    made = 0.0  # gradients of stages that have had a backward
    moments: list[_Moment] = []
    for kind, number, _ in actions:
        one = stages[number]
        if kind == "F":
            moments.append(_Moment(made, active + one.forward))
            active += one.left
            continue
        first, last = done[number] == 0, done[number] == count[number] - 1
        at = (one.only if last else one.first) if first else (one.last if last else one.later)
        others = made - (0 if first else one.whole)
        moments.append(_Moment(others + at.gradients, active + at.activations, at.transfer))
        if kind != "I":
            active -= one.left
            made += one.whole if first else 0
            done[number] += 1
    moments.append(_Moment(sum(one.gradients for one in held)))
    most = max(moments, key=lambda moment: moment.total)
    reduced = (part.held.reduced for part in reversed(parts))
    kept = _pool(tuple(buffers for own, group in groupby(reduced) for _ in [*group][:_ALIKE] for buffers in own), limit)
    kept += sum(one.updated for one in held) + sum(sorted(one.packed for one in held)[-2:])
    return Peak(
        parameters=sum(one.parameters for one in held),
        state=sum(one.state for one in held),
        buffers=sum(one.buffers for one in held),
        gradients=round(most.gradients),
        activations=round(max(most.activations, 0)),
        workspace=round(most.transfer) + unsharded + kept,
        host=sum(one.host for one in held),
    )


@functools.lru_cache(maxsize=1024)
def _pool(buckets: tuple[tuple[int, ...], ...], limit: int) -> int:
    """Return the bytes of the pool from which buckets borrow, when it no longer grows: none of it is freed, and of what
    is free a buffer that is too small gives way to a larger one.

    Args:
        buckets: the buffers that each borrows, in the order of a pass.
        limit: the bytes that pending buckets may borrow together; a larger bucket is pending alone.
    """
    free: list[int] = []
    pending: list[tuple[int, list[int]]] = []  # what a bucket asked for, and the buffers that it has
    before = -1
    for _ in range(_PASSES):
        for sizes in buckets:
            while pending and sum(sizes) + sum(asked for asked, _ in pending) > limit:
                free += pending.pop(0)[1]
            pending.append((sum(sizes), [_taken(free, size) for size in sizes]))
        while pending:
            free += pending.pop(0)[1]
        if sum(free) == before:
            break
        before = sum(free)
    return sum(free)


def _taken(free: list[int], size: int) -> int:
    """Take a buffer out of the free ones, and return its size."""
    fitting = [each for each in free if each >= size]
    if fitting:
        free.remove(best := min(fitting))
        return best
    if free:
        free.pop()
    return size
