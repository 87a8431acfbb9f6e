"""What a user puts in the place of the all-reduce of gradients: one in a few bits, late, in two steps, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardlib.engine.gradients import GradientBucket, GradientReducer
from shardlib.engine.sharded import record_of
from shardlib.errors import PlanError

__all__ = ["Reduction", "reduce_gradients_by"]


Reduction = Callable[[GradientBucket], Any]
"""Writes the sum over the group into `bucket.tensor`, the same bits on all its ranks, or returns what does when its
`wait()` is called: a `Work` or a `Future`."""


def reduce_gradients_by(model: nn.Module, reduction: Reduction | None) -> None:
    """Sum gradients over the data axes by a function of one's own, in the place of an all-reduce.

    It is called for each bucket while backward runs, on all ranks in the same order. Sums become means afterwards.

    Args:
        model: sharded, with whole gradients on every rank: no `zero`, `fsdp` or other transform that splits them.
        reduction: the function; None brings the all-reduce back.

    Raises:
        PlanError: gradients or state of the model are split over data axes: there is no sum that all ranks want.

    Example:
        >>> def in_bfloat16(bucket):
        ...     sent = bucket.tensor.bfloat16()
        ...     dist.all_reduce(sent, group=bucket.group)
        ...     bucket.tensor.copy_(sent)
        >>> reduce_gradients_by(model, in_bfloat16)  # doctest: +SKIP
    """
    reducer = record_of(model).reducer
    if reduction is not None and (name := _first_in_parts(reducer)) is not None:
        raise PlanError(
            f'reduce_gradients_by: the plan splits gradient or state of "{name}" over data axes, where each rank gets '
            "the sum of its own part. Leave out zero, fsdp and hsdp; compressed travel is "
            'shardlib.precision(..., reduce="bfloat16") there.'
        )
    if reduction is not None and not callable(reduction):
        raise PlanError(f"reduce_gradients_by was given {reduction!r}; give a function that takes a GradientBucket.")
    reducer.reductions.reduction = reduction


def _first_in_parts(reducer: GradientReducer) -> str | None:
    return next((held.name for held in reducer.all_held if held.cut is not None), None)
