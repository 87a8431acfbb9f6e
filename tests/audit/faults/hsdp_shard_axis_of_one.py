"""Gradients are reduced over the axis of shards alone, which has one rank: replicas are never averaged.

Report: https://github.com/verl-project/verl/issues/7493, "fsdp_size=1 on multiple GPUs silently disables gradient
synchronization" (with torch's first FSDP). With `fully_shard` it is the mesh that it is given. A plant in plain
torch, of verl in August 2026. All gradients differ, that of the embedding by 0.99 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "dp_replicate=2,dp_shard=1"
FAULT = Fault(
    report="https://github.com/verl-project/verl/issues/7493",
    host="verl",
    versions="of August 2026",
    kind="gradient",
    module="(every module)",
    line="fully_shard",
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh["dp_shard"])


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)
