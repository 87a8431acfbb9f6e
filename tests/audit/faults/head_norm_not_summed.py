"""A norm of each head has one weight for all heads; its gradient is that of a rank's heads alone.

Report: https://github.com/NVIDIA-NeMo/RL/issues/3716, "Split-API train step misses the TP grad all-reduce for
replicated params (qk-layernorm / SP layernorms)"; https://github.com/NVIDIA/Megatron-LM/issues/7452 has another of
the kind. A plant in plain torch: the plan says nothing of the norm, so that its weight stays a plain tensor. The
gradient is off by 0.70 of its largest value.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/RL/issues/3716",
    host="NeMo RL",
    versions="NeMo RL in August 2026",
    kind="gradient",
    module="blocks.0.attn.q_norm",
    line="q_norm",
)
build, batch = functools.partial(GPT, head_norm=True), tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, tensor_plan())


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    shard(model, mesh)
    for name, p in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            p.register_hook(lambda grad: _summed(grad, mesh))
    return model


def _summed(grad: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    grad = grad.clone()
    dist.all_reduce(grad, group=mesh.get_group())
    return grad
