"""Values of rules, parsed: text, a role name, placements, a layout or None."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardlib.errors import LayoutError, RuleError
from shardlib.layout import Layout

__all__ = ["ROLES", "Cut", "PerAxis", "Placed", "Role", "Text", "Value", "read_value", "spelled", "spelled_placement"]

ROLES = ("colwise", "rowwise", "replicate")
# What other libraries call the roles; each would otherwise read as a dim of that name.
_OTHER_NAMES = {"col": "colwise", "column": "colwise", "row": "rowwise", "replicated": "replicate"}
_PLACEMENT = re.compile(
    r"(?P<kind>Shard|Replicate|_StridedShard)"
    r"\((?:(?:dim=)?(?P<dim>-?\d+))?(?:, *(?:split_factor|sf)=(?P<factor>\d+))?\)"
)
_WRITE = (
    'Write a layout as text ("vocab@tp embed"; one name alone is the output features of a module), one of '
    '"colwise", "rowwise", "replicate", a placement such as Shard(1), {axis: placement}, a Layout, or None to replicate'
)


@dataclass(frozen=True)
class Role:
    """A role; which dim it splits depends on the module."""

    name: str


@dataclass(frozen=True)
class Text:
    """A layout by the names of its dims; axes may be missing, and come from the rule set's `axes`."""

    text: str
    layout: Layout


@dataclass(frozen=True)
class Cut:
    """A placement of torch's that splits a dim: `Shard(dim)`; of several pieces, `_StridedShard`."""

    dim: int
    pieces: int = 1


@dataclass(frozen=True)
class Placed:
    """A cut by axis, or None to replicate. Axes on one dim nest in the order given, outermost first. The axis None is
    the default axis."""

    by_axis: tuple[tuple[str | None, Cut | None], ...]


@dataclass(frozen=True)
class PerAxis:
    """A cut or None per mesh axis, in mesh order, as torch writes its placements."""

    placements: tuple[Cut | None, ...]


Value = Role | Text | Placed | PerAxis


def read_value(key: str, given: Any) -> Value:
    """Parse the value that a user wrote for `key`.

    Raises:
        RuleError: it cannot be read, or is a placement that no parameter can be stored in.

    >>> read_value("attn.proj", "rowwise")
    Role(name='rowwise')
    >>> read_value("attn.proj", {"tp": "Shard(1)"})
    Placed(by_axis=(('tp', Cut(dim=1, pieces=1)),))
    """
    match given:
        case None:
            return Role("replicate")
        case str():
            return _read_text(key, given)
        case Layout():
            return Text(given.text, _only_split(key, given))
        case Mapping():
            return Placed(tuple((str(axis), _placement(key, each)) for axis, each in given.items()))
        case list() | tuple():
            return PerAxis(tuple(_placement(key, each) for each in given))
        case Role() | Text() | Placed() | PerAxis():
            return given
    if _is_placement(given):
        return Placed(((None, _placement(key, given)),))
    if type(given).__name__ in ("PartitionSpec", "P", "NamedSharding"):
        raise RuleError(
            f'Rule "{key}": {given!r} is JAX\'s way to write a layout. Convert all of them by '
            'Rules.from_partition_specs({pattern: spec}), or write it as text: P(None, "tp") is "in out@tp".'
        )
    raise RuleError(f'Rule "{key}": {given!r} is a {type(given).__name__}, which is not a layout. {_WRITE}.')


def spelled(value: Value) -> str:
    """Format a value as a user would write it.

    >>> spelled(read_value("attn.proj", "Shard(1)"))
    'Shard(1)'
    """
    match value:
        case Role(name):
            return f'"{name}"'
        case Text(text):
            return f'"{text}"'
        case Placed(((None, placement),)):
            return spelled_placement(placement)
        case Placed(by_axis):
            return "{" + ", ".join(f'"{axis}": {spelled_placement(each)}' for axis, each in by_axis) + "}"
        case PerAxis(placements):
            return f"({', '.join(map(spelled_placement, placements))}{',' if len(placements) == 1 else ''})"


def spelled_placement(cut: Cut | None) -> str:
    """Format a cut as torch writes its placement."""
    if cut is None:
        return "Replicate()"
    return f"Shard({cut.dim})" if cut.pieces == 1 else f"_StridedShard({cut.dim}, split_factor={cut.pieces})"


def _is_placement(given: Any) -> bool:
    """Tell whether a value is a placement of torch's; there is none before torch is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(given, module.Placement)


def _read_text(key: str, text: str) -> Value:
    if text in ROLES:
        return Role(text)
    if match := _PLACEMENT.fullmatch(text.strip()):
        return Placed(((None, _placement_of(key, text, match)),))
    _refuse_misspelt_role(key, text)
    try:
        return Text(text, _only_split(key, Layout.parse(text)))
    except LayoutError as fault:
        raise RuleError(f'Rule "{key}": {fault}') from None


def _only_split(key: str, layout: Layout) -> Layout:
    if layout.partials or layout.dtype or layout.memory != "device":
        raise RuleError(
            f'Rule "{key}": "{layout}" says more than how the dims are sharded. Leave out what follows "+" or ":"; '
            "sums follow from the layouts, dtype and memory are given by transforms."
        )
    return layout


def _refuse_misspelt_role(key: str, text: str) -> None:
    # Read as a layout, a misspelt role is a dim that nothing splits: it would silently replicate.
    if not text.isidentifier():
        return
    close = _OTHER_NAMES.get(text) or next(iter(difflib.get_close_matches(text, ROLES, n=1, cutoff=0.75)), None)
    if close:
        raise RuleError(
            f'Rule "{key}": "{text}" is not a role; there are {", ".join(map(_quoted, ROLES))}. Did you mean '
            f'"{close}"? For a dim that is called "{text}" choose another name.'
        )


def _placement(key: str, given: Any) -> Cut | None:
    match = _PLACEMENT.fullmatch(given.strip()) if isinstance(given, str) else None
    if match:
        return _placement_of(key, given, match)
    if _is_placement(given):
        kind = type(given).__name__
        if kind == "Replicate":
            return None
        if kind in ("Shard", "_StridedShard"):
            return Cut(given.dim, getattr(given, "split_factor", 1))
    raise RuleError(
        f'Rule "{key}": {_shown(given)} is not a placement that a tensor can be stored in. Give Shard(dim) or '
        "Replicate()."
    )


def _placement_of(key: str, text: str, match: re.Match[str]) -> Cut | None:
    kind, dim, factor = match["kind"], match["dim"], match["factor"]
    if kind == "Replicate" and dim is None and factor is None:
        return None
    if kind == "Shard" and dim is not None and factor is None:
        return Cut(int(dim))
    if kind == "_StridedShard" and dim is not None and factor is not None:
        return Cut(int(dim), int(factor))
    raise RuleError(
        f'Rule "{key}": "{text}" is not a placement. Write "Shard(0)", "Replicate()" or "_StridedShard(0, '
        'split_factor=3)".'
    )


def _shown(given: Any) -> str:
    return f'"{given}"' if isinstance(given, str) else repr(given)


def _quoted(name: str) -> str:
    return f'"{name}"'
