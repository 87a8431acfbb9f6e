"""The value `Plan`: a frozen table with one row for each tensor, which prints, compares, counts and serializes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from shardlib._plan import changes, page, pictures, saved, text
from shardlib._plan.cluster import Cluster
from shardlib._plan.found import read_dtensors
from shardlib._plan.laid_out import find_blocks, rows_of
from shardlib._plan.moves import Moves, Names, find_moves
from shardlib._plan.rows import Phase, Row
from shardlib._plan.table import PlanTable
from shardlib._plan.timing import StepTime, time_of
from shardlib._plan.units import find_repeated, find_units
from shardlib.errors import PlanError

if TYPE_CHECKING:
    from rich.console import Group
    from torch import nn

    from shardlib._mesh_shape import MeshLike

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan(PlanTable):
    """Every tensor's layout in every phase, for one model on one mesh. A plan is a value and shards nothing itself.

    Attributes:
        mesh: names and sizes of the axes.
        rows: one per parameter and buffer, in the model's order; tied names share a row.
        borders: module inputs and outputs that are redistributed.
        rules: the user's rules; None for a plan that was read from JSON.
        transforms: names of the transforms that made it, in order.
        notes: remarks on the plan.
        blocks: the repeated part of the model, if any.
        report: the result of a dry run, if there was one.
        step: the settings of a training step.
        units: modules whose parameters are unsharded together where they are stored in shards: the repeated blocks, and
            layers outside of them. Other parameters stay unsharded from the model's forward to the end of backward.
        repeated: the units that are repeated blocks.
        stages: the stages of a pipeline axis, where the rules name them.
        source: records the work of the plan's model, for `time`; None for a plan that `sl.plan` did not make.

    >>> from torch import nn
    >>> from shardlib._plan import make_plan
    >>> made = make_plan(nn.Linear(4, 8), "dp=2,tp=4", {"weight": "out@tp in", "bias": "out@tp"})
    >>> str(made["weight"].stored), made["weight"].local_shape(made.mesh), made.memory().total
    ('out@tp in', (2, 4), 160)
    """

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __or__(self, transform: Callable[[Plan], Plan]) -> Plan:
        """Apply a transform, and append its name to `transforms`.

        >>> from torch import nn
        >>> from shardlib._plan import make_plan
        >>> def untouched(p):
        ...     return p
        >>> (make_plan(nn.Linear(4, 8), "dp=2", {"weight": None, "bias": None}) | untouched).transforms
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

    def map_rows(self, fn: Callable[[Row], Row]) -> Plan:
        """Apply `fn` to every row; transforms are built from this.

        >>> from torch import nn
        >>> from shardlib._plan import make_plan
        >>> from shardlib.layout import Layout
        >>> def zero1(p):
        ...     return p.map_rows(lambda row: row.replace(state=Layout.parse("out@dp in")))
        >>> p = make_plan(nn.Linear(4, 8, bias=False), "dp=2", {"weight": None}, transforms=[zero1])
        >>> p.memory().state, p.memory().parameters, p.transforms
        (128, 128, ('zero1',))
        """
        return self.replace(rows=tuple(map(fn, self.rows)))

    def timeline(self) -> str:
        """Draw the actions of each rank of a pipeline over time, one line a rank; an empty text without stages.

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
        """Return the table that `print(plan)` shows, for a rich console; `fold=False` gives every tensor its own
        line."""
        return text.render(self, fold=fold)

    def diff(self, other: Plan) -> str:
        """List the changes from this plan to `other`; an empty string if there are none."""
        return changes.diff(self, other)

    def moves_to(
        self,
        other: Plan,
        *,
        names: Names | None = None,
        padded: Iterable[str] = (),
        phase: Phase = "stored",
        source_ranks: Sequence[int] | None = None,
        target_ranks: Sequence[int] | None = None,
        node: int = 8,
    ) -> Moves:
        """Compute what each rank sends to each other one for the model to lie as another plan says.

        Each element is sent once to each rank that needs and lacks it, by the nearest rank that holds it; the bytes are
        the least possible. Both plans are of one model, on any two meshes.

        Args:
            other: the target plan.
            names: the target's names for tensors of this plan that differ: a mapping (other names are kept) or a
                function; None leaves a tensor out.
            padded: names of tensors that are longer in one of the plans; the rows that only one has are not moved.
            phase: the phase of both plans whose layouts are meant; "state" is that of the optimizer's state.
            source_ranks: the ranks of this plan's mesh in the job, in the order of the mesh; by default 0, 1, ...
            target_ranks: those of the other plan's mesh. They may be the same, some of the same, or different ones.
            node: the number of ranks that share a node, for the choice among ranks that hold the same element.

        Raises:
            PlanError: plans of different models, or ranks that are not those of the meshes.

        >>> import shardlib as sl
        >>> from torch import nn
        >>> rows = sl.plan(nn.Linear(4, 8, bias=False), "tp=2", {"weight": "out@tp in"})
        >>> columns = sl.plan(nn.Linear(4, 8, bias=False), "tp=4", {"weight": "out in@tp"})
        >>> moves = rows.moves_to(columns)
        >>> moves.bytes, moves.kept_bytes, moves.links[0, 1]
        (96, 32, 16)
        """
        return find_moves(
            self, other, names=names, padded=padded, phase=phase, source_ranks=source_ranks, target_ranks=target_ranks,
            node=node,
        )  # fmt: skip

    def time(
        self,
        cluster: Cluster | str | PathLike[str],
        *,
        example: Any = None,
        state_tensors: int = 2,
        compiled: bool = False,
    ) -> StepTime:
        """Predict the time of a training step on a cluster, and the most memory that a device holds in it.

        One block of each kind runs on fake tensors. Each op takes as long as its operations or its bytes need at the
        cluster's rates; each collective its latency and its bytes over the slowest link of its axes; and the queues of
        the engine, or the schedule of the pipeline, say what waits for what (docs/planner.md).

        Args:
            cluster: the machines, or the name of a preset, or the path of a file.
            example: what one call of the model, or of `pipeline_step`, is given on one data rank: a tuple of arguments,
                a mapping of keyword arguments or one tensor. Values do not matter; tensors may be on `meta`.
            state_tensors: tensors of optimizer state for each parameter: 2 for Adam, 1 for SGD with momentum.
            compiled: whether ops without products that follow each other run as one kernel, as `torch.compile` makes
                them. Memory is that of eager ops.

        Raises:
            PlanError: no example, or one that forward does not take; the plan was read from JSON, or copied; the model
                is sharded, or cannot run without values; the cluster has no rate for a dtype, or no link for an axis.

        >>> import shardlib as sl
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
        >>> made = sl.plan(model, "dp=8", {"**": None}, transforms=[sl.precision("bf16"), sl.zero(2)])
        >>> time = made.time("h100", example=torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16))
        >>> 0.3 < time.mfu < 0.8, time.compute > time.communication > 0
        (True, True)
        """
        if self.source is None:
            raise PlanError(
                "This plan has no model to run: it was read from JSON, or from DTensors. Make it with "
                "sl.plan(model, mesh, rules)."
            )
        if example is None:
            raise PlanError("Time depends on activations: give example=, the batch of one data rank.")
        work, examples = self.source(self, example)
        return time_of(self, work, Cluster.of(cluster), examples, state_tensors=state_tensors, compiled=compiled)

    def to_json(self) -> str:
        """Serialize the plan as JSON with a stable format: one row a line, keys in a fixed order, for readable diffs of
        files."""
        return saved.dump(self)

    def lines(self) -> list[str]:
        """Return one line for each tensor or activation, for comparing plans between ranks."""
        return saved.lines(self)

    @classmethod
    def from_json(cls, source: str) -> Plan:
        """Read a plan written by `to_json`.

        Raises:
            PlanError: the text is not a plan, or was written by a newer version.
        """
        return cls(**saved.load(source))

    @classmethod
    def of(cls, model: nn.Module, mesh: MeshLike | None = None) -> Plan:
        """Read the plan of a model that something else sharded, from its DTensors. Other tensors are replicated.

        Its table, `memory()` and `diff` show how the model is laid out, and what that costs beside a plan by rules.
        A data axis that splits a DTensor, as that of `fully_shard`, splits it where it is stored and not in compute.
        The state of an optimizer is taken to lie as its parameter. Of `shard_model`'s own, `get_plan` has the plan.

        Args:
            model: a module that `parallelize_module`, `fully_shard`, or a library above them sharded.
            mesh: names and sizes of all axes; by default those of the DTensors' meshes, in which an axis that splits
                nothing may be missing.

        Raises:
            MeshError: no DTensors and no mesh, a mesh without names, an axis of unknown kind.
            LayoutError: placements that no layout has.

        >>> from torch import nn
        >>> Plan.of(nn.Linear(4, 8, bias=False), "dp=2").memory().parameters
        128
        """
        shape, rules = read_dtensors(model, mesh)
        units = find_units(model)
        rows = rows_of(rules.resolve(model, shape), shape, units)
        named = (row.replace(rule=None, note="" if row.rule else "no DTensor") for row in rows)
        return cls(shape, tuple(named), blocks=find_blocks(model), units=units, repeated=find_repeated(model))

    def picture(self, name: str, phase: Phase = "stored") -> str:
        """Draw a tensor and the local shards of ranks in a phase, with characters; see `Layout.picture`.

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
            PlanError: no such tensor, or it has no such phase: a tensor that is not trained has neither grad nor state.
        """
        row = self[name]
        if phase not in row.layouts:
            raise PlanError(f'"{name}" has no phase "{phase}"; it has {", ".join(row.layouts)}.')
        return row.layouts[phase].picture(row.global_shape, self.mesh)

    def html(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page: the table, and pictures of the layouts."""
        page.write(self, path)

    def __str__(self) -> str:
        return text.plain(self)

    def _repr_html_(self) -> str:
        return page.body(self)


def _transformed(plan: Plan, transform: Callable[[Plan], Plan]) -> Plan:
    name = getattr(transform, "__name__", None) or repr(transform)
    if getattr(transform, "__annotations__", {}).get("return") == "Transform":
        raise PlanError(f"{name} was given as a transform. Call it, and give what it returns: {name}(...).")
    result = transform(plan)
    if not isinstance(result, Plan):
        raise PlanError(
            f"The transform {name} returned {type(result).__name__}; a transform takes a Plan and returns a Plan."
        )
    return result.replace(transforms=(*result.transforms, name))
