"""The report of a dry audit, as a value, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardlib._mesh_shape import MeshShape
from shardlib._plan import DryRun, Plan
from shardlib._plan.fold import fold
from shardlib._plan.readable import aligned, human_bytes, human_count
from shardlib._plan.report import RunPhase
from shardlib._plan.text import collectives_table, memory_line
from shardlib.errors import printable

__all__ = ["DryFinding", "DryReport", "DryWork", "Kept"]

FindingKind = Literal[
    "unreduced gradient",
    "wrong placement",
    "unfinished sum",
    "untied parameter",
    "pending gradient",
    "replicated parameters",
    "replicated compute",
    "idle axis",
]


@dataclass(frozen=True)
class DryFinding:
    """A finding of a dry audit, or a remark.

    Attributes:
        kind: "unreduced gradient", "wrong placement", "unfinished sum" or "untied parameter" make a run wrong; "pending
            gradient", "replicated parameters", "replicated compute" and "idle axis" are remarks.
        names: the parameters or modules that it is about, in the order of the model.
        axes: the axes of the mesh.
        text: the finding in a sentence or two, with what to do.
        bytes: what it costs in memory on each rank, where it does.
    """

    kind: FindingKind
    names: tuple[str, ...]
    axes: tuple[str, ...]
    text: str
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class DryWork:
    """The floating-point operations of one module's own products on a rank, and the axes whose ranks all repeat them.

    Attributes:
        module: its name.
        phase: "forward", "backward" or "outside".
        alike: the axes over which all ranks compute the same from the same.
        flops: the operations on one rank.
    """

    module: str
    phase: RunPhase
    alike: tuple[str, ...]
    flops: int


@dataclass(frozen=True)
class Kept:
    """A parameter as one rank holds it.

    Attributes:
        name: its name.
        global_shape, local_shape: its shape, and that of this rank's part.
        bytes: the bytes of this rank's part.
        sharded, replicated: the axes of several ranks that split it, and those whose ranks hold the same.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    bytes: int
    sharded: tuple[str, ...]
    replicated: tuple[str, ...]


@dataclass(frozen=True)
class DryReport:
    """The outcome of a dry audit. True in a condition where nothing was found; prints as text.

    Attributes:
        mesh: the mesh.
        rank: the rank that ran.
        findings: what makes a run of this code wrong.
        remarks: what costs memory or time, or depends on what the training loop does.
        step: collectives, live bytes and operations of the step, as those of a plan's dry run.
        work: where products are computed, and which ranks repeat them.
        parameters: the parameters as this rank holds them.
        plan: the layouts, where DTensors name them by the axes of the mesh; else None.
        notes: what else there is to know of this run.
        seconds: the seconds that it took.
    """

    mesh: MeshShape
    rank: int
    findings: tuple[DryFinding, ...]
    remarks: tuple[DryFinding, ...]
    step: DryRun
    work: tuple[DryWork, ...]
    parameters: tuple[Kept, ...]
    plan: Plan | None
    notes: tuple[str, ...]
    seconds: float

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        return printable("\n".join(_lines(self)))

    def to_json(self) -> str:
        """Serialize all but the seconds and the plan, with collectives counted; the same run gives the same text."""
        return json.dumps(_as_data(self), indent=1)


def _lines(report: DryReport) -> Iterator[str]:
    ranks = report.mesh.world_size
    found = f"{len(report.findings)} finding{'s' * (len(report.findings) != 1)}" if report.findings else "no findings"
    yield f"Dry audit on {report.mesh} ({ranks:,} rank{'s' * (ranks != 1)}), as rank {report.rank}: {found}"
    yield from (f"  {each}" for each in report.findings)
    yield from (f"  remark: {each}" for each in report.remarks)
    yield from (f"  {note}" for note in report.notes)
    if report.plan is not None:
        yield memory_line(report.plan)
    step = report.step
    yield (
        f"One step: {step.count()} collectives, {human_bytes(sum(each.sent for each in step.collectives))} sent by "
        f"ring algorithms; live tensors take {human_bytes(step.start_bytes)} before it and "
        f"{human_bytes(step.peak_bytes)} at the peak, without optimizer state; {human_count(step.flops)} "
        "floating-point operations"
    )
    for title, columns, rows, left in (
        (*collectives_table(step), 4),
        (*_work_table(report), 2),
        (*_kept_table(report), 4),
    ):
        if rows:
            yield f"\n{title}"
            yield aligned([columns, *rows], left=left)


def _work_table(report: DryReport) -> tuple[str, list[str], list[list[str]]]:
    """Return the products that several ranks repeat, most first; data axes never do."""
    total = report.step.flops or 1
    repeated: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for each in report.work:
        if each.alike:
            repeated[each.module, each.alike] += each.flops
    groups = fold(repeated.items(), name=lambda item: item[0][0], same=lambda item: (item[0][1], item[1]))
    rows = [(group.count * group.first[1], group) for group in groups]
    cells = [
        [group.title or "(model)", ",".join(group.first[0][1]), human_count(flops), f"{100 * flops / total:.1f}%"]
        for flops, group in sorted(rows, key=lambda row: -row[0])
    ]
    return "Products that every rank of an axis repeats", ["module", "on each rank of", "FLOPs", "of a rank's"], cells


def _kept_table(report: DryReport) -> tuple[str, list[str], list[list[str]]]:
    groups = fold(
        (each for each in report.parameters if each.replicated),
        name=lambda each: each.name,
        same=lambda each: (each.global_shape, each.local_shape, each.replicated, each.bytes),
    )
    cells = [
        [
            group.title,
            ",".join(group.first.replicated),
            str(group.first.global_shape),
            str(group.first.local_shape),
            human_bytes(group.count * group.first.bytes),
        ]
        for group in sorted(groups, key=lambda group: -group.count * group.first.bytes)
    ]
    columns = ["parameter", "held by each rank of", "global shape", "local shape", "bytes"]
    return "Parameters that several ranks hold alike", columns, cells


def _as_data(report: DryReport) -> dict[str, Any]:
    collectives = Counter(report.step.collectives).items()
    return {
        "mesh": str(report.mesh),
        "rank": report.rank,
        "ok": bool(report),
        "findings": _listed(report.findings),
        "remarks": _listed(report.remarks),
        "notes": list(report.notes),
        "collectives": [{**dataclasses.asdict(each), "calls": calls} for each, calls in collectives],
        "flops": report.step.flops,
        "start_bytes": report.step.start_bytes,
        "peak_bytes": report.step.peak_bytes,
        "work": _listed(report.work),
        "parameters": _listed(report.parameters),
    }


def _listed(values: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in values]
