"""Arguments that several transforms share: axes and rows of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from shardlib._plan import Plan, Row
from shardlib.errors import PlanError, nearest
from shardlib.rules.patterns import compile_pattern
from shardlib.transforms._transform import Transform

__all__ = ["Names", "add_note", "as_names", "axes_of", "chosen", "names_in", "quoted", "refuse_another"]

Names: TypeAlias = str | Sequence[str] | None
"""One name, several, or None for all."""


def as_names(value: Names) -> str | tuple[str, ...] | None:
    """Return the names in a hashable form."""
    return value if value is None or isinstance(value, str) else tuple(value)


def axes_of(plan: Plan, axis: Names, who: object) -> tuple[str, ...]:
    """Return the selected data axes of more than one rank, in mesh order unless given in another.

    Raises:
        PlanError: an axis that the mesh lacks, one that is not a data axis, one given twice.
    """
    mesh = plan.mesh
    given = mesh.data_axes if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    for name in given:
        if name not in mesh:
            raise PlanError(
                f'{who}: mesh "{mesh}" has no axis "{name}"; its data axes are {quoted(mesh.data_axes)}. Name one of '
                f"them, or add the axis to the mesh.{nearest(name, mesh.names)}"
            )
        if name not in mesh.data_axes:
            raise PlanError(
                f'{who}: "{name}" is a {mesh.kind(name)} axis of mesh "{mesh}"; state is sharded over data axes only, '
                f'here {quoted(mesh.data_axes)}. To shard over "{name}" write a rule.'
            )
        if given.count(name) > 1:
            raise PlanError(f'{who}: axis "{name}" is named twice; name each axis once.')
    return tuple(name for name in given if mesh[name] > 1)


def chosen(plan: Plan, only: Names, who: object) -> set[str]:
    """Return the names of the parameters that patterns match, directly or through a module around them.

    Raises:
        PlanError: a pattern that matches no parameter.
        RuleError: a pattern that cannot be read.
    """
    rows = [row for row in plan.rows if row.kind == "parameter"]
    if only is None:
        return {row.name for row in rows}
    found: set[str] = set()
    for text in (only,) if isinstance(only, str) else only:
        pattern = compile_pattern(text)
        matched = {row.name for row in rows if any(pattern.matches(name) for name in names_in(row))}
        if not matched:
            known = {name for row in rows for name in names_in(row)}
            raise PlanError(
                f'{who}: "{text}" matches none of the {len(rows)} parameters, nor a module that one is in; patterns '
                f"are written as in rules. print(plan) lists the names.{nearest(text, known)}"
            )
        found |= matched
    return found


def names_in(row: Row) -> Iterator[str]:
    """Iterate over every name of a tensor, and of each module that contains it."""
    for name in row.tied:
        parts = name.split(".")
        yield from (".".join(parts[:count]) for count in range(len(parts) + 1))


def add_note(plan: Plan, note: str) -> Plan:
    """Add a note to the plan, once."""
    return plan if note in plan.notes else plan.replace(notes=(*plan.notes, note))


def quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none"


def refuse_another(plan: Plan, made: Transform) -> None:
    """Refuse a transform after one of its kind with other arguments.

    Raises:
        PlanError: the plan was made with such a transform.
    """
    others = [name for name in plan.transforms if name.startswith(f"{made.call}(") and name != repr(made)]
    if others:
        raise PlanError(
            f"{made}: the plan was made with {others[0]}, which has other arguments. Choose one of the two."
        )
