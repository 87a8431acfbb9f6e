"""Undo functions: they take away what was installed on the modules of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

__all__ = ["Undo", "bare", "replace_forward"]


class Undo:
    """Functions that each take away one thing that was installed.

    A block of `with` takes everything away if it raises.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[[], Any]] = []

    def callback(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Add a function."""
        self._functions.append(functools.partial(function, *args, **kwargs))

    def run(self) -> None:
        """Take away everything, the last thing first."""
        with ExitStack() as stack:
            for function in self._functions:
                stack.callback(function)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.run()


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give a module another forward, and return an undo function: it may have had one of its own before.

    >>> layer = nn.Identity()
    >>> layer.forward = lambda x: 2 * x
    >>> undo = replace_forward(layer, lambda x: 3 * x)
    >>> layer(1)
    3
    >>> undo()
    >>> layer(1)
    2
    """
    own = vars(module)
    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = forward

    def undo() -> None:
        own.pop("forward", None)
        own.update(before)

    return undo


@contextmanager
def bare(model: nn.Module, undo: Undo) -> Iterator[None]:
    """Take away what was installed on a model's modules inside the block, and put it back afterwards.

    Every function of `undo` changes attributes of modules, their hooks and their classes, and nothing else.
    """
    kept = [(module, type(module), dict(vars(module)), _items(module)) for module in model.modules()]
    try:
        undo.run()
        yield
    finally:
        for module, kind, attributes, dicts in kept:
            module.__class__ = kind  # type: ignore[assignment]
            _refill(vars(module), attributes)
            for own, items in dicts:
                _refill(own, items)


def _items(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Return the dicts that are attributes of a module, as those of its hooks, each with a copy."""
    return [(value, dict(value)) for value in vars(module).values() if isinstance(value, dict)]


def _refill(own: dict[Any, Any], items: dict[Any, Any]) -> None:
    own.clear()
    own.update(items)
