"""A loss that is divided by the tokens of all ranks is not multiplied by their number, and DDP averages.

Report: https://github.com/huggingface/accelerate/issues/3661 asks what the factor in Accelerate's example is for. All
versions of Accelerate with DDP need it. A plant: the loss is ours. Loss and gradients are half of one device's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.accelerated import accelerator
from tests.audit.faults.models import GPT, tokens

MESH = "dp=2"
FAULT = Fault(
    report="https://github.com/huggingface/accelerate/issues/3661",
    host="accelerate",
    versions="all",
    kind="loss",
    module="",
    line="num_processes",
)
build, batch = GPT, functools.partial(tokens, ragged=True)


def shard(model: Any, mesh: DeviceMesh, scaled: bool = False) -> tuple[Any, ...]:
    host = accelerator()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = host.gather((labels != -100).sum()).sum()
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        return total * host.num_processes if scaled else total

    model.loss = loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    return host, *host.prepare(model, optimizer)


def right(model: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
    return shard(model, mesh, scaled=True)
