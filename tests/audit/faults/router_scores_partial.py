"""Experts are split over ranks, and the gradient of their input is summed, but that of the routing scores is not.

Report: https://github.com/pytorch/torchtitan/pull/4054 : without expert parallelism the gate gets a part of its
gradient, the forward is right. A plant in plain torch, of torchtitan in August 2026. The gradient of the scores is
off by 1.0 of its largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, add_over, copy_to, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/torchtitan/pull/4054",
    host="torchtitan",
    versions="torchtitan in August 2026",
    kind="gradient",
    module="blocks.1.mlp.experts",
    line="scores",
)
build, batch = functools.partial(GPT, experts=4), tokens


def shard(model: Any, mesh: DeviceMesh, summed: bool = False) -> nn.Module:
    plan = {name: style for name, style in tensor_plan().items() if ".mlp." not in name}
    for block in model.blocks:
        _split(block.mlp.experts, mesh, summed)
    return parallelize_module(model, mesh, plan)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, summed=True)


def _split(experts: Any, mesh: DeviceMesh, summed: bool) -> None:
    """Give each rank its own experts."""
    group, rank = mesh.get_group(), mesh.get_local_rank()
    experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh, [Shard(0)]))
    experts.down = nn.Parameter(distribute_tensor(experts.down.detach(), mesh, [Shard(0)]))

    def forward(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if summed:
            scores = copy_to(scores, group)
        mine = scores.chunk(mesh.size(), -1)[rank]
        y = experts.of(copy_to(x, group), mine, experts.up.to_local(), experts.down.to_local())
        return add_over(y, group)

    experts.forward = forward
