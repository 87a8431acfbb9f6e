"""The table of a plan: one row for each tensor, and the memory, movements and traffic that follow from the rows."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from shardlib._mesh_shape import MeshShape
from shardlib._plan.memory import Blocks, Memory, largest_rank, of_ranks
from shardlib._plan.movements import (
    Movement,
    Optimizer,
    StateShapes,
    TrafficTable,
    like_parameter,
    movements_of,
    needs_owner,
    sum_up,
)
from shardlib._plan.report import DryRun
from shardlib._plan.rows import Row
from shardlib._plan.step import Step
from shardlib._plan.units import unit_of
from shardlib._plan.work import Work
from shardlib.errors import PlanError, nearest
from shardlib.rules import Border, Rules, Stage

__all__ = ["PlanTable"]


@dataclass(frozen=True)
class PlanTable:
    """The fields of a `Plan`, which documents them. Printers take a table, and `Plan` calls the printers."""

    mesh: MeshShape
    rows: tuple[Row, ...]
    borders: tuple[Border, ...] = ()
    rules: Rules | None = dataclasses.field(default=None, compare=False)
    transforms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    blocks: Blocks | None = None
    report: DryRun | None = None
    step: Step = dataclasses.field(default_factory=Step)
    units: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    source: Callable[..., tuple[Work, tuple[int, ...]]] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    def __getitem__(self, name: str) -> Row:
        """Return the row of a tensor, by any of its names."""
        if name not in self._by_name:
            raise PlanError(
                f'The plan has no tensor "{name}".{nearest(name, self._by_name)} It has {len(self.rows)} tensors; '
                "print(plan) lists them."
            )
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Row]:
        return {name: row for row in self.rows for name in row.tied}

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Model axes of several ranks over which no tensor and no module boundary is sharded.

        Their ranks all compute the same. A note of the plan names each one, and `shard_model` warns of it.

        >>> from torch import nn
        >>> from shardlib import plan
        >>> plan(nn.Linear(4, 4), "dp=2,tp=2", {"**": None}).idle_axes
        ('tp',)
        >>> plan(nn.Linear(4, 4), "dp=2,tp=2", {"**": "colwise"}).idle_axes
        ()
        """
        layouts = [row.compute for row in self.rows] + [b.layout for b in self.borders if b.layout is not None]
        used = {axis for layout in layouts for axis in layout.axes}
        return tuple(axis for axis in self.mesh.model_axes if axis not in used and self.mesh[axis] > 1)

    def unit(self, row: Row) -> str:
        """Return the unit that a row is gathered with, or "" for none, as for a tensor that several units share."""
        return unit_of(row.tied, self._units)

    @functools.cached_property
    def _units(self) -> frozenset[str]:
        return frozenset(self.units)

    def memory(self, *, state_tensors: int = 2) -> Memory:
        """Compute the bytes on the rank that holds most: parameters, gradients, optimizer state with master copies,
        buffers.

        Args:
            state_tensors: tensors of optimizer state for each parameter: 2 for Adam, 1 for SGD with momentum.
        """
        return largest_rank(
            self.rows,
            self.mesh,
            self.blocks,
            self.stages,
            units=self.units,
            step=self.step,
            state_tensors=state_tensors,
        )

    def movements(
        self,
        *,
        pipeline_rank: int | None = None,
        optimizer: Optimizer = "elementwise",
        state: StateShapes = like_parameter,
    ) -> tuple[Movement, ...]:
        """List what a training step sends or copies between the phases of each tensor, in the order of the rows.

        Two facts are not in the table. The optimizer is named by an argument. Gradients that are partial sums over
        model axes are known after a dry run (`shardlib.plan(..., example=batch)`), and in `get_plan(model)` after the
        first backward pass.

        Args:
            pipeline_rank: coordinate on the pipeline axis whose tensors are listed; by default those of all ranks.
            optimizer: what the optimizer needs of tensors that the plan splits: "elementwise", each rank's local
                shards; "per_tensor", full tensors, each on one rank (Muon, LAMB, Adafactor); "unknown", full gradients
                on every rank, as one that is not registered.
            state: for "per_tensor", a function from a parameter's global shape to the shapes of its optimizer state;
                by default one tensor like the parameter.

        Raises:
            PlanError: the mesh has no such rank on its pipeline axis; an unknown kind of optimizer.

        >>> import shardlib as sl
        >>> from torch import nn
        >>> made = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"}) | sl.zero(1)
        >>> for each in made.movements():
        ...     print(f"{each.name}, {each.purpose}: {each.source} -> {each.target}, {each.ready} .. {each.needed}")
        weight, gradients: out in + sum@dp : float32 -> out@dp in : float32, gradient .. step ends
        weight, updated parameters: out@dp in : float32 -> out in : float32, optimizer .. step ends
        """
        ranks = of_ranks(self.rows, self.mesh, self.blocks, self.stages, self.step)
        if pipeline_rank is not None and not 0 <= pipeline_rank < len(ranks):
            raise PlanError(
                f'movements(pipeline_rank={pipeline_rank}) was asked of a plan on mesh "{self.mesh}", whose pipeline '
                f"has {len(ranks)} ranks: give 0 to {len(ranks) - 1}, or leave it out for all."
            )
        if optimizer not in (kinds := get_args(Optimizer)):
            raise PlanError(
                f"optimizer={optimizer!r} was given, and movements depend on what an optimizer needs; give one of "
                f"{', '.join(map(repr, kinds))}.{nearest(str(optimizer), kinds)}"
            )
        rows = self.rows if pipeline_rank is None else ranks[pipeline_rank]
        holders = Counter(row.name for rank in ranks for row in rank) if self.stages or self.blocks else {}
        if optimizer == "per_tensor" and not any(needs_owner(row, self.mesh) for row in rows):
            optimizer = "elementwise"
        every = movements_of(rows, self.mesh, self.units, self.step, holders=holders, optimizer=optimizer, state=state)
        return tuple(every)

    def traffic(self, *, optimizer: Optimizer = "elementwise", state: StateShapes = like_parameter) -> TrafficTable:
        """Sum up the bytes that one rank sends in a training step, by purpose and collective; prints as a table.

        On a mesh with a pipeline axis, the result is for the rank of that axis that sends most. For the arguments see
        `movements`.

        >>> import shardlib as sl
        >>> from torch import nn
        >>> made = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"}) | sl.zero(1)
        >>> [(each.what, each.kind, each.bytes) for each in made.traffic()]
        [('gradients', 'reduce_scatter', 12288), ('updated parameters', 'all_gather', 12288)]
        """
        ranks = of_ranks(self.rows, self.mesh, self.blocks, self.stages, self.step)
        every = (self.movements(pipeline_rank=rank, optimizer=optimizer, state=state) for rank in range(len(ranks)))
        return sum_up(max(every, key=lambda movements: sum(each.bytes for each in movements)))
