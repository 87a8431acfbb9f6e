"""Claims: the layouts that single rules give to tensors, before one is chosen; and the axes that a rule names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardlib.layout import Dim, Factor, Layout
from shardlib.rules._layouts import AxisUse
from shardlib.rules._match import Entry
from shardlib.rules._values import Placed, Role, Text

__all__ = ["Claim", "axes_named", "may_replicate", "same_cuts"]


@dataclass(frozen=True)
class Claim:
    """The layout that one rule gives one tensor, under one of its names."""

    entry: Entry
    name: str
    layout: Layout


def same_cuts(one: Layout, other: Layout) -> bool:
    """Return whether two layouts split a tensor in the same way, whatever names its dims have.

    >>> same_cuts(Layout.parse("vocab@tp embed"), Layout.parse("out@tp in"))
    True
    """
    return _cuts(one) == _cuts(other)


def axes_named(entry: Entry, axes: Mapping[str, AxisUse], default_axis: str) -> tuple[str, ...]:
    """Return the axes that a rule splits over: its own, those of its dim names, or that of its role or placement."""
    match entry.value:
        case Text(_, layout):
            return tuple(dict.fromkeys(axis for use in _uses(layout, axes) for axis in use.axes))
        case Placed(by_axis):
            return tuple(axis or default_axis for axis, cut in by_axis if cut is not None)
        case Role("colwise" | "rowwise"):
            return (default_axis,)
    return ()


def may_replicate(entry: Entry, axes: Mapping[str, AxisUse]) -> bool:
    """Return whether a rule splits something only where it divides."""
    return isinstance(entry.value, Text) and any(use.optional for use in _uses(entry.value.layout, axes))


def _uses(layout: Layout, axes: Mapping[str, AxisUse]) -> Iterator[AxisUse]:
    for factor in _factors(layout):
        yield AxisUse(factor.axes, factor.optional) if factor.axes else axes.get(factor.name, AxisUse(()))


def _factors(layout: Layout) -> Iterator[Factor]:
    for dim in layout.dims:
        if isinstance(dim, Dim):
            yield from dim.factors


def _cuts(layout: Layout) -> tuple[Any, ...]:
    """Return for each dim the axes of each split factor, and the number of pieces outside of that factor."""
    return tuple(tuple(_cuts_of(dim)) for dim in layout.dims if isinstance(dim, Dim))


def _cuts_of(dim: Dim) -> Iterator[tuple[int, tuple[str, ...]]]:
    for at, factor in enumerate(dim.factors):
        if factor.axes:
            yield Dim(dim.factors[:at]).known_size, factor.axes
