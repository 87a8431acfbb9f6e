"""Comparison of two functions or classes that are registered under one name: a notebook runs a file again, and a file
may be imported under two module names."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_again"]


def is_again(before: Any, given: Any) -> bool:
    """Return whether two functions or classes are one definition: of the same name, in the same file or module.

    >>> def near(shape): ...
    >>> before = near
    >>> def near(shape): ...
    >>> is_again(before, near), is_again(print, near)
    (True, False)
    """
    return before is given or _place(before) == _place(given)


def _place(thing: Any) -> tuple[Any, ...]:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module is None or name is None:
        return (id(thing),)
    return getattr(sys.modules.get(module), "__file__", None) or module, name
