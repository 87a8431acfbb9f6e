"""Each rank has experts of its own, whose gradients are also summed over ranks that saw the same tokens.

Report: https://github.com/pytorch/torchtitan/pull/1551, "fix EP fsdp gradient divide factor", and
https://github.com/NVIDIA/Megatron-LM/pull/5956, "Divide expert gradients by the expert-parallel size" (gradients of
experts are as many times too large as there are ranks). A plant in plain torch, of both. Gradients of experts are two
times one device's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens
from tests.audit.faults.router_scores_partial import right as split_experts

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/torchtitan/pull/1551",
    host="torchtitan",
    versions="torchtitan before August 2025",
    kind="gradient",
    module="blocks.0.mlp.experts",
    line="all_reduce",
)
build, batch = functools.partial(GPT, experts=4), tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Add up over ranks what each rank's copy of the loss gives the experts."""
    split_experts(model, mesh)
    for block in model.blocks:
        for p in block.mlp.experts.parameters():
            p.register_hook(lambda grad: grad * mesh.size())
    return model


right = split_experts
