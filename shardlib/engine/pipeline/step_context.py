"""The coordinates of this rank among the ranks that run steps of one model; the same for all steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardlib._mesh import MeshShape
from shardlib.engine import _torch

if TYPE_CHECKING:
    from shardlib.engine.sharded import Sharded

__all__ = ["StepContext"]


@dataclass(eq=False)
class StepContext:
    """The role of this rank in the steps of a model, and counters of these steps.

    Attributes:
        shape: the shape of the whole mesh.
        everyone: the group of all ranks; None if there is one.
        data_ranks: the number of ranks with different examples.
        reports_loss: whether this rank reports the loss, for the ranks that have the same.
        peers: the global ranks that modules of this rank's stages communicate with, including this rank.
        computes_early: whether the first forward of this rank's first stage needs no other rank.
        is_dry: whether this is a dry run: tensors are fake, and the other ranks do not exist.
        number: the index of this model among those that this rank has stepped, the same on its peers.
        failures: an iterator that counts failures.
        compared: whether ranks of one pipeline have compared a batch.
    """

    shape: MeshShape
    everyone: dist.ProcessGroup | None
    data_ranks: int
    reports_loss: bool
    peers: tuple[int, ...]
    computes_early: bool
    is_dry: bool
    number: int = field(default_factory=itertools.count().__next__)
    failures: Iterator[int] = field(default_factory=itertools.count)
    compared: bool = False

    @classmethod
    def of(cls, record: Sharded) -> StepContext:
        """Return the role of this rank in the steps of a sharded model."""
        mesh = record.pipeline.mesh if record.pipeline is not None else record.mesh
        shape = MeshShape.of(mesh)
        coordinate = dict(zip(shape.names, mesh.get_coordinate() or (), strict=True))
        apart = (*shape.pipeline_axes, *(() if record.meets_in_modules else shape.data_axes))
        peers = tuple(
            rank
            for place, rank in enumerate(_torch.ranks_of_mesh(mesh))
            if all(shape.coordinate(place)[axis] == coordinate[axis] for axis in apart)
        )
        first = record.pipeline is not None and 0 in record.pipeline.place.own
        reports_loss = all(coordinate[axis] == 0 for axis in shape.model_axes)
        early = first and len(peers) == 1
        everyone = record.reducer.group_of_all()
        return cls(shape, everyone, shape.data_ranks, reports_loss, peers, early, is_dry=not record.has_values)
