"""The differences of two plans, as text."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

from shardlib._dtypes import name_of
from shardlib._plan.fold import fold
from shardlib._plan.memory import Memory
from shardlib._plan.readable import human_bytes
from shardlib._plan.rows import PHASES, Row
from shardlib._plan.step import Step
from shardlib._plan.table import PlanTable
from shardlib._plan.text import (
    border_name,
    border_text,
    fold_rows,
    layout_text,
    setting_text,
    sizes_text,
)

__all__ = ["diff"]


def diff(before: PlanTable, after: PlanTable) -> str:
    """List the differences: `~` for changes, `-` for entries of the first plan only, `+` for those of the second
    only."""
    lines = [*_head_changes(before, after), *_row_changes(before, after), *_border_changes(before, after)]
    lines += [*_memory_changes(before.memory(), after.memory()), *_traffic_changes(before, after)]
    return "\n".join(lines)


def _head_changes(before: PlanTable, after: PlanTable) -> Iterator[str]:
    if before.mesh != after.mesh:
        yield f"~ mesh: {before.mesh} -> {after.mesh}"
    if before.transforms != after.transforms:
        yield f"~ transforms: {', '.join(before.transforms) or 'none'} -> {', '.join(after.transforms) or 'none'}"
    if before.units != after.units:
        yield f"~ units: {setting_text(before.units)} -> {setting_text(after.units)}"
    if before.repeated != after.repeated:
        yield f"~ repeated blocks: {setting_text(before.repeated)} -> {setting_text(after.repeated)}"
    if before.stages != after.stages:
        yield f"~ stages: {_stages_text(before)} -> {_stages_text(after)}"
    for name, (old, new) in _step_changes(before.step, after.step).items():
        yield f"~ step: {name} {setting_text(old)} -> {setting_text(new)}"


def _stages_text(plan: PlanTable) -> str:
    return " | ".join(setting_text((*stage.modules, *stage.tensors)) for stage in plan.stages) or "none"


def _step_changes(before: Step, after: Step) -> dict[str, tuple[object, object]]:
    both = {f.name: (getattr(before, f.name), getattr(after, f.name)) for f in dataclasses.fields(Step)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _row_changes(before: PlanTable, after: PlanTable) -> Iterator[str]:
    old, new = ({row.name: row for row in plan.rows} for plan in (before, after))
    for group in fold_rows(row for name, row in old.items() if name not in new):
        yield f"- {group.title}: {layout_text(group.first.stored)}"
    for group in fold_rows(row for name, row in new.items() if name not in old):
        yield f"+ {group.title}: {layout_text(group.first.stored)}"
    changed = [(name, _changes(old[name], new[name])) for name in old if name in new]
    for folded in fold((item for item in changed if item[1]), name=lambda item: item[0], same=lambda item: item[1]):
        yield f"~ {folded.title}: {'; '.join(folded.first[1])}"


def _changes(old: Row, new: Row) -> tuple[str, ...]:
    return (*_field_changes(old, new), *_layout_changes(old, new))


def _field_changes(old: Row, new: Row) -> Iterator[str]:
    fields: dict[str, Callable[[Row], str]] = {
        "kind": lambda row: row.kind,
        "global shape": lambda row: sizes_text(row.global_shape),
        "dtype": lambda row: name_of(row.dtype),
        "trained": lambda row: "yes" if row.requires_grad else "no",
        "in state dict": lambda row: "yes" if row.persistent else "no",
        "names": lambda row: ", ".join(row.tied),
        "rule": lambda row: row.rule or "none",
        "resharded after forward": lambda row: "yes" if row.reshard else "no",
        "gradient partial over": lambda row: ", ".join(row.partial) or "no axis",
    }
    for title, show in fields.items():
        if show(old) != show(new):
            yield f"{title} {show(old)} -> {show(new)}"


def _layout_changes(old: Row, new: Row) -> Iterator[str]:
    """Iterate over the changed layouts; phases with the same change are named together."""
    phases: dict[tuple[str, str], list[str]] = {}
    for phase in PHASES:
        change = (layout_text(old.layouts.get(phase)), layout_text(new.layouts.get(phase)))
        if change[0] != change[1]:
            phases.setdefault(change, []).append(phase)
    for (a, b), names in phases.items():
        yield f"{', '.join(names)} {a} -> {b}"


def _border_changes(before: PlanTable, after: PlanTable) -> Iterator[str]:
    old, new = ({border_name(b): b for b in plan.borders} for plan in (before, after))
    for mark, here, there in (("-", old, new), ("+", new, old)):
        for group in fold((b for n, b in here.items() if n not in there), name=border_name, same=lambda b: b.layout):
            yield f"{mark} activation {group.title}: {border_text(group.first)}"
    both = [(name, border_text(old[name]), border_text(new[name])) for name in old if name in new]
    moved = [item for item in both if item[1] != item[2]]
    for change in fold(moved, name=lambda item: item[0], same=lambda item: item[1:]):
        yield f"~ activation {change.title}: {change.first[1]} -> {change.first[2]}"


def _memory_changes(before: Memory, after: Memory) -> Iterator[str]:
    for what in ("parameters", "gradients", "state", "buffers", "buckets", "host"):
        old, new = getattr(before, what), getattr(after, what)
        if old != new:
            yield f"~ largest rank, {what}: {human_bytes(old)} -> {human_bytes(new)}"


def _traffic_changes(before: PlanTable, after: PlanTable) -> Iterator[str]:
    old, new = (_sent(plan) for plan in (before, after))
    for what in dict.fromkeys([*old, *new]):
        if old[what] != new[what]:
            yield f"~ sent, {what}: {human_bytes(old[what])} -> {human_bytes(new[what])}"


def _sent(plan: PlanTable) -> Counter[str]:
    sent: Counter[str] = Counter()
    for each in plan.traffic():
        sent[each.what] += each.bytes
    return sent
