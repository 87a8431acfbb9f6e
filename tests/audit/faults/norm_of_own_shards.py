"""The norm that gradients are clipped to is that of each rank's own shards.

Report: https://github.com/deepspeedai/DeepSpeed/pull/5411, "Fix a convergence issues in TP topology caused by
incorrect grad_norm" (the norm counts the first rank's part). A plant in plain torch, of DeepSpeed before April 2024.
The norm is off by 0.29 of its value.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, clip_whole, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/deepspeedai/DeepSpeed/pull/5411",
    host="DeepSpeed",
    versions="DeepSpeed before April 2024",
    kind="norm",
    module="",
    line="clip_grad_norm_",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, tensor_plan())


def clip(model: nn.Module) -> torch.Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    norm = nn.utils.get_total_norm(local)
    for grad in local:
        grad.mul_(torch.clamp(1.0 / norm, max=1.0))
    return norm


clip_right = clip_whole
