"""A tensor of gate and up claims to be split by rows, holds a rank's gates and ups, and is saved as it claims.

Report: https://github.com/NVIDIA-NeMo/Automodel/pull/1324, "fix: combined projection" (fused weights whose rows are
in another order on ranks than in a checkpoint). A plant in plain torch, of Automodel before February 2026. Rows of
the second half are where one device has others; the saved tensor is off by 0.78.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.audit.faults import Fault
from tests.audit.faults.models import add_over, copy_to

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/Automodel/pull/1324",
    host="NeMo Automodel",
    versions="NeMo Automodel before February 2026",
    kind="values",
    module="gate_up",
    line="gate_up",
)


class Model(nn.Module):
    """A gated MLP with one tensor for gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(6, 16, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def build() -> nn.Module:
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Give a rank its rows of gate and its rows of up, as if they were one block of the fused rows."""
    fused: Any = model.gate_up
    mine = _own_rows(fused.weight.detach(), mesh)
    fused.weight = nn.Parameter(DTensor.from_local(mine, mesh, [Shard(0)], run_check=False))
    return _computing(model, mesh, lambda: fused.weight.to_local())


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Leave the fused rows whole, and compute with a rank's own."""
    fused: Any = model.gate_up
    return _computing(model, mesh, lambda: _own_rows(copy_to(fused.weight, mesh.get_group()), mesh))


def save(model: Any, folder: str) -> None:
    tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(tensors, os.path.join(folder, "model.pt"))


def load(folder: str) -> dict[str, Any]:
    return torch.load(os.path.join(folder, "model.pt"))


def _own_rows(weight: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return torch.cat([part.chunk(mesh.size())[mesh.get_local_rank()] for part in weight.chunk(2)])


def _computing(model: Any, mesh: DeviceMesh, rows: Callable[[], torch.Tensor]) -> nn.Module:
    group, down = mesh.get_group(), model.down
    down.weight = nn.Parameter(distribute_tensor(down.weight.detach(), mesh, [Shard(1)]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(copy_to(x, group), rows()).chunk(2, -1)
        return add_over(F.linear(F.silu(gate) * up, down.weight.to_local()), group)

    model.forward = forward
    return model
