"""Parameters that several stages hold, such as an embedding that is also the output layer.

Each holder accumulates the contributions of its own stages. Once a step, after the reduction over the data axes, the
contributions are summed over the holders. All holders therefore take the same step and keep the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Movement, movements_of
from shardlib.engine import _torch
from shardlib.engine.data.params import ParamState, local_of
from shardlib.engine.pipeline.stages import Stages
from shardlib.engine.ranks.groups import group_of
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.engine.ranks.transport import Transport

__all__ = ["Shared", "shared_parameters"]


@dataclass(eq=False)
class Shared:
    """One parameter that this rank and ranks of other stages hold.

    Attributes:
        param_state: its state on this rank.
        transport: the transport among the ranks that hold the same shard of it.
        movements: the movement that sums its gradient over the stages; none if the plan has frozen it.
        accumulated: the accumulated gradient of earlier steps, while a step runs.
        summed: whether the gradient is already summed over the holders.
    """

    param_state: ParamState
    transport: Transport
    movements: tuple[Movement, ...]
    accumulated: Any = None
    summed: bool = False

    def set_accumulated_aside(self) -> None:
        """Keep gradients that earlier steps have already summed out of the sum of this step."""
        param = self.param_state.param
        if param.grad is None:
            self.summed = False
        elif self.summed:
            # Copied since it is a view of a bucket, which the next reduction overwrites.
            self.accumulated, param.grad = _copied(param.grad), None

    def add_accumulated(self) -> None:
        """Add the gradient of earlier steps, without a sum over the holders."""
        if self.accumulated is None:
            return
        param, accumulated, self.accumulated = self.param_state.param, self.accumulated, None
        if param.grad is None:
            param.grad = accumulated
        else:
            local_of(param.grad).add_(local_of(accumulated))

    @naming_lost_ranks("backward")
    def sum_up(self) -> None:
        """Sum the gradient over all holders, on all of them."""
        param = self.param_state.param
        if param.grad is None:
            param.grad = _zero_gradient(self.param_state)
        local = local_of(param.grad)
        sent = local.contiguous()
        self.transport.all_reduce(sent, self.movements).wait()
        if sent is not local:
            local.copy_(sent)
        self.summed = True
        self.add_accumulated()


def shared_parameters(stages: Stages, param_states: Mapping[str, ParamState]) -> list[Shared | None]:
    """Return the parameters that ranks of several stages hold; None for those that this rank does not.

    The list is as long on every rank. Creates groups: collective over all ranks.
    """
    made: list[Shared | None] = []
    plan = stages.plan
    for row in plan.rows:
        holders = stages.holders(row)
        if row.kind != "parameter" or len(holders) == 1:
            continue
        group = _group_of(stages, holders)
        if group is None:
            made.append(None)
            continue
        param_state = param_states[stages.names_here[row.name]]
        with _torch.no_modes():
            every = movements_of([row], plan.mesh, plan.units, plan.step, holders={row.name: len(holders)})
            sums = tuple(one for one in every if one.purpose == "gradients, stages")
        made.append(Shared(param_state, param_state.executor.transport((stages.axis,), group), sums))
    return made


def _group_of(stages: Stages, holders: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the group of the ranks with these coordinates on this rank's pipeline."""
    if len(holders) == stages.ranks:
        return stages.pipeline_group
    ranks = _torch.ranks_of_mesh(stages.mesh)
    lines = MeshShape.of(stages.mesh).lines((stages.axis,))
    groups = [group_of([ranks[line[holder]] for holder in holders], "tied parameters") for line in lines]
    return next((group for group in groups if group is not None), None)


def _zero_gradient(param_state: ParamState) -> Any:
    """Return a gradient of zeros, in the layout of the parameter's gradient."""
    if param_state.shard_spec is None:
        return torch.zeros_like(param_state.param)
    return param_state.wrap(
        torch.zeros(param_state.shard_shape, dtype=param_state.grad_dtype, device=param_state.device)
    )


def _copied(grad: torch.Tensor) -> torch.Tensor:
    return _torch.wrap(local_of(grad).clone(), _torch.spec_of(grad)) if isinstance(grad, DTensor) else grad.clone()
