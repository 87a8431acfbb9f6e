"""Context parallelism replaces the mask of each attention layer by a causal one: a sliding window is lost.

Report: https://github.com/huggingface/accelerate/pull/4177, "Refuse context parallelism for models with
sliding-window or chunked attention layers". Accelerate 1.15 refuses such models. A plant of the hook that it attached
before, without the split of the sequence. What attention gives its projection is off by 0.61 of its largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults import Fault
from tests.audit.faults.pretrained import make, text

MESH = "cp=2"
FAULT = Fault(
    report="https://github.com/huggingface/accelerate/pull/4177",
    host="accelerate",
    versions="accelerate before August 2026",
    kind="output",
    module="model.layers.0.self_attn",
    line="attention_mask",
)
build = functools.partial(make, "MistralForCausalLM", sliding_window=3, attention="sdpa")
batch = text


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_causal, with_kwargs=True)
    return model


def right(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def _causal(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args, {**kwargs, "attention_mask": None, "is_causal": True}
