"""The vocabulary is padded to a multiple of the ranks, and the padding is saved.

Report: https://github.com/hpcaitech/ColossalAI/issues/6167, "Size Mismatch Issue When Loading Model Checkpoints
Trained with Tensor Parallel if `vocab_size % tp_size != 0`". A plant in plain torch, of ColossalAI in 2024. Embedding
and head are saved with 32 rows, and have 31.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.audit.faults import Fault
from tests.audit.faults.models import GPT, tensor_plan, tokens

MESH = "tp=2"
FAULT = Fault(
    report="https://github.com/hpcaitech/ColossalAI/issues/6167",
    host="ColossalAI",
    versions="ColossalAI in December 2024",
    kind="save",
    module="head",
    line="state_dict",
)
VOCABULARY, PADDED = 31, 32


def build() -> nn.Module:
    return GPT(vocabulary=VOCABULARY)


def batch(step: int) -> dict[str, torch.Tensor]:
    return tokens(step, vocabulary=VOCABULARY)


def shard(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Pad embedding and head by rows of zeros, and cut what the head gives for them."""
    for layer in (model.embed, model.head):
        layer.weight = nn.Parameter(F.pad(layer.weight.detach(), (0, 0, 0, PADDED - VOCABULARY)))
    parallelize_module(model, mesh, tensor_plan())
    model.head.register_forward_hook(lambda _module, _args, logits: logits[..., :VOCABULARY])
    return model


def save(model: Any, folder: str) -> None:
    _write(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), folder)


def save_right(model: Any, folder: str) -> None:
    tensors: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name in ("embed.weight", "head.weight"):
        tensors[name] = tensors[name][:VOCABULARY] if dist.get_rank() == 0 else None
    _write(tensors, folder)


def load(folder: str) -> dict[str, Any]:
    return torch.load(os.path.join(folder, "model.pt"))


def _write(tensors: dict[str, Any], folder: str) -> None:
    if dist.get_rank() == 0:
        torch.save(tensors, os.path.join(folder, "model.pt"))
