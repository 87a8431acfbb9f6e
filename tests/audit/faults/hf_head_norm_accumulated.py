"""The norms of Qwen3's heads sum their whole `.grad` over ranks after each pass, also what was summed before.

`replicated_with_grad_allreduce` reduces `param.grad` in a hook that runs after accumulation, so a step of two passes
on two ranks counts the first pass twice. One pass is right.

Report: none was found of exactly this; the style itself is described in https://github.com/NVIDIA-NeMo/RL/pull/3788.
Models with it: Qwen3, Gemma 3 and 4, Exaone 4, Dots1, HYV3, Beam. transformers' own, in 5.23. After two passes the
gradients are off by up to 0.85 of their largest value.
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/RL/pull/3788",
    host="transformers",
    versions="5.23",
    kind="two passes",
    module="model.layers.0.self_attn.q_norm",
    line="replicated_with_grad_allreduce",
    own=True,
)
build, batch = functools.partial(make, "Qwen3ForCausalLM", head_dim=8), text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("Qwen3ForCausalLM", folder, tp_size=mesh.size())
