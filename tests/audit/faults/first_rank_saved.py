"""The first rank saves its own part of each tensor.

Report: https://github.com/modelscope/twinkle/pull/116, "[Fix] EP+FSDP checkpoint save for MoE expert parameters" (the
first rank's experts alone are saved). A plant in plain torch, of twinkle in March 2026. Each saved tensor has half of
its rows.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/modelscope/twinkle/pull/116",
    host="twinkle",
    versions="twinkle in March 2026",
    kind="save",
    module="embed",
    line="state_dict",
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)


def save(model: Any, folder: str) -> None:
    if dist.get_rank() == 0:
        tensors = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
        torch.save(tensors, os.path.join(folder, "model.pt"))


def save_right(model: Any, folder: str) -> None:
    tensors = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(tensors, os.path.join(folder, "model.pt"))


def load(folder: str) -> dict[str, Any]:
    return torch.load(os.path.join(folder, "model.pt"))
