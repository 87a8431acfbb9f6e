"""Gradient accumulation, which determines how often gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Plan
from shardlib.errors import PlanError
from shardlib.transforms._choose import refuse_another
from shardlib.transforms._transform import Transform

__all__ = ["Accumulate", "accumulate"]


def accumulate(microbatches: int) -> Transform:
    """Accumulate the gradients of `microbatches` microbatches in each step.

    Replicated gradients (stages 0 and 1) are reduced once a step, sharded ones (stages 2 and 3) at every microbatch;
    otherwise they would have to be kept unsharded.

    Raises:
        PlanError: less than one; applied to a plan, if it accumulates another number already.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> (sl.plan(nn.Linear(4, 4), "dp=2", {"weight": "out in", "bias": "out"}) | accumulate(8)).step.accumulate
    8
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise PlanError(f"accumulate({microbatches!r}): give a number of microbatches, from 1 up.")
    return Accumulate(microbatches)


@dataclass(frozen=True, repr=False)
class Accumulate(Transform):
    """The transform that `accumulate` returns."""

    call: ClassVar[str] = "accumulate"
    microbatches: int

    def __call__(self, plan: Plan) -> Plan:
        refuse_another(plan, self)
        if plan.step.accumulate not in (1, self.microbatches):
            raise PlanError(f"{self}: the plan accumulates {plan.step.accumulate} microbatches already. Choose one.")
        return plan.replace(step=plan.step.replace(accumulate=self.microbatches))
