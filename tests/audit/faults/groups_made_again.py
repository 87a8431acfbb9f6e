"""After sharding, the optimizer is made again from all parameters: groups without weight decay are lost.

Report: https://github.com/mosaicml/composer/issues/3493, "FSDP Wrapping Alters Optimizer's Parameter Tracking
Behavior". A plant in plain torch, of composer in July 2024. Five weights of norms are off by 0.005 of their largest
value after a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/mosaicml/composer/issues/3493",
    host="composer",
    versions="composer in July 2024",
    kind="parameter",
    module="blocks.0.norm1",
    line="param_groups",
)
build, batch = GPT, tokens


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as a user writes it: norms, of one dim, do not decay."""
    every = list(params)
    decayed: dict[str, Any] = {"params": [p for p in every if p.ndim > 1]}
    kept: dict[str, Any] = {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, kept], lr=1e-2, eps=1e-5, weight_decay=0.5)


def shard(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    asked: Any = optimizer(model.parameters())
    fully_shard(model, mesh=mesh)
    asked.__init__(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.5)
    return model, asked


def right(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    fully_shard(model, mesh=mesh)
    return model, optimizer(model.parameters())
