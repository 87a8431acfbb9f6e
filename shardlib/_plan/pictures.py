"""Pipelines as text and pictures: a table of stages, and the timeline of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardlib._plan.fold import fold
from shardlib._plan.memory import is_on_stage
from shardlib._plan.readable import human_bytes, human_count
from shardlib._plan.schedules import Timed, bubble, default_schedule, in_flight, order, rank_of_stage, timeline
from shardlib._plan.table import PlanTable

__all__ = ["drawn", "facts", "is_run", "stage_rows", "times", "written"]

_COLOURS = {"F": "#8db7e8", "B": "#f2b38f", "I": "#f2cf8f", "W": "#a9d6a0"}
_MEANING = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_UNIT, _LANE = 22.0, 20.0  # pixels, of a forward's width and of a rank's height


def times(plan: PlanTable) -> tuple[tuple[Timed, ...], ...]:
    """Return the timeline of each rank, where a forward takes one unit of time on every stage; with twice as many
    microbatches as ranks where the plan does not fix their number."""
    schedule, ranks = _schedule(plan)
    return timeline(order(schedule, ranks, len(plan.stages), plan.step.microbatches or 2 * ranks))


def _schedule(plan: PlanTable) -> tuple[str, int]:
    ranks = plan.mesh.only(plan.mesh.pipeline_axes).world_size
    return plan.step.schedule or default_schedule(ranks, len(plan.stages)), ranks


def facts(plan: PlanTable) -> str:
    """Describe the schedule in a sentence."""
    schedule, ranks = _schedule(plan)
    timed = times(plan)
    count = 1 + max(each.action.microbatch for rank in timed for each in rank)
    assumed = "" if plan.step.microbatches else ", if there are so many"
    return (
        f"{len(plan.stages)} stages on {ranks} ranks by {schedule}, {count} microbatches{assumed}: ranks stand idle "
        f"for {bubble(timed):.1%} of a step if all stages take equally long and sending takes no time"
    )


def stage_rows(plan: PlanTable) -> list[list[str]]:
    """Return a row per stage: its rank, its modules, its parameters, and the number of microbatches that its rank
    holds.

    After a dry run also: operations in a step, bytes of the activations of one microbatch and of its messages to the
    next stage, and the peak of its rank.
    """
    schedule, ranks = _schedule(plan)
    microbatches = [in_flight([each.action for each in rank]) for rank in times(plan)]
    made = []
    for number, stage in enumerate(plan.stages):
        rank = rank_of_stage(schedule, ranks, number)
        rows = [row for row in plan.rows if is_on_stage(row, [stage], plan.stages)]
        own = [row for row in rows if row.kind == "parameter"]
        names = ", ".join(
            group.title for group in fold([*stage.modules, *stage.tensors], name=str, same=lambda _: None)
        )
        count = human_count(sum(math.prod(row.global_shape) for row in own))
        size = human_bytes(sum(row.local_bytes(plan.mesh) for row in rows))
        made.append([str(number), str(rank), names, count, size, str(microbatches[rank])])
        if is_run(plan) and (report := plan.report) is not None:
            run = report.stages[number]
            peak = human_bytes(report.ranks[rank].peak_bytes)
            made[-1] += [human_count(run.flops), human_bytes(run.activation_bytes), human_bytes(run.sent), peak]
    return made


def is_run(plan: PlanTable) -> bool:
    """Return whether a dry run has measured the stages."""
    return plan.report is not None and len(plan.report.stages) == len(plan.stages) > 0


def written(timed: Sequence[Sequence[Timed]], stages: int) -> str:
    """Format a line for each rank and a column for each unit of time: F, B, I or W with the microbatch, after the stage
    where ranks have several.

    >>> from shardlib._plan.schedules import order
    >>> print(written(timeline(order("1f1b", 2, 2, 2)), 2))
    rank 0  F0 F1 .  .  B0 B0 .  B1 B1
    rank 1  .  F0 B0 B0 F1 B1 B1 .  .
    """
    several = stages > len(timed)
    length = round(max((each.end for rank in timed for each in rank), default=0))
    lines = []
    for rank in timed:
        cells = ["."] * length
        for each in rank:
            kind, stage, m = each.action
            for at in range(round(each.start), round(each.end)):
                cells[at] = f"{stage if several else ''}{kind}{m}"
        lines.append(cells)
    width = max((len(cell) for line in lines for cell in line), default=1)
    return "\n".join(
        f"rank {n}  {' '.join(cell.ljust(width) for cell in line)}".rstrip() for n, line in enumerate(lines)
    )


def drawn(timed: Sequence[Sequence[Timed]]) -> str:
    """Draw the same as an SVG picture."""
    length = max((each.end for rank in timed for each in rank), default=0.0)
    width, height = 60 + _UNIT * length, (_LANE + 4) * len(timed)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" font-size="10" role="img">'
    ]
    for n, rank in enumerate(timed):
        top = n * (_LANE + 4)
        parts.append(f'<text x="0" y="{top + 14:g}">rank {n}</text>')
        for each in rank:
            kind, stage, m = each.action
            x, wide = 60 + _UNIT * each.start, _UNIT * (each.end - each.start)
            title = escape(f"{_MEANING[kind]} of microbatch {m} on stage {stage}")
            parts.append(
                f'<g><title>{title}</title><rect x="{x:g}" y="{top:g}" width="{wide:g}" height="{_LANE:g}" '
                f'fill="{_COLOURS[kind]}" stroke="#fff"/><text x="{x + 4:g}" y="{top + 14:g}">{m}</text></g>'
            )
    return "".join([*parts, "</svg>"])
