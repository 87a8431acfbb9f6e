"""The plain tensor that a DTensor stands for."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine.ops._operands import redistributed

__all__ = ["plain"]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value on every rank, its local tensor itself where that is whole; autograd takes no notice.

    A plain tensor is its own. All ranks of the mesh call it, or none.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return redistributed(_torch.local_of(tensor), _torch.spec_of(tensor), (Replicate(),) * tensor.device_mesh.ndim)
