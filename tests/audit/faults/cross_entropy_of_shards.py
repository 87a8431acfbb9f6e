"""`cross_entropy` of a DTensor whose rows are split averages each rank's mean, and ranks have unequal weights of rows.

Report: https://github.com/pytorch/pytorch/issues/185167, "DTensor: `F.nll_loss(weight=..., reduction='mean')` over a
sharded batch returns wrong result"; here the weights are those of ignored tokens. torch's own, in 2.13. The loss is
1.038 times one device's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/pytorch/pytorch/issues/185167",
    host="torch",
    versions="2.13; reported in May 2026",
    kind="loss",
    module="",
    line="cross_entropy",
    own=True,
)
build, batch = GPT, functools.partial(tokens, ragged=True)


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Split the rows of logits and labels for the loss alone, which saves the memory of its softmax."""
    return _with(model, mesh, "mean")


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    return _with(model, mesh, "sum")


def _with(model: Any, mesh: DeviceMesh, reduction: str) -> nn.Module:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = 1 if reduction == "mean" else (labels != -100).sum()
        rows, targets = (
            DTensor.from_local(each, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
            for each in (logits.flatten(0, 1), labels.flatten())
        )
        total: Any = F.cross_entropy(rows, targets, reduction=reduction)
        return total.full_tensor() / count

    model.loss = loss
    return model
