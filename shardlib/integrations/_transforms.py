"""Transforms as a trainer's user gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardlib._plan import Plan
from shardlib.transforms import parse

__all__ = ["Transforms", "as_transforms"]

Transforms = str | Callable[[Plan], Plan] | Sequence[Callable[[Plan], Plan]] | None


def as_transforms(given: Transforms) -> tuple[Callable[[Plan], Plan], ...]:
    """Return transforms that were given as text, one, several or none.

    >>> as_transforms("zero(2)")
    (zero(2),)
    """
    if not given:
        return ()
    if isinstance(given, str):
        return (parse(given),)
    return (given,) if callable(given) else tuple(given)
