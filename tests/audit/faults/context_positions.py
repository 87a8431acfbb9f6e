"""Each rank of a split sequence counts its positions from zero.

Report: https://github.com/NVIDIA/Megatron-LM/pull/5243, "Fix packed THD RoPE under CP" (before it #560, which asks
whether ranks have their own rotary positions). torch's `context_parallel(buffers=...)` needs the rotary tables for
the same reason. A plant in plain torch, of Megatron in June 2026. Logits are off by 0.18 of their largest value.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.context import split_sequence
from tests.audit.faults.models import GPT, tokens

MESH = "cp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA/Megatron-LM/pull/5243",
    host="Megatron-LM",
    versions="Megatron-LM before June 2026",
    kind="output",
    module="",
    line="positions",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return split_sequence(model, mesh, positions=lambda rank, length: torch.arange(length))


right = split_sequence
