"""The coordinates of this rank among the ranks that run steps of one model; the same for all steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from shardlib._mesh import MeshShape
from shardlib._plan.schedules import Action
from shardlib.engine import _torch

if TYPE_CHECKING:
    from shardlib.engine.sharded import Sharded

__all__ = ["StepContext"]


_numbers = itertools.count()


class StepContext:
    """The role of this rank in the steps of a sharded model, and counters of these steps.

    Attributes:
        everyone: the group of all ranks; None if there is one.
        data_ranks: the number of ranks with different examples.
        data_places: the data rank of each rank of the mesh.
        reports_loss: whether this rank reports the loss, for the ranks that have the same.
        peers: the global ranks that modules of this rank's stages communicate with, including this rank.
        computes_early: whether the first forward of this rank's first stage needs no other rank.
        is_dry: whether this is a dry run: tensors are fake, and the other ranks do not exist.
        number: the index of this model among those that this rank has stepped, the same on its peers.
        failures: an iterator that counts failures.
        compared: whether ranks of one pipeline have compared a batch.
        watched: returns a context for each action, in which it runs; a dry run measures there.
    """

    def __init__(self, record: Sharded) -> None:
        mesh = record.pipeline.stages.mesh if record.pipeline is not None else record.mesh
        shape = MeshShape.of(mesh)
        coordinate = dict(zip(shape.names, mesh.get_coordinate() or (), strict=True))
        apart = (*shape.pipeline_axes, *(() if record.meets_in_modules else shape.data_axes))
        self.everyone, self.data_ranks = record.reducer.group_of_all(), shape.data_ranks
        self.data_places = [shape.data_place(shape.coordinate(rank))[0] for rank in range(shape.world_size)]
        self.reports_loss = all(coordinate[axis] == 0 for axis in shape.model_axes)
        self.peers = tuple(
            rank
            for place, rank in enumerate(_torch.ranks_of_mesh(mesh))
            if all(shape.coordinate(place)[axis] == coordinate[axis] for axis in apart)
        )
        first = record.pipeline is not None and 0 in record.pipeline.stages.own
        self.computes_early, self.is_dry = first and len(self.peers) == 1, not record.has_values
        self.number, self.failures, self.compared = next(_numbers), itertools.count(), False
        self.watched: Callable[[Action], AbstractContextManager[None]] = lambda _action: nullcontext()
