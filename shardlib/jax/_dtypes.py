"""Dtypes of torch and of JAX, and how torch chooses the dtype of a result."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from shardlib.errors import InputError

__all__ = ["as_dtype", "exact_dtype", "promote", "promoted", "torch_dtype", "x64"]

_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.float8_e4m3fnuz: "float8_e4m3fnuz",
    torch.float8_e5m2fnuz: "float8_e5m2fnuz",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint64: "uint64",
    torch.uint32: "uint32",
    torch.uint16: "uint16",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_BACK = {name: dtype for dtype, name in _NAMES.items()}


def exact_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the JAX dtype with the same bits.

    Raises:
        InputError: JAX has none.
    """
    if dtype not in _NAMES:
        raise InputError(f"JAX has no dtype for {dtype}; it has those of {', '.join(map(str, _NAMES))}.")
    return jnp.dtype(_NAMES[dtype])


def x64() -> bool:
    """Return whether JAX has 64-bit numbers now."""
    return jax.dtypes.canonicalize_dtype("int64") == np.dtype("int64")


def as_dtype(dtype: torch.dtype) -> np.dtype:
    """Return the dtype that JAX computes in: without `jax_enable_x64`, 64-bit integers become 32-bit ones."""
    return jax.dtypes.canonicalize_dtype(exact_dtype(dtype))


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype for one of JAX's.

    Raises:
        InputError: torch has none.
    """
    name = dtype.name if hasattr(dtype, "name") else jnp.dtype(dtype).name  # numpy has none for keys
    if name not in _BACK:
        raise InputError(f"torch has no dtype for JAX's {name}. Convert the array with .astype() first.")
    return _BACK[name]


def promoted(*operands: Any) -> np.dtype:
    """Return the dtype in which torch combines arrays and Python numbers.

    Tensors with dims come before tensors without, and those before Python numbers, unless the kind of number differs:
    torch.result_type has the rules, and is asked.

    >>> promoted(jnp.ones(3, jnp.int32), 0.5).name, promoted(jnp.ones(3, jnp.bfloat16), jnp.ones((), jnp.float32)).name
    ('float32', 'bfloat16')
    """
    return as_dtype(_result_type(*(_kind(operand) for operand in operands)))


def promote(*operands: Any) -> list[Any]:
    """Convert the operands to arrays of one dtype, as torch promotes them."""
    dtype = promoted(*operands)
    return [jnp.asarray(operand, dtype) for operand in operands]


def _kind(operand: Any) -> tuple[torch.dtype, int] | type:
    """Return what torch's promotion depends on: dtype and whether there are dims; for Python numbers, the type."""
    if isinstance(operand, bool | int | float | complex):
        return type(operand)
    return torch_dtype(operand.dtype), min(operand.ndim, 1)


@functools.cache
def _result_type(*kinds: Any) -> torch.dtype:
    """Return the widest dtype of each category (dims, none, Python number), combined as by `torch.result_type`."""
    examples = [kind(1) if isinstance(kind, type) else torch.empty((1,) * kind[1], dtype=kind[0]) for kind in kinds]
    if all(not isinstance(example, torch.Tensor) for example in examples):
        return functools.reduce(torch.promote_types, (torch.result_type(e, e) for e in examples))
    best: list[Any] = []
    for category in (0, 1):
        dtypes = [e.dtype for e in examples if isinstance(e, torch.Tensor) and e.ndim == 1 - category]
        if dtypes:
            best.append(torch.empty((1,) * (1 - category), dtype=functools.reduce(torch.promote_types, dtypes)))
    best += [example for example in examples if not isinstance(example, torch.Tensor)]
    if len(best) == 1:
        return best[0].dtype
    dtype = torch.result_type(best[0], best[1])
    for other in best[2:]:
        dtype = torch.result_type(torch.empty((1,), dtype=dtype), other)
    return dtype
