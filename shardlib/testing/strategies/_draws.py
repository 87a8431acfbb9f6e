"""Small draws that every strategy is made of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from shardlib.errors import InputError

__all__ = ["among", "check_size", "often", "seldom"]

often, seldom = st.sampled_from([False, True, True, True]), st.sampled_from([False, False, True])


@lru_cache(maxsize=1024)
def among(choices: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Return `sampled_from`, cached: making it costs more than drawing from it."""
    return st.sampled_from(choices)


def check_size(function: str, name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"{function}({name}={size!r}): give an integer from 1 up.")
