"""The part of a key that all heads share is used by each rank's heads, and its gradient is not summed over ranks.

Report: https://github.com/pytorch/torchtitan/pull/1373 (the `k_pe` of DeepSeek-V3, seen after a thousand steps). A
plant in plain torch, of torchtitan in July 2025. The gradient that attention passes on is off by 0.016 of its largest
value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import copy_to

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/torchtitan/pull/1373",
    host="torchtitan",
    versions="torchtitan in July 2025",
    kind="gradient",
    module="attn",
    line="shared",
)
WIDTH, HEAD, SHARED = 16, 4, 2


class LatentAttention(nn.Module):
    """Attention whose keys are a part of each head's own and a part that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 4 * (HEAD + SHARED), bias=False)
        self.k, self.v = (nn.Linear(WIDTH, 4 * HEAD, bias=False) for _ in range(2))
        self.shared = nn.Linear(WIDTH, SHARED, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (-1, HEAD + SHARED)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.k, self.v))
        shared = self.to_heads(self.shared(x)).unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def to_heads(self, shared: torch.Tensor) -> torch.Tensor:
        return shared


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.attn, self.head = nn.Linear(8, WIDTH), LatentAttention(), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(self.up(x)))


def build() -> nn.Module:
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    plan = {f"attn.{name}": ColwiseParallel() for name in "qkv"}
    return parallelize_module(model, mesh, {**plan, "attn.proj": RowwiseParallel(output_layouts=Replicate())})


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    model.attn.to_heads = lambda shared: copy_to(shared, mesh.get_group())
    return shard(model, mesh)
