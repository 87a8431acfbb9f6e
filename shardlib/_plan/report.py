"""Reports of a dry run and of a recorded real run, which use the same values and so compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["DryRun", "Gathered", "Recorded", "RunPhase", "StageRun", "ring_bytes"]

RunPhase = Literal["forward", "backward", "outside"]


@dataclass(frozen=True)
class Recorded:
    """One collective, as one rank issued it.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", ...
        axes: the mesh axes it runs over; empty for a group that is not made of whole axes of the mesh.
        bytes: size of the local tensors that this rank contributes.
        size: the number of ranks that take part.
        module: dotted name of the innermost module at work; in backward, of the module whose forward caused it; empty
            for the reduction of parameters' gradients, which may be many modules' at once.
        phase: "forward", "backward", or "outside" of both.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    size: int
    module: str
    phase: RunPhase

    @property
    def sent(self) -> int:
        """Bytes that this rank sends when the collective runs as a ring."""
        return ring_bytes(self.kind, self.bytes, self.size)


@dataclass(frozen=True)
class Gathered:
    """An op without a proven sharding rule: its operands are gathered and every rank computes it on unsharded
    tensors."""

    op: str
    module: str
    reason: str


@dataclass(frozen=True)
class StageRun:
    """The work of one pipeline stage in a training step, on the first of its ranks.

    Attributes:
        stage: the index of the stage.
        rank: its coordinate on the pipeline axis.
        flops: operations in forward and backward of all microbatches.
        activation_bytes: the most that a microbatch keeps between its forward and its backward.
        sent: the most bytes that a microbatch sends to the next stage; its gradients return as many.
    """

    stage: int
    rank: int
    flops: int
    activation_bytes: int
    sent: int


@dataclass(frozen=True)
class DryRun:
    """One training step, forward and backward, on one rank (the first, whose shards are the largest).

    On a mesh with stages it is the rank of the pipeline axis whose peak is the highest, and `ranks` has all of them.

    Attributes:
        collectives: the collectives in the order in which they are issued.
        gathered: ops without a proven strategy.
        start_bytes: parameters and buffers, before the step.
        peak_bytes: the most bytes of live tensors at one time: parameters, buffers, gradients, activations and
            buckets; not optimizer state (see `Plan.memory`), not a kernel's own scratch space.
        flops: floating-point operations of matrix products, convolutions and attention on this rank.
        activation_bytes: bytes that forward keeps for backward, the output included, where there are no stages.
        stages: the stages of a pipeline.
        ranks: the dry runs of all ranks of a pipeline axis, in its order.
    """

    collectives: tuple[Recorded, ...]
    gathered: tuple[Gathered, ...]
    start_bytes: int
    peak_bytes: int
    flops: int = 0
    activation_bytes: int = 0
    stages: tuple[StageRun, ...] = ()
    ranks: tuple[DryRun, ...] = ()

    def count(self, *, kind: str | None = None, axis: str | None = None, phase: RunPhase | None = None) -> int:
        """Count the collectives of a kind, over an axis, in a phase."""
        return sum(1 for _ in self._select(kind, axis, phase))

    def bytes(self, *, kind: str | None = None, axis: str | None = None, phase: RunPhase | None = None) -> int:
        """Sum the payload of these collectives in bytes."""
        return sum(c.bytes for c in self._select(kind, axis, phase))

    def _select(self, kind: str | None, axis: str | None, phase: RunPhase | None) -> Iterable[Recorded]:
        return (
            c
            for c in self.collectives
            if kind in (None, c.kind) and (axis is None or axis in c.axes) and phase in (None, c.phase)
        )


def ring_bytes(kind: str, payload: int, size: int) -> int:
    """Return the bytes that one of `size` ranks sends in a ring for a payload of `payload` bytes.

    An all-reduce is a reduce-scatter and an all-gather of the pieces: 2(n-1)/n of the payload. An all-gather passes
    each of the n pieces on n-1 times; a reduce-scatter or all-to-all keeps one n-th (Thakur, Rabenseifner, Gropp,
    "Optimization of Collective Communication Operations in MPICH", 2005, section 4).
    """
    if kind == "all_reduce":
        return 2 * (size - 1) * payload // size
    if kind == "all_gather":
        return (size - 1) * payload
    if kind in ("reduce_scatter", "all_to_all"):
        return (size - 1) * payload // size
    return payload
