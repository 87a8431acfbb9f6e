"""A column-parallel layer by hand does not sum the gradient of its input over ranks.

Report: https://github.com/pytorch/pytorch/pull/175867, which says how `from_local` in the column-parallel linear
layer of a shared expert gave the wrong gradient. A plant in plain torch. The gradient that the layer passes on is off
by 1.03 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, copy_to, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/pull/175867",
    host="torch",
    versions="all, by hand",
    kind="gradient",
    module="blocks.1.mlp.up",
    line="from_local",
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh, summed: bool = False) -> nn.Module:
    plan = tensor_plan()
    del plan["blocks.*.mlp.up"]
    for block in model.blocks:
        _by_hand(block.mlp.up, mesh, summed)
    return parallelize_module(model, mesh, plan)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, summed=True)


def _by_hand(up: Any, mesh: DeviceMesh, summed: bool) -> None:
    up.weight = nn.Parameter(distribute_tensor(up.weight.detach(), mesh, [Shard(0)]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if summed:
            x = copy_to(x, mesh.get_group())
        return F.linear(x, up.weight.to_local())

    up.forward = forward
