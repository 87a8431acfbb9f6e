"""Clipping by Fabric fails on a tensor-parallel model, some of whose parameters are plain tensors.

Report: https://github.com/meta-pytorch/torchtune/issues/2420, "`clip_grad_norm` does not work with Tensor
Parallelism"; torch's `clip_grad_norm_` takes no mixture of DTensors and plain tensors, or of two meshes. Lightning's
own, in 2.6, with every plan that leaves norms out. `fabric.clip_gradients` raises "aten._foreach_norm.Scalar got
mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.accelerated import environment
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/meta-pytorch/torchtune/issues/2420",
    host="lightning",
    versions="2.6; reported of torchtune in February 2025",
    kind="norm",
    module="",
    line="clip_gradients",
    own=True,
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    environment()
    strategy = ModelParallelStrategy(_parallelize, data_parallel_size=1, tensor_parallel_size=mesh.size())
    fabric = Fabric(accelerator="cpu", devices=mesh.size(), strategy=strategy)
    fabric.launch()
    made = fabric.setup(model)
    return fabric, made, fabric.setup_optimizers(torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-5))


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh["tensor_parallel"], tensor_plan())
