"""Functions of tests in the warm process of `shardlib.testing`, with eight pretended CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.testing._jax_devices import on_devices

__all__ = ["run"]

_LONGEST = 600  # seconds; a call takes a few: what takes longer stands still, and must not keep the others waiting


def run(function: Callable[..., Any], *args: Any, x64: bool = True) -> Any:
    """What a module's function returns there, with or without numbers of 64 bits."""
    return on_devices(8, _called, function, args, x64, timeout=_LONGEST)


def _called(function: Callable[..., Any], args: Any, x64: bool) -> Any:
    import jax

    jax.config.update("jax_enable_x64", x64)
    return function(*args)
