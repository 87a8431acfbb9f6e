"""Code shards only where the shard axis has more than one rank, and reduces gradients there: replicas are never averaged.

Report: https://github.com/verl-project/verl/issues/7493, "fsdp_size=1 on multiple GPUs silently disables gradient
synchronization" (with torch's first FSDP). With `fully_shard` it is the mesh that it is given.
A plant in plain torch, of verl in August 2026. @FIGURE@
"""

from __future__ import annotations

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


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh["dp_shard"])  # type: ignore[return-value]


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]
