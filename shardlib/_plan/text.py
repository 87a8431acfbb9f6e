"""Plans as tables: plain text, and rich tables for a terminal."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from shardlib._mesh_shape import MeshShape
from shardlib._plan import pictures
from shardlib._plan.fold import Folded
from shardlib._plan.fold import fold as fold_items
from shardlib._plan.movements import reshards_after_forward
from shardlib._plan.readable import human_bytes, human_count
from shardlib._plan.report import DryRun, Gathered, Recorded
from shardlib._plan.rows import PHASES, Phase, Row
from shardlib._plan.schedules import splits_backward
from shardlib._plan.table import PlanTable
from shardlib.errors import printable
from shardlib.layout import Layout
from shardlib.rules import Border

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "NUMBERS",
    "border_name",
    "border_text",
    "collectives_table",
    "fold_rows",
    "headline",
    "layout_text",
    "memory_line",
    "plain",
    "render",
    "report_lines",
    "setting_text",
    "shape_text",
    "sizes_text",
    "step_line",
    "tables",
]

NUMBERS = frozenset(
    {"per rank", "calls", "bytes each", "bytes", "tensors", "times"}
    | {"FLOPs", "activations of one", "sent on", "peak of its rank"}
)
"""Columns that are aligned to the right."""

Part: TypeAlias = tuple[str, list[str], list[list[str]]]

_UNFOLDED_WIDTH = 100_000  # wider than any line: away from a terminal nothing is wrapped


def render(plan: PlanTable, *, fold: bool = True) -> Group:
    """Return the plan as a rich renderable."""
    from rich.console import Group

    parts: list[RenderableType] = [_text(headline(plan), style="bold"), _text(memory_line(plan))]
    parts += [_text(note) for note in plan.notes]
    if plan.stages:
        parts.append(_text(pictures.facts(plan)))
    if plan.report is not None:
        parts += [_text(line) for line in report_lines(plan.report)]
    for title, columns, rows in tables(plan, fold=fold):
        parts += [_text(f"\n{title}", style="bold"), _rich(columns, rows)]
    if settings := step_line(plan):
        parts.append(_text(f"\n{settings}"))
    return Group(*parts)


def _text(line: str, style: str = "") -> Text:
    """Return a line as it is: what a user wrote is not markup, nor a command to a terminal."""
    from rich.text import Text

    return Text(printable(line), style=style)


def plain(plan: PlanTable, *, fold: bool = True) -> str:
    """Format the table without colours; as wide as the terminal, or unwrapped where there is none."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNFOLDED_WIDTH
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(render(plan, fold=fold))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


def headline(plan: PlanTable) -> str:
    """Format mesh, number of tensors and size of the model."""
    parameters = [row for row in plan.rows if row.kind == "parameter"]
    count = sum(_numel(row) for row in parameters)
    size = sum(_numel(row) * row.dtype.itemsize for row in parameters)
    ranks = plan.mesh.world_size
    transforms = f" after {', '.join(plan.transforms)}" if plan.transforms else ""
    return (
        f"Plan on {plan.mesh} ({ranks:,} rank{'s' if ranks > 1 else ''}){transforms}: {len(plan.rows)} tensors, "
        f"{human_count(count)} parameters, {human_bytes(size)}"
    )


def memory_line(plan: PlanTable) -> str:
    """Format the figures of `Plan.memory` as a sentence."""
    memory = plan.memory()
    host = f", of which {human_bytes(memory.host)} in host memory" if memory.host else ""
    master = ", and a master copy" if any(row.has_master for row in plan.rows) else ""
    buckets = f"; buckets take up to {human_bytes(memory.buckets)} more in a step" if memory.buckets else ""
    return (
        f"Largest rank: parameters {human_bytes(memory.parameters)}, gradients {human_bytes(memory.gradients)}, "
        f"optimizer state (2 tensors, AdamW{master}) {human_bytes(memory.state)}, buffers "
        f"{human_bytes(memory.buffers)}; total {human_bytes(memory.total)}{host}{buckets}"
    )


def step_line(plan: PlanTable) -> str:
    """Format the settings of the step as a sentence; empty where there are none."""
    settings = plan.step.settings()
    buckets = settings.pop("bucket_mb", plan.step.bucket_mb)
    if not settings and not plan.mesh.data_ranks > 1:
        return ""
    shown = [f"buckets of {buckets:g} MiB", *(f"{name} {setting_text(value)}" for name, value in settings.items())]
    return f"Step: {', '.join(shown)}"


def setting_text(value: object) -> str:
    """Format the value of a setting.

    >>> setting_text(("^h.0", "^h.1")), setting_text(True)
    ('^h.{0-1} x2', 'True')
    """
    if isinstance(value, tuple):
        return " and ".join(group.title for group in fold_items(value, name=str, same=lambda _: None)) or "none"
    return str(value).removeprefix("torch.")


def report_lines(report: DryRun) -> Iterator[str]:
    """Iterate over the sentences that describe a dry run."""
    sent = sum(c.sent for c in report.collectives)
    whose = " of the rank with the highest peak" if report.ranks else ""
    kept = f", {human_bytes(report.activation_bytes)} of activations after forward" if report.activation_bytes else ""
    counted = f"; {human_count(report.flops)} floating-point operations" if report.flops else ""
    yield (
        f"One training step{whose}: {report.count()} collectives, whose inputs take {human_bytes(report.bytes())} on a "
        f"rank, {human_bytes(sent)} sent by ring algorithms; live tensors take {human_bytes(report.start_bytes)} "
        f"before it, {human_bytes(report.peak_bytes)} at the peak, without optimizer state{kept}{counted}"
    )
    if not any(each.gathered for each in (report, *report.ranks)):
        yield "Every op has a proven sharding strategy; no op all-gathers its operands."


def fold_rows(rows: Iterable[Row]) -> list[Folded[Row]]:
    """Fold the rows of repeated blocks."""
    return fold_items(rows, name=lambda row: row.name, same=_folding_key)


def shape_text(row: Row, mesh: MeshShape) -> str:
    """Format the local shape of the largest shard; `<=` marks sizes that are smaller on other ranks."""
    uneven = row.stored.uneven_dims(row.global_shape, mesh)
    sizes = row.local_shape(mesh)
    return sizes_text(f"<={n}" if dim in uneven else str(n) for dim, n in enumerate(sizes))


def layout_text(layout: Layout | None) -> str:
    """Format a layout; "replicated" where its pattern has no named and no sharded dim."""
    if layout is None:
        return "-"
    pattern, colon, phase = str(layout).partition(":")
    named = bool(set(pattern) - set("_ ."))
    return str(layout) if named else f"replicated :{phase}" if colon else "replicated"


def tables(plan: PlanTable, *, fold: bool = True) -> Iterator[Part]:
    """Iterate over the non-empty tables of a plan: (title, columns, rows)."""
    parts = [_tensors(plan, fold), _borders(plan), _stages(plan), _traffic(plan)]
    if plan.report is not None:
        for rank, report in enumerate(plan.report.ranks):
            parts.append(collectives_table(report, f", rank {rank} of {','.join(plan.mesh.pipeline_axes)}"))
        parts += [*([] if plan.report.ranks else [collectives_table(plan.report)]), _gathered(plan.report)]
    yield from (part for part in parts if part[2])


def _tensors(plan: PlanTable, folded: bool) -> Part:
    columns = _phase_columns(plan.rows)
    groups = fold_rows(plan.rows) if folded else [Folded(row.name, row, 1) for row in plan.rows]

    def cells(group: Folded[Row]) -> list[str]:
        row = group.first
        layouts = [layout_text(row.layouts.get(phases[0])) for phases in columns.values()]
        size = human_bytes(group.count * row.local_bytes(plan.mesh))
        shapes = [sizes_text(row.global_shape), shape_text(row, plan.mesh), *layouts, size]
        return [group.title, *shapes, row.rule or "-", _note(row, plan)]

    titles = ["tensor", "global shape", "local shape", *columns, "per rank", "rule", "note"]
    return "Tensors", titles, [cells(group) for group in groups]


def _phase_columns(rows: Sequence[Row]) -> dict[str, list[Phase]]:
    """Return the phases of each column by its title; phases with the same layouts for every tensor share one."""
    groups: dict[tuple[Layout, ...], list[Phase]] = {}
    for phase in PHASES:
        groups.setdefault(tuple(row.layouts.get(phase, row.stored) for row in rows), []).append(phase)
    if len(groups) == 1:
        return {"layout": list(PHASES)}
    return {" = ".join(phases): phases for phases in groups.values()}


def _note(row: Row, plan: PlanTable) -> str:
    kind = "" if row.kind == "parameter" else "buffer" if row.persistent else "buffer, not in the state dict"
    unsharded = not row.added("stored").isdisjoint(plan.mesh.data_axes)
    until = "the step has ended" if splits_backward(plan.step.schedule) else "its backward"
    stays = f"stays unsharded until {until}" if unsharded and not reshards_after_forward(row, plan.step) else ""
    return "; ".join(filter(None, (kind, row.note, stays)))


def _borders(plan: PlanTable) -> Part:
    caused = _caused(plan.report) if plan.report else {}
    groups = fold_items(plan.borders, name=border_name, same=lambda b: (_causeless(b), caused.get(b.module)))

    def cells(group: Folded[Border]) -> list[str]:
        border = group.first
        measured = ["; ".join(caused.get(border.module, ["none"]))] if plan.report else []
        return [group.title, border_text(border), *measured, border.rule or "-", border.reason]

    collectives = ["collectives in a step"] if plan.report else []
    columns = ["activation", "layout", *collectives, "rule", "why"]
    return "Activations at module boundaries", columns, [cells(group) for group in groups]


def _stages(plan: PlanTable) -> Part:
    columns = ["stage", "rank", "modules", "parameters", "per rank", "microbatches held"]
    columns += ["FLOPs", "activations of one", "sent on", "peak of its rank"] if pictures.is_run(plan) else []
    return "Stages of the pipeline", columns, pictures.stage_rows(plan) if plan.stages else []


def _causeless(border: Border) -> Hashable:
    return border.layout, border.rule, border.reason


def _caused(report: DryRun) -> dict[str, tuple[str, ...]]:
    """Return the collectives that each module causes."""
    found_by = [each for one in report.ranks or (report,) for each in one.collectives if each.module]
    counted = Counter((c.module, f"{c.kind} over {_axes(c)}, {c.phase}") for c in found_by)
    found: dict[str, tuple[str, ...]] = {}
    for (module, what), n in counted.items():
        found[module] = (*found.get(module, ()), f"{what} x{n}" if n > 1 else what)
    return found


def _traffic(plan: PlanTable) -> Part:
    sent = plan.traffic()
    return "Sent by one rank in a training step, for parameters, gradients and state", list(sent.columns), sent.cells()


def collectives_table(report: DryRun, whose: str = "") -> Part:
    """Return the table of the collectives of a step."""
    counted = Counter(report.collectives).items()
    groups = fold_items(counted, name=lambda item: item[0].module, same=_same_collective)

    def cells(group: Folded[tuple[Recorded, int]]) -> list[str]:
        what, times = group.first
        calls = times * group.count
        sizes = [str(calls), human_bytes(what.bytes), human_bytes(calls * what.bytes)]
        return [group.title or _nameless(what), what.phase, what.kind, _axes(what), *sizes]

    columns = ["caused by", "phase", "collective", "over", "calls", "bytes each", "bytes"]
    return f"Collectives of one training step{whose}", columns, [cells(group) for group in groups]


def _nameless(what: Recorded) -> str:
    return "(gradients of parameters)" if what.phase == "backward" else "(model)"


def _same_collective(item: tuple[Recorded, int]) -> Hashable:
    what, times = item
    return what.phase, what.kind, what.axes, what.bytes, times


def _gathered(report: DryRun) -> Part:
    counted = Counter(each for one in report.ranks or (report,) for each in one.gathered).items()
    groups = fold_items(counted, name=lambda item: item[0].module, same=lambda i: (i[0].op, i[0].reason, i[1]))

    def cells(group: Folded[tuple[Gathered, int]]) -> list[str]:
        what, times = group.first
        return [what.op, group.title or "(model)", str(times * group.count), what.reason]

    return "Ops that all-gather their operands", ["op", "in", "calls", "why"], [cells(group) for group in groups]


def sizes_text(sizes: Iterable[int | str]) -> str:
    """Format a shape.

    >>> sizes_text((4, 2))
    '(4, 2)'
    """
    return f"({', '.join(map(str, sizes))})"


def border_name(border: Border) -> str:
    return f"{border.module}.{border.side}".lstrip(".")


def border_text(border: Border) -> str:
    return layout_text(border.layout) if border.layout is not None else "unchanged"


def _folding_key(row: Row) -> Hashable:
    tied = len(row.tied)
    fields = (
        row.kind,
        row.global_shape,
        row.dtype,
        row.requires_grad,
        row.persistent,
        tied,
        row.rule,
        row.note,
        row.reshard,
    )
    return fields, tuple(row.layouts.items())


def _axes(collective: Recorded) -> str:
    return ",".join(collective.axes) or "a group of its own"


def _numel(row: Row) -> int:
    return math.prod(row.global_shape)


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_text, row))
    return table
