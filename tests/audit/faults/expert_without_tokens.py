"""A rank none of whose experts has tokens returns early, and its backward pass leaves out a collective of the others.

Report: https://github.com/NVIDIA-NeMo/Automodel/pull/935, "fix: handle zero active experts for 1 ep rank in
GroupedExperts" (training would hang). A plant in plain torch, of Automodel in December 2025: it shows on batches that
leave a rank's experts empty, such as one token. With one token the ranks part; over gloo one of them dies.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, add_over, tokens
from tests.audit.faults.router_scores_partial import right as split_experts

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/Automodel/pull/935",
    host="NeMo Automodel",
    versions="NeMo Automodel before December 2025",
    kind="one token",
    module="blocks.0.mlp.experts",
    line="experts",
)
build, batch = functools.partial(GPT, experts=8), tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    split_experts(model, mesh)
    for block in model.blocks:
        _skip(block.mlp.experts, mesh)
    return model


right = split_experts


def _skip(experts: Any, mesh: DeviceMesh) -> None:
    """Return early where no token takes this rank's experts."""
    inner, rank = experts.forward, mesh.get_local_rank()

    def forward(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.chunk(mesh.size(), -1)[rank].any():
            return add_over(torch.zeros_like(x), mesh.get_group())
        return inner(x, scores)

    experts.forward = forward
