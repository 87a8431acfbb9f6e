"""Conversion between tensors and numpy arrays by their bits: `ml_dtypes` has bfloat16 and float8, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardlib.jax._dtypes import exact_dtype, torch_dtype

__all__ = ["to_numpy", "to_tensor"]

_FOREIGN = {1: torch.uint8, 2: torch.int16}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return an array on the same memory with the same dtype; the tensor is on CPU and does not require grad."""
    dtype = exact_dtype(tensor.dtype)
    tensor = tensor.detach().cpu()
    if _numpy_has(dtype):
        return tensor.resolve_conj().resolve_neg().numpy()
    return tensor.contiguous().view(_FOREIGN[dtype.itemsize]).numpy().view(dtype)


def to_tensor(array: Any) -> torch.Tensor:
    """Return a tensor on the same memory with the same dtype."""
    dtype = torch_dtype(array.dtype)
    values = np.asarray(array)
    if not values.flags.writeable:
        values = values.copy()
    if _numpy_has(values.dtype):
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(f"i{values.dtype.itemsize}")).view(dtype)


def _numpy_has(dtype: Any) -> bool:
    return np.dtype(dtype).isbuiltin == 1
