"""The most bytes that a device holds in a training step: what a plan keeps, and what a record says of activations.

Forward and backward are replayed part by part. In a pipeline, a rank also keeps the activations of the microbatches
that are in flight. The margin that an allocator loses to fragmentation is not part of it, nor are a process's context
and the buffers of communication libraries.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from shardlib._plan.parts import Buffer, Parts, PlanPart, Reduced, StageShape, schedule_of
from shardlib._plan.readable import human_bytes
from shardlib._plan.schedules import Action, order, splits_backward, steady_count
from shardlib._plan.table import PlanTable
from shardlib._plan.work import Part, Work

__all__ = ["Peak", "ReplayedPool", "free_buffer", "peak_of"]


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
    parts: Parts,
    shapes: Sequence[StageShape],
) -> Peak:
    """Return the peak of the rank that holds most."""
    schedule, ranks, microbatches = schedule_of(plan, shapes)
    orders: Sequence[Sequence[Action]]
    if len(shapes) > 1:
        orders = order(schedule, ranks, len(shapes), steady_count(schedule, ranks, microbatches))
    else:
        once = (Action("F", 0, 0), Action("B", 0, 0))
        orders = (once * min(plan.step.accumulate, 2),)
    limit, keeps = plan.step.bucket_bytes, splits_backward(plan.step.schedule)
    records = work.before, work.after, work.kinds
    held = {shape: shape.parts(*parts) for shape in {*shapes}}
    profiles = {shape: _profile([*zip(shape.parts(*records), held[shape], strict=True)], limit) for shape in held}
    found = []
    for rank in range(ranks):
        own = {number: shape for number, shape in enumerate(shapes) if shape.rank == rank}
        stages = {number: profiles[shape] for number, shape in own.items()}
        found.append(
            _replay(orders[rank], stages, [part for one in own.values() for part in held[one]], limit, keeps=keeps)
        )
    return max(found, key=lambda peak: peak.total)


_ALIKE, _PASSES = 8, 10


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
    moments = []
    pending: list[Reduced] = []
    waiting: dict[Hashable, Reduced] = {}

    def add(peak: int) -> None:
        # Where a pass reduces them, full gradients stay until there are shards; else they are the gradients.
        sent = [one for one in [*pending, *waiting.values()] if one.shards and one.every_pass]
        later = sum(one.shards for one in sent)
        moments.append(_Moment(gradients - later, active + peak, sum(one.held for one in sent)))

    for work, part in reversed(pairs):
        add(work.backward.peak)
        active += work.backward.left - part.held.made
        # Shards that a later pass makes are added to the earlier ones when it ends.
        gradients += part.held.gradients if first or (reduces and part.every_pass) else 0
        for bucket in _filled(part.held.reduced, waiting, limit) if reduces else ():
            while pending and _borrowed(bucket, *pending) > limit:
                done = pending.pop(0)
                gradients -= done.held - done.shards if done.shards and not done.every_pass else 0
            pending.append(bucket)
    add(0)
    return max(moments, key=lambda moment: moment.total)


def _filled(buckets: Iterable[Reduced], waiting: dict[Hashable, Reduced], limit: int) -> Iterator[Reduced]:
    """Iterate over the buckets that begin when a part has made its gradients; the others wait for those of more parts,
    by their form."""
    for bucket in buckets:
        if bucket.form is None:
            yield bucket
            continue
        joined = waiting.pop(bucket.form).joined(bucket) if bucket.form in waiting else bucket
        if joined.full >= limit:
            yield joined
        else:
            waiting[bucket.form] = joined


def _borrowed(*buckets: Reduced) -> int:
    return sum(size for bucket in buckets for size in bucket.borrowed)


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
    turns = [size for one in held for size in one.turns]
    unsharded = sum(one.unsharded for one in held)
    unsharded += sum(turns) if keeps else sum(max(turns[start::2], default=0) for start in (0, 1))
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
    groups = groupby((one.packed, one.reduced, one.updated) for one in held)
    kept = _pool(tuple(few for _, group in groups for few in [*group][:_ALIKE]), limit)
    kept += sum(one.shards for one in held)
    return Peak(
        parameters=sum(one.parameters for one in held),
        state=sum(one.state for one in held),
        buffers=sum(one.buffers for one in held),
        gradients=round(most.gradients),
        activations=round(max(most.activations, 0)),
        workspace=round(most.transfer) + unsharded + kept,
        host=sum(one.host for one in held),
    )


_Borrowing = tuple[tuple[Buffer, ...], tuple[Reduced, ...], tuple[Buffer, ...]]


@functools.lru_cache(maxsize=1024)
def _pool(parts: tuple[_Borrowing, ...], limit: int) -> int:
    """Return the bytes of the pool of workspaces when it no longer grows: none of it is freed.

    Args:
        parts: in their order, what each borrows while its parameters are gathered, its buckets of gradients, and what
            it borrows after a step.
        limit: the bytes that pending buckets may borrow together; a larger bucket is pending alone.
    """
    pool = ReplayedPool()
    pending: list[tuple[Reduced, list[Buffer]]] = []  # the buckets, with the buffers that they have
    before = -1

    def reduce(bucket: Reduced) -> None:
        while pending and _borrowed(bucket, *(one for one, _ in pending)) > limit:
            pool.give(pending.pop(0)[1])
        pending.append((bucket, pool.take(Buffer(bucket.dtype, size) for size in bucket.borrowed)))

    for _ in range(_PASSES):
        waiting: dict[Hashable, Reduced] = {}
        for packed, _, _ in parts:
            for buffer in packed:
                pool.give(pool.take([buffer]))
        backward = parts[::-1]
        for (_, buckets, _), (packed, _, _) in zip(backward, [*backward[1:], ((), (), ())], strict=True):
            arriving = pool.take([*packed][-1:])  # while this part is reduced
            for bucket in _filled(buckets, waiting, limit):
                reduce(bucket)
            pool.give(arriving)
        for bucket in waiting.values():
            reduce(bucket)
        while pending:
            pool.give(pending.pop(0)[1])
        pool.give(pool.take(_joined((buffer for *_, updated in parts for buffer in updated), limit)))
        if pool.size == before:
            break
        before = pool.size
    return pool.size


def _joined(buffers: Iterable[Buffer], limit: int) -> Iterator[Buffer]:
    """Iterate over buffers that hold what several of one dtype do, until they reach the limit."""
    filled: dict[Hashable, int] = {}
    for one in buffers:
        filled[one.dtype] = filled.get(one.dtype, 0) + one.size
        if filled[one.dtype] >= limit:
            yield Buffer(one.dtype, filled.pop(one.dtype))
    yield from (Buffer(dtype, size) for dtype, size in filled.items())


def free_buffer(sizes: Sequence[int], size: int) -> int | None:
    """Return the index of the free buffer that a pool of workspaces hands out, or that gives way to a new one.

    The smallest that is large enough serves. Else the largest gives way if it is not much smaller; a much smaller one
    stays: what needs it in the next step would borrow a large buffer, for which another would be made, and the pool
    would grow from step to step.

    Args:
        sizes: of the free buffers.
        size: what is needed, in the same unit.

    >>> free_buffer([4, 9, 6], 5), free_buffer([4, 9, 6], 12), free_buffer([4, 9, 6], 20)
    (2, 1, None)
    """
    if enough := [at for at, each in enumerate(sizes) if each >= size]:
        return min(enough, key=sizes.__getitem__)
    return max((at for at, each in enumerate(sizes) if 3 * each >= 2 * size), key=sizes.__getitem__, default=None)


class ReplayedPool:
    """The sizes of the buffers that the engine's `Workspace` has free, as it takes and gives them."""

    def __init__(self) -> None:
        self.free: dict[Hashable, list[int]] = {}

    @property
    def size(self) -> int:
        return sum(map(sum, self.free.values()))

    def take(self, asked: Iterable[Buffer]) -> list[Buffer]:
        return [Buffer(one.dtype, self._taken(self.free.setdefault(one.dtype, []), one.size)) for one in asked]

    def give(self, buffers: Iterable[Buffer]) -> None:
        for one in buffers:
            self.free[one.dtype].append(one.size)

    @staticmethod
    def _taken(free: list[int], size: int) -> int:
        at = free_buffer(free, size)
        return size if at is None else max(free.pop(at), size)
