"""Composite ops that go wrong before DTensor hears of them. They get kernels of ours.

Some read the memory of a tensor, of which a DTensor has none; some leave `out=` as it was if it is no plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.engine._torch import replace_kernels

__all__ = ["install"]


def install() -> Callable[[], None]:
    """Put our kernels in the place of PyTorch's; returns what undoes it."""
    kernels: dict[str, Callable[..., Any]] = {"tensor_split.tensor_indices_or_sections": _tensor_split}
    for overload, functional in _RANKS.items():
        kernels[f"linalg_matrix_rank.{overload}"] = _writing(getattr(torch.ops.aten.linalg_matrix_rank, functional))
    keys = [f"Autograd{device}" for device in ("CPU", "CUDA")]
    return replace_kernels({(name, key): kernel for name, kernel in kernels.items() for key in keys})


_RANKS = {
    "out": "default",
    "atol_rtol_tensor_out": "atol_rtol_tensor",
    "atol_rtol_float_out": "atol_rtol_float",
    "out_tol_tensor": "tol_tensor",
}


def _writing(functional: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The form with `out=` of an op that makes a new tensor."""

    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found = functional(*args, **kwargs)
        if out.shape != found.shape:
            out.resize_(found.shape)
        return out.copy_(found)

    return kernel


def _tensor_split(x: torch.Tensor, places: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Where to split, or into how many parts, given as a tensor."""
    return x.tensor_split(int(places) if places.ndim == 0 else [int(place) for place in places.unbind()], dim)
