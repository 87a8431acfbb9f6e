"""A trainer saves on its first rank alone, and `save_pretrained` gathers shards there with the ranks that never come.

Report: https://github.com/huggingface/transformers/pull/48569, "Trainer: make checkpoints work under tensor
parallelism". transformers' own, in 5.23: `Trainer.save_model` calls `_save` if `args.should_save`. The first rank
waits in an all-gather.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/pull/48569",
    host="transformers",
    versions="5.23; reported in September 2026",
    kind="save",
    module="",
    line="save_pretrained",
    own=True,
)
build, batch = functools.partial(make, "LlamaForCausalLM"), text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("LlamaForCausalLM", folder, tp_size=mesh.size())


def save(model: Any, folder: str) -> None:
    if dist.get_rank() == 0:
        save_right(model, folder)


def save_right(model: Any, folder: str) -> None:
    model.save_pretrained(folder)
