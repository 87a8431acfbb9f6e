"""A fused projection of q, k and v is split as one dim: a rank gets q and half of k, and reads q, k and v.

Report: https://github.com/pytorch/pytorch/issues/140069, "DTensor support for fused qkv matmul", and
https://github.com/NVIDIA-NeMo/Automodel/pull/1324 (silently incorrect results). `ColwiseParallel` knows no parts of a
dim in any version. A plant: the plan is ours. What attention gives its projection is off by 1.25 of its largest
value.
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/issues/140069",
    host="torch",
    versions="all",
    kind="output",
    module="blocks.0.attn",
    line="ColwiseParallel",
)
build, batch = functools.partial(GPT, fused=True), tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = tensor_plan()
    for name in "qkv":
        del plan[f"blocks.*.attn.{name}"]
    return parallelize_module(model, mesh, {**plan, "blocks.*.attn.qkv": ColwiseParallel()})


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Leave the projection whole on every rank, and split what follows it."""
    plan = tensor_plan() | {"blocks.*.attn.proj": RowwiseParallel(input_layouts=Replicate())}
    for name in "qkv":
        del plan[f"blocks.*.attn.{name}"]
    return parallelize_module(model, mesh, plan)
