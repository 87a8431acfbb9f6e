"""The result of `local_map` over an uneven dim has another global size on each rank, and a mean divides by it.

Report: https://github.com/pytorch/pytorch/issues/172812, "`local_map` produces incorrect results with uneven
sharding". torch's own, in 2.13. The mean is off by 0.15 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from tests.audit.faults import Fault

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/issues/172812",
    host="torch",
    versions="2.13; reported in January 2026, closed",
    kind="output",
    module="pool",
    line="local_map",
    own=True,
)
TOKENS = 5  # three on the first rank, two on the second


class Pool(nn.Module):
    """The mean of an activation over tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x).mean(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.pool, self.head = nn.Linear(4, 8), Pool(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.up(x)))


def build() -> nn.Module:
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(step))


def shard(model: Any, mesh: DeviceMesh, mapped: bool = True) -> nn.Module:
    """Split tokens over ranks for the activation."""
    gelu = local_map(F.gelu, out_placements=[Shard(0)], in_placements=([Shard(0)],), device_mesh=mesh)

    def forward(x: torch.Tensor) -> torch.Tensor:
        split = DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        y: Any = gelu(split) if mapped else F.gelu(split)
        return y.mean(0).full_tensor()

    model.pool.forward = forward
    return model


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, mapped=False)
