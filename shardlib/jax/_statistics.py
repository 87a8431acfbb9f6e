"""Optimizer state with one dim less than its parameter, such as Adafactor's row and column means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax.sharding import PartitionSpec

__all__ = ["reduced_dim", "without_dim"]


def reduced_dim(shape: Sequence[int], of_state: Sequence[int], path: str) -> int | None:
    """Return the dim of a parameter that an array of an optimizer's state lacks, or None if it has other dims.

    Where dims are of one size, the path decides: `optax.scale_by_factored_rms` (0.2.8) reduces the largest dim in
    "v_row" and the second largest in "v_col". A wrong guess would cost communication, and change no number.

    >>> reduced_dim((8, 16), (8,), "v_row.up"), reduced_dim((4, 4), (4,), "v_col.up"), reduced_dim((8, 16), (4,), "")
    (1, 0, None)
    """
    shape, wanted = tuple(shape), tuple(of_state)
    found = [dim for dim in range(len(shape)) if shape[:dim] + shape[dim + 1 :] == wanted]
    if len(found) < 2:
        return found[0] if found else None
    reduced = int(np.argsort(shape)[-2 if "v_col" in path else -1])
    return reduced if reduced in found else found[-1]


def without_dim(spec: PartitionSpec, dim: int) -> PartitionSpec:
    """Return a spec without the entry of a dim.

    >>> without_dim(PartitionSpec("dp", "tp"), 1)
    P('dp',)
    """
    return PartitionSpec(*(entry for at, entry in enumerate(spec) if at != dim))
