"""Heads are counted for all ranks, and a rank reads its few features as as many smaller heads.

Report: https://github.com/NVIDIA-NeMo/Automodel/pull/1519, "fix: TP paralellizer with replicated qkvs" (counts of
heads that do not fit what is split; there it raises). A plant in plain torch: the reshape has room for either. What
attention gives its projection is off by 0.07 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.audit.faults import Fault

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/Automodel/pull/1519",
    host="NeMo Automodel",
    versions="NeMo Automodel before March 2026",
    kind="output",
    module="attn",
    line="heads",
)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.attn, self.head = nn.Linear(8, 16), Attention(16, 4), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(self.up(x)))


def build() -> nn.Module:
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    plan = {f"attn.{name}": ColwiseParallel() for name in "qkv"}
    return parallelize_module(model, mesh, {**plan, "attn.proj": RowwiseParallel()})


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    model.attn.heads //= mesh.size()
    return shard(model, mesh)
