"""The plugin for mixtures of experts: `HybridParallelPlugin` with an expert axis."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan, expert_rows
from shardlib.booster._options import met, recipe, refused
from shardlib.booster._plugins import OVERLAPS, HybridParallelPlugin
from shardlib.booster._precision import Transforms
from shardlib.errors import MeshError, PlanError
from shardlib.transforms import expert_capacity

__all__ = ["MoeHybridParallelPlugin"]


@recipe
class MoeHybridParallelPlugin(HybridParallelPlugin):
    """`HybridParallelPlugin`, with the experts of a model spread over `ep_size` ranks of those that are left for data:
    these carry different examples, and tokens go to their experts. ZeRO divides experts among the ranks that hold the
    same ones, and all else among all data ranks. With `capacity_factor` tokens that ask too much of an expert are
    dropped (`shardlib.expert_capacity`).

    >>> MoeHybridParallelPlugin(ep_size=4, tp_size=2, zero_stage=1, precision="bf16").mesh_shape()
    MeshShape("dp=-1,ep=4,tp=2")
    """

    ep_size: int = 0
    moe_dp_outside: bool = True
    moe_tp_size: Any = refused("experts are sharded over the ranks of tp_size, as the rest of the model.", default=None)
    capacity_factor: float | None = None
    overlap_communication: bool = met(OVERLAPS, default=False)

    def mesh_shape(self) -> MeshShape:
        if isinstance(self.ep_size, bool) or not isinstance(self.ep_size, int) or self.ep_size < 1:
            raise MeshError(f"{self}: ep_size is a number of ranks, from 1 up, and has to be given.")
        if self.pp_size > 1 and self.moe_dp_outside != self.dp_outside:
            raise MeshError(
                f"{self}: one mesh is for experts and for all else; give dp_outside and moe_dp_outside the same value."
            )
        axes: dict[str, int] = {}
        for name, size in super().mesh_shape().items():
            if name == "tp":
                axes["ep"] = self.ep_size
            axes[name] = size
        return MeshShape(axes)

    def _policy(self) -> Any:
        return self.custom_policy if self.custom_policy is None and self.ep_size > 1 else super()._policy()

    def transforms(self, model: nn.Module) -> Transforms:
        limit = () if self.capacity_factor is None else (expert_capacity(self.capacity_factor),)
        return (*((experts_are_spread,) if self.ep_size > 1 else ()), *limit, *super().transforms(model))


def experts_are_spread(plan: Plan) -> Plan:
    """Check that a rule spreads experts over "ep", and return the plan unchanged.

    Raises:
        PlanError: no parameter is split over an expert axis.
    """
    if not expert_rows(plan.rows, plan.mesh):
        raise PlanError(
            f'MoeHybridParallelPlugin(ep_size={plan.mesh["ep"]}): no rule spreads experts over "ep", so that its ranks '
            'would only be more data ranks. Give custom_policy rules such as "experts.up": "expert@ep out in", or use '
            "HybridParallelPlugin."
        )
    return plan
