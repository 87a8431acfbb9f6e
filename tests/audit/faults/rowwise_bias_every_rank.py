"""The bias of a row-parallel layer is added on every rank before the sum over ranks.

Report: https://github.com/pytorch/torchtitan/pull/4245, "[Bug][GPT-OSS][spmd_types] Grouped-expert output bias is
multiplied by TP degree". A plant in plain torch, of torchtitan in August 2026: code by hand with local tensors. What
the layer returns is off by 0.32 of its largest value.
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
    report="https://github.com/pytorch/torchtitan/pull/4245",
    host="torchtitan",
    versions="torchtitan in August 2026",
    kind="output",
    module="blocks.0.mlp.down",
    line="bias",
)
build, batch = functools.partial(GPT, bias=True), tokens


def shard(model: Any, mesh: DeviceMesh, once: bool = False) -> nn.Module:
    plan = tensor_plan()
    del plan["blocks.*.mlp.down"]
    for block in model.blocks:
        _by_hand(block.mlp.down, mesh, once)
    return parallelize_module(model, mesh, plan)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, once=True)


def _by_hand(down: Any, mesh: DeviceMesh, once: bool) -> None:
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = down.weight.to_local()
        if once:
            return add_over(F.linear(x, weight), mesh.get_group()) + down.bias
        return add_over(F.linear(x, weight, copy_to(down.bias, mesh.get_group())), mesh.get_group())

    down.forward = forward
