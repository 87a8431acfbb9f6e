"""The plan: a frozen table with one row for each tensor, which prints, compares, counts and is read back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from shardlib._mesh import MeshShape
from shardlib._plan import changes, page, pictures, saved, text
from shardlib._plan.memory import Blocks, Memory, largest_rank, of_ranks
from shardlib._plan.movements import Movement, Traffic, movements_of, sum_up
from shardlib._plan.report import DryRun
from shardlib._plan.rows import Phase, Row
from shardlib._plan.step import Step
from shardlib._plan.units import unit_of
from shardlib.errors import PlanError, nearest
from shardlib.rules import Border, Rules, Stage

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Every tensor's layout in every phase, for one model on one mesh. A value: nothing is sharded by it.

    Attributes:
        mesh: names and sizes of the axes.
        rows: one per parameter and buffer, in the model's order; tied names share a row.
        borders: where activations are brought into a layout.
        rules: what the user declared; None for a plan that was read back.
        transforms: names of the transforms that made it, in order.
        notes: what holds for the plan as a whole.
        blocks: the repeated part of the model, if any.
        report: what a dry run found, if one was made.
        step: how a training step runs.
        units: modules whose parameters are gathered together where they are stored in pieces: the repeated blocks, and
            layers outside of them. What lies in none stays gathered from the model's entry to the end of backward.
        repeated: those of the units that are repeated blocks.
        stages: of a pipeline axis, where the rules name them.

    >>> from torch import nn
    >>> from shardlib._plan import plan
    >>> made = plan(nn.Linear(4, 8), "dp=2,tp=4", {"weight": "out@tp in", "bias": "out@tp"})
    >>> str(made["weight"].stored), made["weight"].local_shape(made.mesh), made.memory().total
    ('out@tp in', (2, 4), 160)
    """

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

    def __getitem__(self, name: str) -> Row:
        """The row of a tensor, by any of its names."""
        if name not in self._by_name:
            raise PlanError(
                f'The plan has no tensor "{name}".{nearest(name, self._by_name)} It has {len(self.rows)} rows; '
                "print(plan) lists them."
            )
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, Row]:
        return {name: row for row in self.rows for name in row.tied}

    def replace(self, **changes: Any) -> Plan:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __or__(self, transform: Callable[[Plan], Plan]) -> Plan:
        """The plan after a transform, which `transforms` then names.

        >>> from torch import nn
        >>> from shardlib._plan import plan
        >>> def untouched(p):
        ...     return p
        >>> (plan(nn.Linear(4, 8), "dp=2", {"weight": None, "bias": None}) | untouched).transforms
        ('untouched',)
        """
        if not callable(transform):
            raise PlanError(
                f"A transform was given as {transform!r}; give functions that take a Plan and return a Plan."
            )
        made = self
        for part in getattr(transform, "parts", (transform,)):
            made = _transformed(made, part)
        return made

    def unit(self, row: Row) -> str:
        """The unit that a row is gathered with, or "" for none, as of what several units share."""
        return unit_of(row.tied, self._units)

    @functools.cached_property
    def _units(self) -> frozenset[str]:
        return frozenset(self.units)

    def map_rows(self, fn: Callable[[Row], Row]) -> Plan:
        """The plan with `fn` applied to every row: what a transform does.

        >>> from torch import nn
        >>> from shardlib._plan import plan
        >>> from shardlib.layout import Layout
        >>> def zero1(p):
        ...     return p.map_rows(lambda row: row.replace(state=Layout.parse("out@dp in")))
        >>> p = plan(nn.Linear(4, 8, bias=False), "dp=2", {"weight": None}, transforms=[zero1])
        >>> p.memory().state, p.memory().parameters, p.transforms
        (128, 128, ('zero1',))
        """
        return self.replace(rows=tuple(map(fn, self.rows)))

    def memory(self, *, state_tensors: int = 2) -> Memory:
        """Bytes on the rank that holds most: parameters, gradients, optimizer state with master copies, buffers.

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

    def movements(self, *, pipeline_rank: int | None = None) -> tuple[Movement, ...]:
        """What a training step moves over data axes and between memories, tensor by tensor, in the order of the rows.

        Args:
            pipeline_rank: whose tensors, on a mesh with a pipeline axis; by default those of all.

        Raises:
            PlanError: the mesh has no such rank on its pipeline axis.

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
        rows = self.rows if pipeline_rank is None else ranks[pipeline_rank]
        return tuple(movements_of(rows, self.mesh, self.units, self.step))

    def traffic(self) -> tuple[Traffic, ...]:
        """What one rank sends in a training step over the data axes, by purpose and collective: `movements`, summed up.

        On a mesh with a pipeline axis it is the rank of that axis which sends most.

        >>> import shardlib as sl
        >>> from torch import nn
        >>> made = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"}) | sl.zero(1)
        >>> [(each.what, each.kind, each.bytes) for each in made.traffic()]
        [('gradients', 'reduce_scatter', 12288), ('updated parameters', 'all_gather', 12288)]
        """
        ranks = of_ranks(self.rows, self.mesh, self.blocks, self.stages, self.step)
        every = (self.movements(pipeline_rank=rank) for rank in range(len(ranks)))
        return sum_up(max(every, key=lambda movements: sum(each.bytes for each in movements)))

    def timeline(self) -> str:
        """What each rank of a pipeline does when, a line for each: an empty text without stages.

        >>> import shardlib as sl
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> rules = sl.Rules({"**": None}, stages="0 | 1")
        >>> print(sl.plan(model, "pp=2", rules, transforms=[sl.pipeline("gpipe", 2)]).timeline())
        rank 0  F0 F1 .  .  .  B0 B0 B1 B1
        rank 1  .  F0 F1 B0 B0 B1 B1 .  .
        """
        return pictures.written(pictures.times(self), len(self.stages)) if self.stages else ""

    def table(self, *, fold: bool = True) -> Group:
        """What `print(plan)` shows, for a rich console; `fold=False` gives every tensor a line of its own."""
        return text.render(self, fold=fold)

    def diff(self, other: Plan) -> str:
        """What changes from this plan to `other`, in lines; an empty string if nothing does."""
        return changes.diff(self, other)

    def to_json(self) -> str:
        """Stable text: one row a line, keys in a fixed order, so that a plan kept as a file shows readable changes."""
        return saved.dump(self)

    def lines(self) -> list[str]:
        """What the plan does, one tensor or border a line, for comparing plans between ranks."""
        return saved.lines(self)

    @classmethod
    def from_json(cls, source: str) -> Plan:
        """A plan written by `to_json`.

        Raises:
            PlanError: the text is no plan, or was written by a newer version.
        """
        return cls(**saved.load(source))

    def picture(self, name: str, phase: Phase = "stored") -> str:
        """A tensor cut into the pieces that ranks hold in a phase, drawn with characters; see `Layout.picture`.

        >>> import shardlib as sl
        >>> from torch import nn
        >>> print(sl.plan(nn.Linear(4, 8), "tp=2", {"^": "colwise"}).picture("weight"))
        (8, 4) "out@tp in" on "tp=2"
             in
        out  0
            ┌───┐
        0   │ 0 │
            ├───┤
        4   │ 1 │
            └───┘

        Raises:
            PlanError: no such tensor, or it has no such phase: what is not trained is only stored and computed with.
        """
        row = self[name]
        if phase not in row.layouts:
            raise PlanError(f'"{name}" has no phase "{phase}"; it has {", ".join(row.layouts)}.')
        return row.layouts[phase].picture(row.global_shape, self.mesh)

    def html(self, path: str | PathLike[str]) -> None:
        """Write a page that needs nothing else: the table, and pictures of how parameters lie on the mesh."""
        page.write(self, path)

    def __str__(self) -> str:
        return text.plain(self)

    def _repr_html_(self) -> str:
        return page.body(self)


def _transformed(plan: Plan, transform: Callable[[Plan], Plan]) -> Plan:
    result = transform(plan)
    name = getattr(transform, "__name__", None) or repr(transform)
    if not isinstance(result, Plan):
        raise PlanError(
            f"The transform {name} returned {type(result).__name__}; a transform takes a Plan and returns a Plan."
        )
    return result.replace(transforms=(*result.transforms, name))
