"""Each rank adds its share of a row-parallel layer's bias, and the division makes the bias' gradient as much smaller.

Report: https://github.com/pytorch/torchtitan/pull/4332, "Fix rowwise TP bias gradients". A plant in plain torch, of
torchtitan in August 2026: code by hand with local tensors. The gradient is half of one device's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, add_over, copy_to, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/torchtitan/pull/4332",
    host="torchtitan",
    versions="torchtitan in August 2026",
    kind="gradient",
    module="blocks.0.mlp.down",
    line="bias",
)
build, batch = functools.partial(GPT, bias=True), tokens


def shard(model: Any, mesh: DeviceMesh, summed: bool = False) -> nn.Module:
    plan = tensor_plan()
    del plan["blocks.*.mlp.down"]
    for block in model.blocks:
        _by_hand(block.mlp.down, mesh, summed)
    return parallelize_module(model, mesh, plan)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, summed=True)


def _by_hand(down: Any, mesh: DeviceMesh, summed: bool) -> None:
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = copy_to(down.bias, mesh.get_group()) if summed else down.bias
        weight = down.weight.to_local()
        return add_over(F.linear(x, weight, bias / mesh.size()), mesh.get_group())

    down.forward = forward
