"""The plan leaves a norm out of sequence parallelism: its weight's gradient is each rank's part of the sequence alone.

Report: https://github.com/NVIDIA/TransformerEngine/issues/435, "Need all-reduce for norm weight gradients with
sequence parallel". In torch it is one missing line of a `parallelize_module` plan; every version has it. A plant: our
plan lacks the line. The gradient of a norm's weight is off by 0.97 of its largest value.
"""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, sequence_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA/TransformerEngine/issues/435",
    host="torch",
    versions="all",
    kind="gradient",
    module="blocks.0.norm2",
    line="SequenceParallel",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = sequence_plan()
    del plan["blocks.*.norm2"]
    return parallelize_module(model, mesh, plan)


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, sequence_plan())
