"""Between tensors and numpy arrays, by their bits: numpy has no bfloat16 and no float8 of its own, `ml_dtypes` has."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardlib.jax._dtypes import exact_dtype, torch_dtype

__all__ = ["to_numpy", "to_tensor"]

_FOREIGN = {1: torch.uint8, 2: torch.int16}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as an array of the same dtype; the tensor is on CPU and needs no gradient."""
    dtype = exact_dtype(tensor.dtype)
    tensor = tensor.detach().cpu()
    if _numpy_has(dtype):
        return tensor.resolve_conj().resolve_neg().numpy()
    return tensor.contiguous().view(_FOREIGN[dtype.itemsize]).numpy().view(dtype)


def to_tensor(array: Any) -> torch.Tensor:
    """The same memory as a tensor of the same dtype."""
    dtype = torch_dtype(array.dtype)
    values = np.asarray(array)
    if not values.flags.writeable:
        values = values.copy()
    if _numpy_has(values.dtype):
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(f"i{values.dtype.itemsize}")).view(dtype)


def _numpy_has(dtype: Any) -> bool:
    return np.dtype(dtype).isbuiltin == 1
