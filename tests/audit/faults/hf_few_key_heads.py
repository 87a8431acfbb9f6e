"""There are fewer heads of keys than ranks, and a rank gets a part of a head.

Report: https://github.com/huggingface/transformers/issues/48307, "Native TP has no KV-head replication: tp_size >
num_key_value_heads fails mid-forward". transformers' own, in 5.23. The forward raises "shape '[4, 10, -1, 8]' is
invalid for input of size 160".
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/issues/48307",
    host="transformers",
    versions="5.23; reported in August 2026",
    kind="error",
    module="model.layers.0.self_attn",
    line="tp_plan",
    own=True,
)
build, batch = functools.partial(make, "LlamaForCausalLM", num_key_value_heads=1), text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("LlamaForCausalLM", folder, tp_size=mesh.size())
