"""Each rank of a split sequence divides by its own number of tokens, and the means are averaged.

Report: https://github.com/NVIDIA/Megatron-LM/issues/673, "Incorrect loss scaling in context parallel code logic". A
plant in plain torch, of Megatron-LM core 0.8 to 0.10. The loss is 0.97 times one device's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.context import split_sequence
from tests.audit.faults.models import GPT, add_over, tokens

MESH = "cp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA/Megatron-LM/issues/673",
    host="Megatron-LM",
    versions="Megatron-LM core 0.8 - 0.10",
    kind="loss",
    module="",
    line="cross_entropy",
)
build, batch = GPT, functools.partial(tokens, ragged=True)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return split_sequence(model, mesh, loss=_mean_of_own)


right = split_sequence


def _mean_of_own(logits: torch.Tensor, labels: torch.Tensor, every: torch.Tensor, group: Any) -> torch.Tensor:
    return add_over(F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / group.size(), group)
