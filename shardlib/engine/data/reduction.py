"""User-defined gradient reductions in the place of the all-reduce: compressed, deferred, hierarchical, ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardlib.engine.data.gradients import GradientBucket
from shardlib.engine.sharded import record_of
from shardlib.errors import PlanError

__all__ = ["Reduction", "register_gradient_reduction"]


Reduction = Callable[[GradientBucket], Any]
"""A function that writes the sum over the group into `bucket.tensor`, with the same bits on all ranks of the group, or
returns a `Work` or a `Future` whose `wait()` does so."""


def register_gradient_reduction(model: nn.Module, reduction: Reduction | None) -> None:
    """Sum gradients over the data axes with a function, in the place of the all-reduce.

    The reducer calls the function for each bucket while backward runs, on all ranks in the same order, and divides the
    sums by the number of data ranks afterwards.

    Args:
        model: a sharded model with full gradients on every rank: without `zero`, `fsdp` or another transform that
            splits them.
        reduction: the function; None restores the all-reduce.

    Raises:
        PlanError: gradients or state of the model are sharded over data axes, where ranks need different sums.

    Example:
        >>> def in_bfloat16(bucket):
        ...     sent = bucket.tensor.bfloat16()
        ...     dist.all_reduce(sent, group=bucket.group)
        ...     bucket.tensor.copy_(sent)
        >>> register_gradient_reduction(model, in_bfloat16)  # doctest: +SKIP
    """
    reducer = record_of(model).reducer
    sharded = next((state.name for state in reducer.param_states if state.shard_spec is not None), None)
    if reduction is not None and sharded is not None:
        raise PlanError(
            f'register_gradient_reduction: the plan shards gradient or state of "{sharded}" over data axes, where a '
            "rank gets the reduced gradient of its own shard alone. Leave out zero, fsdp and hsdp; to compress their "
            'gradients, pass shardlib.precision(..., reduce="bfloat16").'
        )
    if reduction is not None and not callable(reduction):
        raise PlanError(
            f"register_gradient_reduction was given {reduction!r}; give a function that takes a GradientBucket."
        )
    reducer.reductions.reduce_by(reduction)
