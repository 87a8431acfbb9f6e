"""An adapter is added to a sharded model: each rank draws and trains its own.

Report: https://github.com/huggingface/transformers/issues/48873. Versions: peft 0.21 with transformers 5.23.
peft's own in this combination. @FIGURE@
"""

from __future__ import annotations

import functools

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import load, make, text

MESH = "fsdp=2"
FAULT = Fault(
    report="https://github.com/huggingface/transformers/issues/48873",
    host="transformers",
    versions="5.23 with peft 0.21",
    kind="gradient",
    module="model.layers.0.self_attn.q_proj.lora_A.default",
    line="get_peft_model",
    own=True,
)
batch = text


def build() -> nn.Module:
    return _adapted(make("LlamaForCausalLM"))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def _adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))  # type: ignore[arg-type, return-value]
