"""Ops that make tensors from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from shardlib.jax._dtypes import as_dtype
from shardlib.jax._table import lowering

__all__: list[str] = []


def _dtype(dtype: torch.dtype | None, *values: Any) -> Any:
    """Return the given dtype, else torch's for a Python number."""
    if dtype is not None:
        return as_dtype(dtype)
    if any(isinstance(value, float) for value in values) or not values:
        return as_dtype(torch.get_default_dtype())
    return as_dtype(torch.bool if any(isinstance(value, bool) for value in values) else torch.int64)


@lowering("aten::full.default")
def _full(size: Sequence[int], value: Any, dtype: Any = None, **_where: Any) -> Any:
    return jnp.full(tuple(size), value, _dtype(dtype, value))


@lowering("aten::zeros.default", "aten::empty.memory_format")
def _zeros(size: Sequence[int], dtype: Any = None, **_where: Any) -> Any:
    return jnp.zeros(tuple(size), _dtype(dtype))


@lowering("aten::ones.default")
def _ones(size: Sequence[int], dtype: Any = None, **_where: Any) -> Any:
    return jnp.ones(tuple(size), _dtype(dtype))


@lowering("aten::full_like.default")
def _full_like(x: Any, value: Any, dtype: Any = None, **_where: Any) -> Any:
    return jnp.full(x.shape, value, x.dtype if dtype is None else as_dtype(dtype))


@lowering("aten::zeros_like.default", "aten::empty_like.default")
def _zeros_like(x: Any, dtype: Any = None, **_where: Any) -> Any:
    return _full_like(x, 0, dtype)


@lowering("aten::ones_like.default")
def _ones_like(x: Any, dtype: Any = None, **_where: Any) -> Any:
    return _full_like(x, 1, dtype)


@lowering("aten::new_full.default")
def _new_full(x: Any, size: Sequence[int], value: Any, dtype: Any = None, **_where: Any) -> Any:
    return jnp.full(tuple(size), value, x.dtype if dtype is None else as_dtype(dtype))


@lowering("aten::new_zeros.default", "aten::new_empty.default")
def _new_zeros(x: Any, size: Sequence[int], dtype: Any = None, **_where: Any) -> Any:
    return _new_full(x, size, 0, dtype)


@lowering("aten::new_ones.default")
def _new_ones(x: Any, size: Sequence[int], dtype: Any = None, **_where: Any) -> Any:
    return _new_full(x, size, 1, dtype)


@lowering("aten::empty_strided.default")
def _empty_strided(size: Sequence[int], stride: Any, dtype: Any = None, **_where: Any) -> Any:
    return _zeros(size, dtype)


@lowering("aten::arange.default")
def _arange(end: Any, dtype: Any = None, **_where: Any) -> Any:
    return jnp.arange(end, dtype=_dtype(dtype, end))


@lowering("aten::arange.start")
def _arange_start(start: Any, end: Any, dtype: Any = None, **_where: Any) -> Any:
    return jnp.arange(start, end, dtype=_dtype(dtype, start, end))


@lowering("aten::arange.start_step")
def _arange_step(start: Any, end: Any, step: Any = 1, dtype: Any = None, **_where: Any) -> Any:
    return jnp.arange(start, end, step, dtype=_dtype(dtype, start, end, step))


@lowering("aten::linspace.default")
def _linspace(start: Any, end: Any, steps: int, dtype: Any = None, **_where: Any) -> Any:
    return jnp.linspace(start, end, steps, dtype=_dtype(dtype))


@lowering("aten::eye.default")
def _eye(n: int, dtype: Any = None, **_where: Any) -> Any:
    return jnp.eye(n, dtype=_dtype(dtype))


@lowering("aten::eye.m")
def _eye_m(n: int, m: int, dtype: Any = None, **_where: Any) -> Any:
    return jnp.eye(n, m, dtype=_dtype(dtype))


@lowering("aten::scalar_tensor.default")
def _scalar_tensor(value: Any, dtype: Any = None, **_where: Any) -> Any:
    return jnp.asarray(value, _dtype(dtype))
