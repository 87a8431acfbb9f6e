"""The functions that take away again what was installed on a model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Bare", "Undo"]


class Undo:
    """Functions that each take away one thing that was installed; `run` calls the last one first."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], Any]] = []

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Add a function."""
        self._functions.append(functools.partial(function, *args))

    def run(self) -> None:
        """Take away everything."""
        for function in reversed(self._functions):
            function()


class Bare:
    """A context in which a model's modules have nothing of what was installed on them.

    Every function of `undo` changes attributes of modules, their hooks and their classes, and nothing else.
    """

    def __init__(self, model: nn.Module, undo: Undo) -> None:
        self._model, self._undo = model, undo
        self._kept: list[tuple[nn.Module, type, dict[str, Any], list[tuple[dict[Any, Any], dict[Any, Any]]]]] = []

    def __enter__(self) -> None:
        for module in self._model.modules():
            dicts = [(value, dict(value)) for value in vars(module).values() if isinstance(value, dict)]
            self._kept.append((module, type(module), dict(vars(module)), dicts))
        self._undo.run()

    def __exit__(self, *_: object) -> None:
        for module, kind, attributes, dicts in self._kept:
            module.__class__ = kind  # type: ignore[assignment]
            vars(module).clear()
            vars(module).update(attributes)
            for value, items in dicts:
                value.clear()
                value.update(items)
