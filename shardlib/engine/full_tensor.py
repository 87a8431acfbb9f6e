"""Conversion of a DTensor to a full tensor, without autograd."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine.ops._operands import redistributed

__all__ = ["to_full_tensor"]


def to_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, not recorded by autograd; its local tensor itself if it is replicated.

    A plain tensor is returned unchanged. Collective over the mesh.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return redistributed(_torch.local_of(tensor), _torch.spec_of(tensor), (Replicate(),) * tensor.device_mesh.ndim)
