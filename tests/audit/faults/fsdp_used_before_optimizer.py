"""A model that ran once after `fully_shard` gives the optimizer its gathered parameters, which are never used again.

Report: https://github.com/pytorch/pytorch/issues/149205, "Parameter not updating when FSDP2 model is used before
optimizre creation". The root module is not resharded after a forward. torch's own, in 2.13. The three parameters of
the root are what they were after each step.
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
    report="https://github.com/pytorch/pytorch/issues/149205",
    host="torch",
    versions="2.13; reported in March 2025",
    kind="parameter",
    module="embed",
    line="optimizer",
    own=True,
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    _fully(model, mesh)
    with torch.no_grad():  # a sanity check before training
        model(**tokens(99))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def right(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    _fully(model, mesh)
    with torch.no_grad():
        model(**tokens(99))
    model.reshard()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def _fully(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
