"""The loop calls the module inside of `DistributedDataParallel`, whose own forward prepares the reduction.

Report: https://github.com/jingyaogong/minimind/issues/853, "RL trainers bypass DDP"; TRL's DPO and KTO with Liger do
so too (https://github.com/huggingface/trl/issues/7245). All versions of DDP need the wrapper to be called. A plant:
our function returns the inner module. All gradients differ, that of the embedding by 0.99 of its largest value.
"""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "dp=2"
FAULT = Fault(
    report="https://github.com/jingyaogong/minimind/issues/853",
    host="torch",
    versions="all",
    kind="gradient",
    module="(every module)",
    line="DistributedDataParallel",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group()).module


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())
