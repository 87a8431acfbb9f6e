"""A weight of an odd number of rows, split over two axes of a flattened mesh, is gathered with wrong rows.

Report: https://github.com/pytorch/pytorch/pull/194457, "[DTensor] Do not flatten all_gather when shard dim is not
evenly divisible", which says that 2.13.0 has it. torch's own, in 2.13, with weights as in SimpleFSDP. What the second
layer returns is off by 0.79 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.audit.faults import Fault

MESH = "dp=2,fsdp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/pull/194457",
    host="torch",
    versions="2.13; reported in August 2026",
    kind="output",
    module="1",
    line="_flatten",
    own=True,
)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def shard(model: Any, mesh: DeviceMesh, flatten: bool = True) -> nn.Module:
    """Store weights in shards, gather them in the forward, and sum losses over a flattened mesh somewhere else."""
    if flatten:
        mesh._flatten("loss")
    for layer in model.children():
        _gathered(layer, mesh)
    return model


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, flatten=False)


def _gathered(layer: Any, mesh: DeviceMesh) -> None:
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0), Shard(0)]))

    def forward(x: torch.Tensor) -> torch.Tensor:
        whole = layer.weight.redistribute(placements=[Replicate(), Replicate()])
        return F.linear(x, _Averaged.apply(whole.to_local(), mesh))

    layer.forward = forward


class _Averaged(torch.autograd.Function):
    """The identity; its gradient is the mean over all ranks of a mesh."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        for axis in range(ctx.mesh.ndim):
            torch.distributed.all_reduce(grad, group=ctx.mesh.get_group(axis))
        return grad / ctx.mesh.size(), None
