"""A sharded output that is all-gathered when an op first reads it, similar to `AsyncCollectiveTensor`.

Outputs of a region are plain tensors, so that each sharded output costs an all-gather. Outputs after the first are
rarely read: the attention weights of every layer are returned and dropped. A `LazyFullTensor` has the shape, dtype and
autograd node of the plain tensor; the first op on it gathers it. All ranks of the model axes run the same program: they
read the same outputs, and gather together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import no_torch_function, pytree, wrapper_subclass

__all__ = ["LazyFullTensor"]


class LazyFullTensor(torch.Tensor):
    """A plain tensor that is a local shard on each rank until an op reads it.

    Attributes:
        _dtensor: the region's output. All added attributes are private, so that they do not shadow those of `Tensor`.
    """

    _dtensor: DTensor
    _full: torch.Tensor | None

    @staticmethod
    def __new__(cls, split: DTensor) -> LazyFullTensor:
        shell = wrapper_subclass(cls, split.shape, strides=split.stride(), dtype=split.dtype, device=split.device)
        shell._dtensor, shell._full = split, None
        return shell

    def _gathered(self) -> torch.Tensor:
        """Return the full tensor. Collective over the mesh."""
        if self._full is None:
            self._full = self._dtensor.full_tensor()
        return self._full

    # The subclass is not preserved: results of ops are plain tensors.
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(LazyFullTensor, LazyFullTensor._gathered, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"LazyFullTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self._dtensor.placements})"
