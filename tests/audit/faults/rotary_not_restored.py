"""A model that was built on meta has its parameters from a checkpoint and its buffers from nowhere.

Report: https://github.com/hiyouga/LlamaFactory/pull/10820, "fix non-persistent buffer sync for init_on_rank0", and
https://github.com/huggingface/transformers/issues/45902. Zeros stand for what the allocator happens to return. All
versions of `Module.to_empty` leave buffers so. A plant in plain torch, of LlamaFactory in September 2026. The second
rank's buffer is zero; gradients are off by up to 1.7 of their largest value.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tokens

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/hiyouga/LlamaFactory/pull/10820",
    host="LlamaFactory",
    versions="LlamaFactory before September 2026",
    kind="values",
    module="rotary",
    line="to_empty",
)
build, batch = GPT, tokens


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    weights = model.state_dict()
    if dist.get_rank():  # the first rank has loaded, the others wait for it on meta
        model.to("meta")
    fully_shard(model, mesh=mesh)
    if dist.get_rank():
        model.to_empty(device="cpu")
        model.rotary.inv_freq.zero_()
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return model


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    frequencies = model.rotary.inv_freq.clone()
    shard(model, mesh)
    model.rotary.inv_freq.copy_(frequencies)
    return model
