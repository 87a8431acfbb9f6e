"""Versions of torch that shardlib supports. The package imports this first, to refuse an older torch clearly."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from shardlib.errors import VersionError, warn

__all__ = ["NEWEST", "OLDEST", "release"]

OLDEST = (2, 13)  # has what shardlib needs
NEWEST = (2, 15)  # tested


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _installed() -> str:
    """Return the version of torch; it is not imported for that, unless nothing else tells."""
    if "torch" not in sys.modules:
        try:
            return importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:  # it was built in place
            pass
    import torch

    return torch.__version__


def _check(version: str) -> None:
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
