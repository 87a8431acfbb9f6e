"""Where this rank stands among the others that run steps of one model, whatever the step."""

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

__all__ = ["Standing"]


@dataclass(eq=False)
class Standing:
    """Where this rank stands, and what its steps count.

    Attributes:
        shape: of the whole mesh.
        everyone: all ranks; None where there is one.
        data_ranks: how many ranks have different examples.
        speaks: for the ranks that have the same loss.
        mates: the global ranks that modules of this one's stages wait for, itself among them.
        computes_early: whether the first forward of its first stage needs no other rank.
        is_dry: tensors have no values, and other ranks are imagined.
        number: among all models that this rank has stepped, as on its mates.
        failures: counts them.
        compared: whether ranks of one pipeline have compared a batch.
    """

    shape: MeshShape
    everyone: dist.ProcessGroup | None
    data_ranks: int
    speaks: bool
    mates: tuple[int, ...]
    computes_early: bool
    is_dry: bool
    number: int = field(default_factory=itertools.count().__next__)
    failures: Iterator[int] = field(default_factory=itertools.count)
    compared: bool = False

    @classmethod
    def of(cls, record: Sharded) -> Standing:
        """Return where this rank stands in the steps of a sharded model."""
        mesh = record.pipeline.mesh if record.pipeline is not None else record.mesh
        shape = MeshShape.of(mesh)
        coordinate = dict(zip(shape.names, mesh.get_coordinate() or (), strict=True))
        apart = (*shape.pipeline_axes, *(() if record.meets_in_modules else shape.data_axes))
        mates = tuple(
            rank
            for place, rank in enumerate(_torch.ranks_of_mesh(mesh))
            if all(shape.coordinate(place)[axis] == coordinate[axis] for axis in apart)
        )
        first = record.pipeline is not None and 0 in record.pipeline.place.own
        speaks = all(coordinate[axis] == 0 for axis in shape.model_axes)
        early = first and len(mates) == 1
        everyone = record.reducer.group_of_all()
        return cls(shape, everyone, shape.data_ranks, speaks, mates, early, is_dry=not record.has_values)
