"""The most bytes that a device holds in a training step: what a plan keeps, and what a record says of activations.

Forward and backward are replayed part by part. In a pipeline, a rank also keeps the activations of the microbatches
that are in flight. The margin that an allocator loses to fragmentation is not part of it, nor are a process's context
and the buffers of communication libraries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib._plan.parts import PlanPart, StageShape
from shardlib._plan.readable import human_bytes
from shardlib._plan.schedules import default_schedule, in_flight, order, splits_backward
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
    flying = [1] * ranks
    if len(shapes) > 1:
        schedule = plan.step.schedule or default_schedule(ranks, len(shapes))
        count = plan.step.microbatches or 2 * ranks
        few = count if schedule == "gpipe" else min(count, 4 * ranks)
        if few % ranks and schedule.startswith("interleaved"):
            few = max(few - few % ranks, ranks)
        flying = [in_flight(actions) for actions in order(schedule, ranks, len(shapes), few)]
    several = plan.step.accumulate > 1 or (len(shapes) > 1 and plan.step.microbatches != 1)
    keeps = splits_backward(plan.step.schedule)
    found = []
    for rank in range(ranks):
        own = [shape for shape in shapes if shape.rank == rank]
        pairs = [pair for shape in own for pair in _pairs(shape, work, parts)]
        found.append(_peak(pairs, flying[rank] / len(own), accumulates=several, keeps=keeps))
    return max(found, key=lambda peak: peak.total)


def _pairs(
    shape: StageShape, work: Work, parts: tuple[PlanPart, PlanPart, tuple[PlanPart, ...]]
) -> list[tuple[Part, PlanPart]]:
    made = [(work.before, parts[0])] if shape.before else []
    made += [(work.kinds[kind], parts[2][kind]) for kind in shape.kinds]
    return made + ([(work.after, parts[1])] if shape.after else [])


def _peak(pairs: Sequence[tuple[Part, PlanPart]], flying: float, *, accumulates: bool, keeps: bool) -> Peak:
    """Replay one rank.

    Args:
        pairs: its parts, in the order of forward.
        flying: the microbatches whose activations it holds, of all its stages.
        accumulates: whether gradients of an earlier pass exist.
        keeps: whether unsharded parameters stay until the end of a step.
    """
    held = [part.held for _, part in pairs]
    parameters, state, buffers = (
        sum(getattr(one, name) for one in held) for name in ("parameters", "state", "buffers")
    )
    whole = sum(one.gradients for one in held)
    turns = [one.unsharded for (_, part), one in zip(pairs, held, strict=True) if part.resharded and not keeps]
    unsharded = sum(one.unsharded for one in held) - sum(turns) + sum(sorted(turns)[-2:])
    in_transfer = max((one.reduced for one in held), default=0)
    one_pass = sum(work.forward.left for work, _ in pairs)
    active = (flying - 1) * one_pass
    gradients = whole if accumulates else 0
    moments = [(gradients, active, unsharded)]
    for work, _ in pairs:
        moments.append((gradients, active + work.forward.peak, unsharded))
        active += work.forward.left
    for work, part in reversed(pairs):
        moments.append((gradients, active + work.backward.peak, unsharded + in_transfer))
        active += work.backward.left - part.held.made
        gradients += 0 if accumulates else part.held.gradients
    moments.append((whole, 0.0, sum(one.updated for one in held)))
    most = max(moments, key=sum)
    return Peak(
        parameters, state, buffers, round(most[0]), round(max(most[1], 0)), most[2], host=sum(one.host for one in held)
    )
