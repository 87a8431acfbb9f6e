"""The norm of gradients is the mean of ranks' norms, and ranks own different parameters.

Report: https://github.com/deepspeedai/DeepSpeed/issues/8475, "AutoEP FP32 gradient clipping averages norms across
ranks with different expert ownership". A plant in plain torch, of DeepSpeed in September 2026. The norm is off by
0.27 of its value.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, clip_whole, tokens
from tests.audit.faults.router_scores_partial import right as split_experts

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/deepspeedai/DeepSpeed/issues/8475",
    host="DeepSpeed",
    versions="DeepSpeed in September 2026",
    kind="norm",
    module="",
    line="all_reduce",
)
build, batch, shard = functools.partial(GPT, experts=4), tokens, split_experts


def clip(model: nn.Module) -> torch.Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in grads])
    if any(isinstance(g, DTensor) for g in grads):  # the sharded model
        dist.all_reduce(norm)
        norm /= dist.get_world_size()
    for grad in grads:
        grad.mul_(torch.clamp(1.0 / norm, max=1.0))
    return norm


clip_right = clip_whole
