"""The capacity of experts: a limit on the tokens that a rank sends to each; choices beyond it are dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Plan, expert_rows
from shardlib.errors import PlanError
from shardlib.transforms._transform import Transform

__all__ = ["Capacity", "expert_capacity"]


def expert_capacity(factor: float) -> Transform:
    """Limit the tokens that a rank sends to each expert to `factor` times the average.

    An expert takes the first `ceil(factor * tokens * choices / experts)` choices of a rank, all first choices before
    all second ones, and drops the others. A dropped choice adds nothing to its token, whose other choices keep their
    weights. Without this transform no choice is dropped, as on one device.

    Args:
        factor: 1 is the number of tokens per expert under uniform routing; 1.25 and 2 are usual.

    Raises:
        PlanError: a factor that is not positive; applied to a plan, experts that no expert axis of more than one rank
            splits.

    >>> expert_capacity(1.25)
    expert_capacity(1.25)
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise PlanError(
            f"expert_capacity({factor!r}): give a positive number, such as 1.25; to drop nothing leave it out."
        )
    return Capacity(float(factor))


@dataclass(frozen=True, repr=False)
class Capacity(Transform):
    """The transform that `expert_capacity` returns."""

    call: ClassVar[str] = "expert_capacity"
    leading: ClassVar[int] = 1
    factor: float

    def __call__(self, plan: Plan) -> Plan:
        if not expert_rows(plan.rows, plan.mesh):
            raise PlanError(
                f'{self}: no experts are sharded over an expert axis of mesh "{plan.mesh}", and a capacity limits the '
                'tokens that are sent to experts. Give the mesh an axis ep, and a rule such as "expert@ep out in".'
            )
        if plan.step.capacity_factor not in (None, self.factor):
            raise PlanError(
                f"{self}: the plan has expert_capacity({plan.step.capacity_factor}) already; choose one of them."
            )
        return plan.replace(step=plan.step.replace(capacity_factor=self.factor))
