"""The norm of gradients sums squares over tensor-parallel ranks, also of parameters that all of them hold.

Report: https://github.com/NVIDIA-NeMo/RL/pull/3788, "fix(dtensor): count TP-replicated gradients once in
get_grad_norm". A plant in plain torch, of NeMo RL in August 2026. The norm is off by 0.03 of its value.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, clip_whole, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/RL/pull/3788",
    host="NeMo RL",
    versions="NeMo RL in August 2026",
    kind="norm",
    module="",
    line="all_reduce",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, tensor_plan())


def clip(model: nn.Module) -> torch.Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    square = nn.utils.get_total_norm(local).square()
    if any(isinstance(g, DTensor) for g in grads):  # the sharded model
        dist.all_reduce(square)
    for grad in local:
        grad.mul_(torch.clamp(1.0 / square.sqrt(), max=1.0))
    return square.sqrt()


clip_right = clip_whole
