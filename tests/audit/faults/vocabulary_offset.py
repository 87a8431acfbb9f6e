"""A vocabulary-parallel embedding masks ids of other ranks, but looks up its own without taking off its first row.

Report: https://github.com/NVIDIA/Megatron-LM/issues/926, "VocabParallelEmbedding", which asks why the first row is
taken off; https://github.com/hpcaitech/ColossalAI/issues/5110 is a run with such an embedding that became NaN. A
plant in plain torch. What the embedding returns is off by 1.49 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, add_over, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA/Megatron-LM/issues/926",
    host="Megatron-LM",
    versions="none; by hand",
    kind="output",
    module="embed",
    line="embedding",
)
VOCABULARY = 30  # ranks have 15 rows


def build() -> nn.Module:
    return GPT(vocabulary=VOCABULARY)


def batch(step: int) -> dict[str, torch.Tensor]:
    return tokens(step, vocabulary=VOCABULARY)


def shard(model: Any, mesh: DeviceMesh, offset: bool = False) -> nn.Module:
    plan = tensor_plan()
    del plan["embed"]
    _by_hand(model.embed, mesh, offset)
    return parallelize_module(model, mesh, plan)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return shard(model, mesh, offset=True)


def _by_hand(embed: Any, mesh: DeviceMesh, offset: bool) -> None:
    embed.weight = nn.Parameter(distribute_tensor(embed.weight.detach(), mesh, [Shard(0)]))

    def forward(ids: torch.Tensor) -> torch.Tensor:
        weight = embed.weight.to_local()
        first = mesh.get_local_rank() * len(weight)
        mine = (ids >= first) & (ids < first + len(weight))
        local = ids - first if offset else ids.clamp(max=len(weight) - 1)
        rows = F.embedding(local.masked_fill(~mine, 0), weight)
        return add_over(rows * mine.unsqueeze(-1), mesh.get_group())

    embed.forward = forward
