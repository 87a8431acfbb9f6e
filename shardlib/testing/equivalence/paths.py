"""The paths of the engine that a sharded run has taken."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shardlib.engine.feature.compile import repeated_blocks
from shardlib.engine.sharded import record_of

__all__ = ["Paths", "paths_of"]


@dataclass(frozen=True)
class Paths:
    """The paths of the engine that a training run has taken on a rank.

    Attributes:
        at_scale: whether the sizes of buckets were those of `at_scale`, and not those of the plan.
        units: the number of units that were gathered apart, where parameters are stored in shards.
        resharded: the number of those that were resharded between forward and backward.
        prefetched: how often a unit was gathered while another one computed.
        buckets: the number of messages in which gradients were reduced.
        alone: the number of gradients that were reduced by themselves, from their own memory.
        packed: the number of gradients that were packed into buckets.
        in_place: the number of parameters whose shards were updated in the parameter's own memory, and gathered there.
        copied: the number of those whose shards were copied for a step.
        eager: the number of repeated blocks that ran eagerly, and that `shard_model` compiles by default on this mesh.
    """

    at_scale: bool
    units: int = 0
    resharded: int = 0
    prefetched: int = 0
    buckets: int = 0
    alone: int = 0
    packed: int = 0
    in_place: int = 0
    copied: int = 0
    eager: int = 0

    def __str__(self) -> str:
        parts = []
        if self.units:
            parts.append(
                f"{_count(self.units, 'unit')}, {self.resharded} resharded after forward, {self.prefetched} prefetched"
            )
        if self.buckets:
            parts.append(f"gradients in {_count(self.buckets, 'bucket')}, {self.alone} alone and {self.packed} packed")
        if self.in_place or self.copied:
            parts.append(f"updates of {self.in_place} in place and {self.copied} by copies")
        where = "at scale" if self.at_scale else "by default"
        return f"Paths {where}: {'; '.join(parts) or 'nothing is sent between the phases of parameters'}"


def paths_of(model: nn.Module, *, at_scale: bool) -> Paths:
    """Return the paths that a sharded model has taken since it was sharded."""
    record = record_of(model)
    units = [] if record.units is None else list(dict.fromkeys(record.units.units.values()))
    buckets = record.reducer.buckets
    alone = sum(bucket.planned.alone for bucket in buckets if bucket.slots)
    updates = [] if record.updates is None else record.updates.buckets
    split = any(record.plan.mesh[axis] > 1 for axis in record.plan.mesh.model_axes)
    return Paths(
        at_scale,
        units=len(units),
        resharded=sum(not unit.stays_unsharded for unit in units),
        prefetched=0 if record.units is None else record.units.prefetched,
        buckets=len(buckets),
        alone=alone,
        packed=sum(len(bucket.slots) for bucket in buckets) - alone,
        in_place=sum(len(bucket.param_states) for bucket in updates if bucket.is_in_place),
        copied=sum(len(bucket.param_states) for bucket in updates if not bucket.is_in_place),
        eager=len(repeated_blocks(model)) if split and not record.compiled.backend else 0,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
