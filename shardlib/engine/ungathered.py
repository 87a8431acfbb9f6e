"""A split output that is made whole when somebody reads it, as a collective's result is waited for when it is read.

A region hands on plain tensors, so that each output which is split costs a gather. Few outputs beyond the first are
ever read: the attention weights of every layer are returned and dropped. To autograd, and to whoever asks for shape or
dtype, an `Ungathered` is the plain tensor; the first op on it makes it one. All ranks of the model axes run the same
program, so that they read the same outputs, and gather together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import no_torch_function, pytree, wrapper_subclass

__all__ = ["Ungathered"]


class Ungathered(torch.Tensor):
    """A plain tensor of which each rank holds a shard until an op reads it.

    Attributes:
        _dtensor: what the region gave. Public names are those of `Tensor` alone.
    """

    _dtensor: DTensor
    _whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, split: DTensor) -> Ungathered:
        shell = wrapper_subclass(cls, split.shape, strides=split.stride(), dtype=split.dtype, device=split.device)
        shell._dtensor, shell._whole = split, None
        return shell

    def whole(self) -> torch.Tensor:
        """The plain tensor. Every rank must call it, or none."""
        if self._whole is None:
            self._whole = self._dtensor.full_tensor()
        return self._whole

    # Subclasses are not kept: what an op makes of it is a plain tensor.
    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = pytree.tree_map_only(Ungathered, Ungathered.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"Ungathered(shape={tuple(self.shape)}, dtype={self.dtype}, placements={self._dtensor.placements})"
