"""A model that was built on meta has its parameters from a checkpoint and its buffers from nowhere.

Report: https://github.com/hiyouga/LlamaFactory/pull/10820, "fix non-persistent buffer sync for init_on_rank0", and
https://github.com/huggingface/transformers/issues/45902. Zeros stand for what the allocator happens to return. All versions
of `Module.to_empty` leave buffers so. A plant in plain torch, of LlamaFactory in September 2026. @FIGURE@
"""

from __future__ import annotations

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


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    weights = model.state_dict()
    if dist.get_rank():  # the first rank has loaded, the others wait for it on meta
        model.to("meta")
    fully_shard(model, mesh=mesh)
    if dist.get_rank():
        model.to_empty(device="cpu")
        model.rotary.inv_freq.zero_()  # type: ignore[operator, union-attr]
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    return model


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    frequencies = model.rotary.inv_freq.clone()  # type: ignore[operator, union-attr]
    shard(model, mesh)
    model.rotary.inv_freq.copy_(frequencies)  # type: ignore[operator, union-attr]
    return model
