"""The loop divides its loss by the number of passes of a step, and `accelerator.backward` divides it again.

Report: https://github.com/huggingface/accelerate/issues/3533, "double divide gradient_accumulation_steps". All
versions of Accelerate divide. A plant: the loop is ours. Gradients of a step of two passes are half of one device's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.accelerated import accelerator
from tests.audit.faults.models import GPT, tokens

MESH = "dp=2"
FAULT = Fault(
    report="https://github.com/huggingface/accelerate/issues/3533",
    host="accelerate",
    versions="all",
    kind="two passes",
    module="(every module)",
    line="gradient_accumulation_steps",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
    host = accelerator(gradient_accumulation_steps=2)
    return host, *host.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))


def accumulate(parts: tuple[Any, ...], batches: list[dict[str, torch.Tensor]], divide: int = 2) -> None:
    """Run the backward passes of a step."""
    host, model, _ = parts
    for each in batches:
        with host.accumulate(model):
            host.backward(model(**each)["loss"] / divide)


def accumulate_right(parts: tuple[Any, ...], batches: list[dict[str, torch.Tensor]]) -> None:
    accumulate(parts, batches, divide=1)
