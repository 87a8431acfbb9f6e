"""Where experts' shards are on one rank, their gradients are divided by the number of data ranks twice.

FSDP2 divides by `set_gradient_divide_factor` before the collective and again where it leaves the collective out, if
the gradients are float16 or float64; float32 and bfloat16 are right.

Report: none was found of the values. https://github.com/huggingface/transformers/pull/48792, "Add Expert parallel",
has the divisor; https://github.com/pytorch/pytorch/issues/195732 is about the memory of the same division. torch's
own, in 2.13, through transformers 5.23. The gradients of experts are half of one device's.
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/pull/48792",
    host="transformers",
    versions="5.23 with torch 2.13, float16 and float64",
    kind="gradient",
    module="model.layers.0.mlp.experts",
    line="ep_size",
    own=True,
)
build = functools.partial(make, "MixtralForCausalLM", num_local_experts=4, experts="eager")
batch = text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    size = mesh.size()
    return from_folder(
        "MixtralForCausalLM", folder, tp_size=1, fsdp_size=size, ep_size=size, experts_implementation="eager"
    )


def right(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("MixtralForCausalLM", folder, tp_size=1, fsdp_size=mesh.size(), experts_implementation="eager")
