"""Pipeline schedule and microbatches, which determine the rank of each stage and the activations in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Plan
from shardlib._plan.schedules import check_schedule, default_schedule, order
from shardlib.errors import PlanError
from shardlib.transforms._choose import refuse_another
from shardlib.transforms._transform import Transform

__all__ = ["Scheduled", "pipeline"]


def pipeline(schedule: str = "", microbatches: int = 0) -> Transform:
    """Run the stages of a pipeline by a schedule, on a number of microbatches.

    Args:
        schedule: "gpipe", "1f1b", "interleaved", "interleaved-zb" or "zbv"; by default "1f1b", or "interleaved" where
            ranks have several stages. See `shardlib._plan.schedules`.
        microbatches: the number of microbatches of each batch; 0 leaves it to `pipeline_step`.

    Raises:
        PlanError: an unknown schedule, or a number below zero; applied to a plan, if it has no stages, or numbers for
            which the schedule has no order.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> made = sl.plan(model, "pp=2", sl.Rules({"**": None}, stages="0 | 1"), transforms=[sl.pipeline("gpipe", 4)])
    >>> made.step.schedule, made.step.microbatches
    ('gpipe', 4)
    """
    if schedule:
        check_schedule(schedule)
    if type(microbatches) is not int or microbatches < 0:
        raise PlanError(f"pipeline(microbatches={microbatches!r}): give a number of microbatches, from 1 up.")
    return Scheduled(schedule, microbatches)


@dataclass(frozen=True, repr=False)
class Scheduled(Transform):
    """The transform that `pipeline` returns."""

    call: ClassVar[str] = "pipeline"
    schedule: str = ""
    microbatches: int = 0

    def __call__(self, plan: Plan) -> Plan:
        refuse_another(plan, self)
        if not plan.stages:
            raise PlanError(
                f"{self}: the plan has no stages. Name them in the rules, as in Rules(..., stages=Balanced()), and "
                f'give the mesh a pipeline axis of two ranks at least; it is "{plan.mesh}".'
            )
        ranks = plan.mesh.only(plan.mesh.pipeline_axes).world_size
        schedule = self.schedule or default_schedule(ranks, len(plan.stages))
        order(schedule, ranks, len(plan.stages), self.microbatches or 2 * ranks)
        return plan.replace(step=plan.step.replace(schedule=schedule, microbatches=self.microbatches))
