"""Tensors of a sharded model as one device has them. Importable on ranks of the pool."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["gradients", "values", "whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The global value; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, also those that a state dict leaves out; tied ones once."""
    return {name: whole(tensor.detach()) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Those of parameters; None where there is none."""
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}
