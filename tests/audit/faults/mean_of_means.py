"""Each rank's loss is the mean over its own tokens, and DDP averages: ranks with few tokens count as much as others.

Report: https://github.com/huggingface/accelerate/pull/3193, "Give example on how to handle gradient accumulation with
cross-entropy", and https://github.com/meta-pytorch/torchtune/pull/1917. All versions of DDP average over ranks. A
plant: the loss is ours. The loss is off by 0.04 of its value, a gradient by 1.4 of its largest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "dp=2"
FAULT = Fault(
    report="https://github.com/huggingface/accelerate/pull/3193",
    host="torch",
    versions="all",
    kind="loss",
    module="",
    line="cross_entropy",
)
build, batch = GPT, functools.partial(tokens, ragged=True)


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Divide the sum of losses by the mean number of tokens of ranks."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = (labels != -100).sum().to(logits.dtype)
        dist.all_reduce(count, group=mesh.get_group())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * mesh.size() / count

    model.loss = loss
    return shard(model, mesh)
