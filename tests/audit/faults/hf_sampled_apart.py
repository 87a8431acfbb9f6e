"""Each rank of a tensor-parallel group samples its own next token, and the next forward mixes their histories.

Report: https://github.com/huggingface/transformers/issues/36634, "Difficulties with multi-GPU Inferencing" (a
maintainer names the cause), and https://github.com/openai/gpt-oss/issues/270. It shows as soon as ranks are seeded
differently, as `set_seed(seed, device_specific=True)` does. transformers' own, in 5.23. Ranks return other tokens
from the first on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/issues/36634",
    host="transformers",
    versions="5.23; reported in March 2025",
    kind="generate",
    module="",
    line="generate",
    own=True,
)
build, batch = functools.partial(make, "LlamaForCausalLM"), text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return right(folder, mesh)


def right(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("LlamaForCausalLM", folder, tp_size=mesh.size())


def generate(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=8, do_sample=True)
