"""What a call is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardlib.errors import ShardlibError

__all__ = ["raised"]


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except ShardlibError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
