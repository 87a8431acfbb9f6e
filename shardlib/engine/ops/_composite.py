"""Replacement kernels for composite ops that fail before DTensor's dispatch.

Some read the data pointer of a tensor, which a DTensor does not have; some do not write to an `out=` that is not a
plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardlib.engine._torch import replace_kernels

__all__ = ["install"]


def install() -> Callable[[], None]:
    """Replace PyTorch's kernels, and return an undo function."""
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
    """Make the `out=` variant of a functional op."""

    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found = functional(*args, **kwargs)
        if out.shape != found.shape:
            out.resize_(found.shape)
        return out.copy_(found)

    return kernel


def _tensor_split(x: torch.Tensor, sections: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Split at indices, or into a number of sections, given as a tensor."""
    return x.tensor_split(int(sections) if sections.ndim == 0 else [int(index) for index in sections.unbind()], dim)
