"""Versions of torch that shardlib supports. The package imports this first, to refuse an older torch clearly."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any

from shardlib.errors import VersionError, warn

__all__ = ["NEWEST", "OLDEST", "offered", "release"]

OLDEST = (2, 13)  # has what shardlib needs
NEWEST = (2, 15)  # tested


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def offered(package: str, name: str, find: Callable[[str], Any]) -> Any:
    """Return what a package offers under a name, which `find` imports.

    Raises:
        VersionError: it needs torch, and there is none.
    """
    try:
        return find(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise VersionError(
            f"{package}.{name} needs PyTorch, which is not installed. Run `pip install torch`. Layouts, rules, plans, "
            "transforms and shardlib.jax.rules work without it."
        ) from None


def _installed() -> str | None:
    """Return the version of torch, or None where there is none; it is imported only where nothing else tells."""
    if "torch" not in sys.modules:
        try:
            return importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            if importlib.util.find_spec("torch") is None:  # layouts, rules, plans and trees of JAX do without
                return None
    import torch  # it was built in place

    return torch.__version__


def _check(version: str | None) -> None:
    if version is None:
        return
    found = release(version)
    oldest, newest = (".".join(map(str, known)) for known in (OLDEST, NEWEST))
    if found < OLDEST:
        raise VersionError(
            f"torch {version} is installed, and shardlib needs torch {oldest} or newer. Install one: "
            f'pip install "torch>={oldest}".'
        )
    if found > NEWEST:
        warn(
            f"torch {version} is installed; shardlib was tested with torch {oldest} to {newest}, and tries this one. "
            f"Report what goes wrong with the output of `shardlib doctor`, or install a torch that was tested.",
        )


_check(_installed())
