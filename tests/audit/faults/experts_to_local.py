"""Experts that are split over ranks take a local tensor of their input, without the layout of its gradient.

Report: https://github.com/pytorch/torchtitan/issues/1805, "TP gradient update is wrong during MoE backward";
`to_local` of every torch takes the gradient for a replicated one unless `grad_placements` says that it is a partial
sum. A plant in plain torch, of torchtitan before October 2025. The gradient that the last experts pass on is off by
0.92 of its largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, add_over, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/torchtitan/issues/1805",
    host="torchtitan",
    versions="torchtitan before October 2025",
    kind="gradient",
    module="blocks.1.mlp.experts",
    line="grad_placements",
)
build, batch = functools.partial(GPT, experts=4), tokens


def shard(model: Any, mesh: DeviceMesh, partial: bool = False) -> nn.Module:
    plan = {name: style for name, style in tensor_plan().items() if ".mlp." not in name}
    for block in model.blocks:
        _split(block.mlp.experts, mesh, partial)
    return parallelize_module(model, mesh, plan)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, partial=True)


def _split(experts: Any, mesh: DeviceMesh, partial: bool) -> None:
    """Split the hidden dim of each expert over ranks."""
    experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh, [Shard(2)]))
    experts.down = nn.Parameter(distribute_tensor(experts.down.detach(), mesh, [Shard(1)]))
    to_local = {"grad_placements": [Partial()]} if partial else {}

    def forward(x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        x, scores = (
            DTensor.from_local(each, mesh, [Replicate()], run_check=False).to_local(**to_local) for each in (x, scores)
        )
        y = experts.of(x, scores, experts.up.to_local(), experts.down.to_local())
        return add_over(y, mesh.get_group())

    experts.forward = forward
