"""Composite ops that read the memory of a tensor before DTensor hears of them. They get kernels that ask for values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardlib.engine._torch import replace_kernels

__all__ = ["install"]


def install() -> Callable[[], None]:
    """Put our kernels in the place of PyTorch's; returns what undoes it."""
    keys = [f"Autograd{device}" for device in ("CPU", "CUDA")]
    return replace_kernels({("tensor_split.tensor_indices_or_sections", key): _tensor_split for key in keys})


def _tensor_split(x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Where to split, or into how many parts, given as a tensor."""
    return x.tensor_split(int(places) if places.ndim == 0 else [int(place) for place in places.unbind()], dim)
