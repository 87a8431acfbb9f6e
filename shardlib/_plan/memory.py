"""Bytes per rank, computed from the plan alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardlib._mesh_shape import MeshShape
from shardlib._plan.buckets import workspace_bytes
from shardlib._plan.movements import movements_of
from shardlib._plan.rows import Phase, Row
from shardlib._plan.schedules import default_schedule, rank_of_stage
from shardlib._plan.step import Step
from shardlib.rules import Stage

__all__ = ["Blocks", "Memory", "blocks_per_stage", "is_on_stage", "largest_rank", "of_ranks", "stages"]


@dataclass(frozen=True)
class Memory:
    """Bytes that the largest rank holds between the backward pass and the optimizer step.

    `state` includes a master copy of parameters that are stored in a narrower dtype than their state. `host` is the
    part that layouts keep in host memory; it is included in the other figures. `buckets` is not included: it is the
    largest workspace of a step (`buckets.py`).
    """

    parameters: int
    gradients: int
    state: int
    buffers: int
    host: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state + self.buffers

    @property
    def device(self) -> int:
        return self.total - self.host


@dataclass(frozen=True)
class Blocks:
    """The repeated part of a model: `prefix` names its largest `ModuleList`, which has `count` blocks.

    `after` names the tensors that the model registers after it: final norm, head.
    """

    prefix: str
    count: int
    after: tuple[str, ...] = ()

    def index(self, name: str) -> int | None:
        """Return the index of the block that a tensor belongs to, or None.

        >>> Blocks("model.layers", 4).index("model.layers.3.mlp.up.weight")
        3
        """
        head, _, rest = name[len(self.prefix) :].partition(".")
        number = rest.partition(".")[0]
        inside = name.startswith(self.prefix) and head == "" and number.isdecimal()
        return int(number) if inside else None


def largest_rank(
    rows: Sequence[Row],
    mesh: MeshShape,
    blocks: Blocks | None,
    named: Sequence[Stage] = (),
    *,
    units: Sequence[str] = (),
    step: Step,
    state_tensors: int = 2,
) -> Memory:
    """Sum every row's largest shard; with a pipeline axis, for the rank that holds most.

    Rank 0 of every axis holds the largest shard of every split, fused or not, so the sum of the largest shards is the
    size on that rank, and no other rank holds more.
    """
    return max(
        (
            replace(_sum(stage, mesh, state_tensors), buckets=_workspace(stage, mesh, units, step))
            for stage in of_ranks(rows, mesh, blocks, named, step)
        ),
        key=lambda memory: memory.total,
    )


def _workspace(rows: Sequence[Row], mesh: MeshShape, units: Sequence[str], step: Step) -> int:
    return workspace_bytes(movements_of(rows, mesh, units, step), units, mesh, step)


def of_ranks(
    rows: Sequence[Row], mesh: MeshShape, blocks: Blocks | None, named: Sequence[Stage], step: Step
) -> list[list[Row]]:
    """Return rows by rank of the pipeline: those of its stages, as the rules name them or else by blocks."""
    if not named:
        return stages(rows, mesh, blocks)
    ranks = mesh.only(mesh.pipeline_axes).world_size
    schedule = step.schedule or default_schedule(ranks, len(named))
    mine = [[s for i, s in enumerate(named) if rank_of_stage(schedule, ranks, i) == rank] for rank in range(ranks)]
    return [[row for row in rows if is_on_stage(row, own, named)] for own in mine]


def is_on_stage(row: Row, own: Sequence[Stage], every: Sequence[Stage]) -> bool:
    """Return whether one of the stages `own` holds a tensor; a buffer that no stage names is held by all."""
    here = any(stage.holds(name) for stage in own for name in row.tied)
    return here or not any(stage.holds(name) for stage in every for name in row.tied)


def stages(rows: Sequence[Row], mesh: MeshShape, blocks: Blocks | None) -> list[list[Row]]:
    """Return rows by pipeline stage: equal runs of blocks, modules before them on the first stage, those after on the
    last.

    A tied tensor is on the stages of all its names. Where blocks do not divide, the first and the last stage, which
    hold embedding and head, get one block less. A model without blocks is on every stage.
    """
    count = mesh.only(mesh.pipeline_axes).world_size if mesh.pipeline_axes else 1
    if count == 1 or blocks is None:
        return [list(rows)] * count
    stage_of_block = [stage for stage, n in enumerate(blocks_per_stage(blocks.count, count)) for _ in range(n)]
    by_stage: list[list[Row]] = [[] for _ in range(count)]
    for row in rows:
        for stage in sorted({_stage(name, blocks, stage_of_block) for name in row.tied}):
            by_stage[stage].append(row)
    return by_stage


def _stage(name: str, blocks: Blocks, stage_of_block: list[int]) -> int:
    block = blocks.index(name)
    if block is not None:
        return stage_of_block[block]
    return stage_of_block[-1] if name in blocks.after else 0


def blocks_per_stage(blocks: int, count: int) -> list[int]:
    """Divide blocks as evenly as possible; the stages in the middle take the remainder first.

    >>> blocks_per_stage(126, 16)
    [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]
    """
    base, rest = divmod(blocks, count)
    favoured = [*range(1, count - 1), count - 1, 0][:rest]
    return [base + (stage in favoured) for stage in range(count)]


def _sum(rows: Iterable[Row], mesh: MeshShape, state_tensors: int) -> Memory:
    total = {"parameters": 0, "gradients": 0, "state": 0, "buffers": 0, "host": 0}
    for what, size, on_host in (part for row in rows for part in _parts(row, mesh, state_tensors)):
        total[what] += size
        total["host"] += size if on_host else 0
    return Memory(**total)


def _parts(row: Row, mesh: MeshShape, state_tensors: int) -> Iterator[tuple[str, int, bool]]:
    """Iterate over (category, bytes, in host memory?) of one row."""
    names: dict[Phase, tuple[str, int]] = {
        "stored": ("parameters" if row.kind == "parameter" else "buffers", 1),
        "grad": ("gradients", 1),
        "state": ("state", state_tensors + row.has_master),
    }
    for phase, (what, copies) in names.items():
        if phase in row.layouts:
            yield what, copies * row.local_bytes(mesh, phase=phase), row.layouts[phase].memory == "host"
