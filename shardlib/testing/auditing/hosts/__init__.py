"""The libraries whose sharding an audit takes up, a file each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardlib.testing.auditing.hosts._host import Host, NotOffered, NotReached, Tensors
from shardlib.testing.auditing.hosts.accelerate import Accelerate, as_on_accelerators
from shardlib.testing.auditing.hosts.lightning import Lightning
from shardlib.testing.auditing.hosts.transformers import Transformers

__all__ = ["Host", "NotOffered", "NotReached", "Tensors", "as_libraries_need", "host_of"]

HOSTS: tuple[type[Host], ...] = (
    Accelerate,
    Lightning,
    Transformers,
    Host,
)  # the first that takes what `shard` returned


def host_of(made: Any) -> Host:
    """Return the host of what `shard` has returned.

    Raises:
        InputError: there is no model in it.
    """
    parts = tuple(made) if isinstance(made, tuple | list) else (made,)
    return next((host for host in HOSTS if host.takes(parts)), Host)(parts)


def as_libraries_need(shard: Callable[..., Any], note: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return the block in which libraries that `shard` uses work on CPUs as on accelerators; `note` is told of it."""
    return as_on_accelerators(note) if _uses(shard, "accelerate") else nullcontext()


def _uses(function: Callable[..., Any], library: str) -> bool:
    """Return whether a library is imported, or the file of a function names it."""
    if library in sys.modules:
        return True
    while isinstance(function, functools.partial):
        function = function.func
    file = Path(getattr(getattr(function, "__code__", None), "co_filename", ""))
    return file.is_file() and library in file.read_text(errors="replace") and find_spec(library) is not None
