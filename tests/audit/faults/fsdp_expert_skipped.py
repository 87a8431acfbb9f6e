"""Each expert is a unit of `fully_shard`, and ranks run other experts: the gather of one pairs with that of another.

Report: https://github.com/pytorch/pytorch/issues/126616, "FSDP hangs when combing MoE architecture". It hangs if
ranks run other numbers of experts; here they run two each, and compute with half of one and half of another. torch's
own, in 2.13, of every unit that not all ranks run. What an expert returns is off by 1.58 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/issues/126616",
    host="torch",
    versions="2.13; reported of the first FSDP in May 2024",
    kind="output",
    module="experts.0",
    line="fully_shard",
    own=True,
)


class Experts(nn.Module):
    """Four experts, of which a row takes the one that the sign of two of its numbers names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (taken == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return self.head(torch.tanh(y))


def build() -> nn.Module:
    return Experts()


def batch(step: int) -> torch.Tensor:
    """Return rows of which the first half takes experts 0 and 1, and the second half experts 2 and 3."""
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    rows[:, 0] = rows[:, 0].abs() * torch.tensor([-1.0, 1.0] * 4)
    rows[:, 1] = rows[:, 1].abs() * torch.tensor([-1.0] * 4 + [1.0] * 4)
    return rows


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Make one unit of all experts, and have each rank reduce the gradients of those that it did not use."""
    made: Any = fully_shard(model, mesh=mesh)
    made.set_reduce_scatter_unused_params(True)
    return made
