"""Folding of repeated blocks: `blocks.0.attn.qkv` ... `blocks.11.attn.qkv` become `blocks.{0-11}.attn.qkv`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Folded", "fold"]

T = TypeVar("T")
Numbers = tuple[int, ...]
Template = tuple[str | None, ...]


@dataclass(frozen=True)
class Folded(Generic[T]):
    """Items that differ only in the numbers in their names.

    `name` has ranges where the numbers differ; `first` is the first item.
    """

    name: str
    first: T
    count: int

    @property
    def title(self) -> str:
        return f"{self.name} x{self.count}" if self.count > 1 else self.name


def fold(items: Iterable[T], *, name: Callable[[T], str], same: Callable[[T], Hashable]) -> list[Folded[T]]:
    """Group items whose names differ only in whole-number segments and for which `same` is equal, in first-seen order.

    >>> [f.title for f in fold(["b.0.w", "b.0.v", "b.1.w", "b.1.v", "h"], name=str, same=lambda s: None)]
    ['b.{0-1}.w x2', 'b.{0-1}.v x2', 'h']
    """
    groups: dict[tuple[Template, Hashable], list[tuple[Numbers, T]]] = {}
    for item in items:
        template, numbers = _split(name(item))
        groups.setdefault((template, same(item)), []).append((numbers, item))
    parts = ((key[0], part) for key, group in groups.items() for part in _products(group, 0))
    return [Folded(_title(template, [n for n, _ in part]), part[0][1], len(part)) for template, part in parts]


def _split(name: str) -> tuple[Template, Numbers]:
    """Split a name into segments, None for each whole number, and these numbers.

    >>> _split("blocks.3.experts.12.w1")
    (('blocks', None, 'experts', None, 'w1'), (3, 12))
    """
    segments = name.split(".")
    numbers = tuple(int(s) for s in segments if s.isdecimal())
    return tuple(None if s.isdecimal() else s for s in segments), numbers


def _products(group: list[tuple[Numbers, T]], depth: int) -> list[list[tuple[Numbers, T]]]:
    """Split a group until the numbers in each part are all combinations of one set per position."""
    sets = [set(position) for position in zip(*(numbers for numbers, _ in group), strict=True)]
    if depth >= len(sets) or math.prod(map(len, sets)) == len(group):
        return [group]
    parts: dict[int, list[tuple[Numbers, T]]] = {}
    for numbers, item in group:
        parts.setdefault(numbers[depth], []).append((numbers, item))
    return [done for part in parts.values() for done in _products(part, depth + 1)]


def _title(template: Template, numbers: Sequence[Numbers]) -> str:
    ranges = iter([_ranges(sorted(set(position))) for position in zip(*numbers, strict=True)])
    return ".".join(next(ranges) if segment is None else segment for segment in template)


def _ranges(numbers: list[int]) -> str:
    """Format one number as `0`, several as runs in braces: `{0-3,5}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "{" + ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs) + "}"
