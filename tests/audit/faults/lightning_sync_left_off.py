"""`fabric.no_backward_sync(model, enabled=False)` turns the synchronisation of gradients off when it ends.

A loop writes `enabled=is_accumulating`, so the last pass of a step ends with it: each backward pass after that which
is not in the block, for a second loss or in code that someone else wrote, leaves gradients unreduced.

Report: none was found; https://github.com/Lightning-AI/pytorch-lightning/pull/19577 passes `enabled` to the strategy.
Lightning's own, in 2.6. All 21 gradients are None.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.accelerated import environment
from tests.audit.faults.models import GPT, tokens

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/Lightning-AI/pytorch-lightning/pull/19577",
    host="lightning",
    versions="2.6",
    kind="gradient",
    module="(every module)",
    line="no_backward_sync",
    own=True,
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh, warm: bool = True) -> tuple[Any, ...]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    environment()
    strategy = ModelParallelStrategy(_parallelize, data_parallel_size=mesh.size(), tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=mesh.size(), strategy=strategy)
    fabric.launch()
    made = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-5))
    if warm:
        with fabric.no_backward_sync(made, enabled=False):  # the last pass of a step
            fabric.backward(made(**tokens(99))["loss"])
        optimizer.zero_grad()
    return fabric, made, optimizer


def right(model: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
    return shard(model, mesh, warm=False)


def _parallelize(model: Any, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh["data_parallel"])
