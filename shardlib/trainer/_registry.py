"""Classes by the names that a config calls them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from shardlib._again import is_again
from shardlib.errors import PlanError, nearest

__all__ = ["Registry"]

C = TypeVar("C", bound=type)


class Registry:
    """Classes of one kind, each under a name of its own.

    >>> SCHEDULES = Registry("schedule")
    >>> @SCHEDULES.register_module
    ... class Twice: pass
    >>> SCHEDULES.get_module("Twice") is Twice, SCHEDULES.has("Thrice")
    (True, False)
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._held: dict[str, Any] = {}

    @overload
    def register_module(self, cls: C) -> C: ...
    @overload
    def register_module(self, cls: None = None, *, name: str | None = None) -> Callable[[C], C]: ...
    def register_module(self, cls: C | None = None, *, name: str | None = None) -> C | Callable[[C], C]:
        """Register a class, as a decorator with or without parentheses. A class defined anew replaces itself."""

        def register(given: C) -> C:
            key = name or given.__name__
            before = self._held.get(key, given)
            if not is_again(before, given):
                raise PlanError(
                    f'A {self.kind} "{key}" is registered already: {before.__module__}.{before.__qualname__}. Give '
                    'yours another name, as in register_module(name="...").'
                )
            self._held[key] = given
            return given

        return register if cls is None else register(cls)

    def has(self, name: str) -> bool:
        """Return whether a class is registered under the name."""
        return name in self._held

    def get_module(self, name: str) -> Any:
        """Return the class of a name.

        Raises:
            PlanError: there is none.
        """
        if name not in self._held:
            there = ", ".join(f'"{known}"' for known in sorted(self._held)) or "none"
            raise PlanError(f'There is no {self.kind} "{name}"; registered are {there}.{nearest(name, self._held)}')
        return self._held[name]
