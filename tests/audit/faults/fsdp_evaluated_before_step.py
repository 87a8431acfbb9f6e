"""A forward without gradients between backward and step leaves the root of `fully_shard` gathered and stale.

Report: https://github.com/pytorch/pytorch/issues/144289, "[FSDP2] model weights are not DTensor after forward pass"
(and #131965): the optimizer updates shards, while the module keeps the gathered copies that the forward has made, and
the next forward computes with them. torch's own, in 2.13, by design of `reshard_after_forward` of the root. The
second step's loss is off by 0.015, and is that of the root's first values.
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
    report="https://github.com/pytorch/pytorch/issues/144289",
    host="torch",
    versions="2.13; reported in January 2025",
    kind="parameter",
    module="embed",
    line="reshard",
    own=True,
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh, reshard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return an optimizer whose hook evaluates the model before each step, as a callback of a trainer does."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)

    def evaluate(*_: object) -> None:
        with torch.no_grad():
            model(**tokens(99))
        if reshard:
            model.reshard()

    optimizer.register_step_pre_hook(evaluate)
    return model, optimizer


def right(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    return shard(model, mesh, reshard=True)
