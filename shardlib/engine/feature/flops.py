"""Floating-point operations of an op: of matrix products, convolutions and attention; other ops count as zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardlib.engine import _torch

__all__ = ["operations_of"]


def operations_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the floating-point operations of one call, by its arguments and its result.

    >>> import torch
    >>> a, b = torch.ones(2, 3), torch.ones(3, 5)
    >>> operations_of(torch.ops.aten.mm.default, (a, b), {}, a @ b) == 2 * 2 * 3 * 5
    True
    """
    formula = _torch.flop_formulas().get(getattr(op, "overloadpacket", None))
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
