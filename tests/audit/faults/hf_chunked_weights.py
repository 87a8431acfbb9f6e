"""A fused weight of a checkpoint is sliced for the rank first, and cut into q, k, v and gate afterwards.

Report: https://github.com/huggingface/transformers/pull/48519, "Loading: convert transposed and RoPE-permuted weights
before taking the DTensor shard"; here it is `Chunk` of HrmText's `gqkv_proj`. transformers' own, in 5.23. The weight
of q is off by 1.2 of its largest value.
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/pull/48519",
    host="transformers",
    versions="5.23; reported in September 2026",
    kind="values",
    module="model.L_module.layers.0.self_attn.q_proj",
    line="from_pretrained",
    own=True,
)
build, batch = functools.partial(make, "HrmTextForCausalLM"), text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("HrmTextForCausalLM", folder, tp_size=mesh.size())
