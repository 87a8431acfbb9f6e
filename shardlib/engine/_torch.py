"""The only file that touches private PyTorch interfaces. Seen on torch 2.13.0."""

from __future__ import annotations

import sys

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

__all__ = ["forget_meshes"]


def forget_meshes() -> None:
    """Drop what DTensor remembers of meshes whose process groups are gone: cached propagation, the RNG tracker."""
    _clear_sharding_prop_cache()
    dtensor_random._rng_tracker = None
    torch._C._set_dtensor_allow_implicit_replication(False)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
