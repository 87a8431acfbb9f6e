"""FSDP2 with RAM-efficient loading moves the model to meta, which unties weights that `tie_weights` does not tie.

Report: https://github.com/huggingface/accelerate/pull/4171 is the fault's neighbour ("Fix FSDP2 tied-embedding models
on torch >= 2.13"), which mends models of transformers. A plain module's tie is gone without a word. Accelerate's own,
in 1.15. The gradient of the embedding is off by 0.75 of its largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.accelerated import accelerator
from tests.audit.faults.models import GPT, tokens

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/huggingface/accelerate/pull/4171",
    host="accelerate",
    versions="1.15",
    kind="values",
    module="head",
    line="cpu_ram_efficient_loading",
    own=True,
)
build, batch = functools.partial(GPT, tied=True), tokens


def shard(model: nn.Module, mesh: DeviceMesh, efficient: bool = True) -> tuple[Any, ...]:
    host = accelerator("Block", cpu_ram_efficient_loading=efficient)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    return host, *host.prepare(model, optimizer)


def right(model: nn.Module, mesh: DeviceMesh) -> tuple[Any, ...]:
    return shard(model, mesh, efficient=False)
