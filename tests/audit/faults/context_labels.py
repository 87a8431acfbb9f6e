"""Labels are shifted by one after the sequence was split: the last token of each part has none.

Report: https://github.com/huggingface/transformers/pull/36607, which lets users pass shifted labels for this reason.
A plant in plain torch, of transformers before March 2025. The loss is 0.76 times one device's.
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
    report="https://github.com/huggingface/transformers/pull/36607",
    host="transformers",
    versions="transformers before March 2025",
    kind="loss",
    module="",
    line="labels",
)
build, batch = GPT, tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return split_sequence(model, mesh, labels_of=_shifted_late)


right = split_sequence


def _shifted_late(ids: torch.Tensor, labels: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    part = ids.chunk(size, 1)[rank]
    return torch.cat([part[:, 1:], torch.full_like(part[:, :1], -100)], 1)
