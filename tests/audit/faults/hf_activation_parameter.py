"""The learned parameters of Apertus' activation see a split hidden dim, and no rule sums their gradients.

Report: none was found of this model; https://github.com/NVIDIA-NeMo/RL/issues/3716 is of the kind (a replicated
parameter used with split activations). transformers' own, in 5.23. The gradients are off by up to 0.90 of their
largest value.
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import from_folder, make, text

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/NVIDIA-NeMo/RL/issues/3716",
    host="transformers",
    versions="5.23",
    kind="gradient",
    module="model.layers.0.mlp.act_fn",
    line="act_fn",
    own=True,
)
build, batch = functools.partial(make, "ApertusForCausalLM"), text


def shard(folder: str, mesh: DeviceMesh) -> nn.Module:
    return from_folder("ApertusForCausalLM", folder, tp_size=mesh.size())


def right(folder: str, mesh: DeviceMesh) -> nn.Module:
    """Add the rule that the model's plan lacks."""
    plan = {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    return from_folder("ApertusForCausalLM", folder, tp_size=mesh.size(), tp_plan=plan)
