"""Cases as arguments of `pytest.mark.parametrize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["params"]


def params(cases: Iterable[Any], deep: Iterable[Any] = ()) -> list[Any]:
    """Parameters with the name of their case; those of `deep` are marked so, and `compiled` where a case compiles.

    Args:
        cases: of any class; its `compile`, where it has one, is that of `shard_model`.
        deep: more of them.
    """
    marked = [*((case, []) for case in cases), *((case, [pytest.mark.deep]) for case in deep)]
    return [
        pytest.param(
            case, marks=[*marks, *([pytest.mark.compiled] if getattr(case, "compile", None) else [])], id=str(case)
        )
        for case, marks in marked
    ]
