"""The coarsest dtype that a model computes in."""

from __future__ import annotations

from typing import Any

import torch

from shardlib.engine._torch import TorchDispatchMode, pytree

__all__ = ["Coarsest"]


class Coarsest(TorchDispatchMode):
    """Inside the block, `dtype` is that of the coarsest floating-point result so far, float64 at first.

    What is made from no tensor (a range, a mask filled with one number) is the same in every run, and does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.dtype = max(self.dtype, leaf.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result
