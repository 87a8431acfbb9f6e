"""The optimizer is made before `fully_shard`, which gives the modules new parameters: it steps the old ones.

Report: https://github.com/huggingface/accelerate/pull/3394, whose review says that an optimizer made before FSDP2
"doesn't result in a working training loop". Every version of `fully_shard` replaces parameters. torch's own, in 2.13:
nothing warns. All 21 parameters are what they were after each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/huggingface/accelerate/pull/3394",
    host="torch",
    versions="2.13; reported in March 2025",
    kind="parameter",
    module="embed",
    line="optimizer",
    own=True,
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    return fully_shard(model, mesh=mesh), optimizer


def right(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
