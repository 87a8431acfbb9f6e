"""Adapters are added after `fully_shard`, which reduces only what it has sharded: each rank trains its own.

Report: https://github.com/huggingface/transformers/pull/48873 and
https://github.com/huggingface/transformers/pull/48792, in comments. Ranks would also draw other first values; here
they start alike. transformers 5.23 with peft 0.21 have it, whoever calls `fully_shard`. A plant: the order of the two
calls is ours. The gradient of an adapter is off by 0.84 of its largest value.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import make, text

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/pull/48792",
    host="transformers",
    versions="5.23 with peft 0.21",
    kind="gradient",
    module="base_model.model.model.layers.0.self_attn.q_proj.lora_A.default",
    line="get_peft_model",
)
batch = text


def build() -> nn.Module:
    return _adapted(make("LlamaForCausalLM"))


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    saved = {name: p.detach().clone() for name, p in model.named_parameters() if "lora" in name}
    base = model.unload()
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    made = _adapted(fully_shard(base, mesh=mesh))
    made.load_state_dict(saved, strict=False)
    return made.to(next(iter(saved.values())).dtype)


def right(model: Any, mesh: DeviceMesh) -> nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _adapted(model: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
