"""On a mesh of data and tensor axes only the tensor axis is set up: data ranks train apart.

Report: https://github.com/huggingface/transformers/pull/48792, in a comment: with tensor parallelism the wrapper for
data parallelism is left out, and plain parameters are averaged by nobody. In torch it is a missing `fully_shard` or
`replicate`. A plant: our function lacks the call. All gradients differ, that of the embedding by 0.99 of its largest
value.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "dp=2,tp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/pull/48792",
    host="torch",
    versions="all",
    kind="gradient",
    module="(every module)",
    line="fully_shard",
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh["tp"], tensor_plan())


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    parallelize_module(model, mesh["tp"], tensor_plan())
    return fully_shard(model, mesh=mesh["dp"])
