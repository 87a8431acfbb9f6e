"""Ops that draw random numbers, each from a key of its own. The numbers are JAX's, not torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from shardlib.jax._dtypes import as_dtype
from shardlib.jax._table import lowering

__all__: list[str] = []


def _float(dtype: Any) -> Any:
    return as_dtype(torch.get_default_dtype() if dtype is None else dtype)


@lowering("aten::native_dropout.default", random=True)
def _native_dropout(x: Any, p: float, train: bool | None = True, *, key: Any) -> Any:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(kept, x / (1 - p) if p < 1 else 0, 0), kept


@lowering("aten::dropout.default", random=True)
def _dropout(x: Any, p: float, train: bool, *, key: Any) -> Any:
    return _native_dropout(x, p, train, key=key)[0]


@lowering("aten::bernoulli.default", random=True)
def _bernoulli(x: Any, generator: Any = None, *, key: Any) -> Any:
    return jax.random.bernoulli(key, x).astype(x.dtype)


@lowering("aten::bernoulli.p", random=True)
def _bernoulli_p(x: Any, p: float = 0.5, generator: Any = None, *, key: Any) -> Any:
    return jax.random.bernoulli(key, p, x.shape).astype(x.dtype)


@lowering("aten::rand.default", random=True)
def _rand(size: Sequence[int], dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return jax.random.uniform(key, tuple(size), _float(dtype))


@lowering("aten::randn.default", random=True)
def _randn(size: Sequence[int], dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return jax.random.normal(key, tuple(size), _float(dtype))


@lowering("aten::rand_like.default", random=True)
def _rand_like(x: Any, dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return jax.random.uniform(key, x.shape, x.dtype if dtype is None else as_dtype(dtype))


@lowering("aten::randn_like.default", random=True)
def _randn_like(x: Any, dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return jax.random.normal(key, x.shape, x.dtype if dtype is None else as_dtype(dtype))


@lowering("aten::randint.low", random=True)
def _randint(low: int, high: int, size: Sequence[int], dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return jax.random.randint(key, tuple(size), low, high, as_dtype(torch.int64 if dtype is None else dtype))


@lowering("aten::uniform.default", random=True)
def _uniform(x: Any, low: float = 0, high: float = 1, generator: Any = None, *, key: Any) -> Any:
    return jax.random.uniform(key, x.shape, x.dtype, low, high)


@lowering("aten::exponential.default", random=True)
def _exponential(x: Any, lambd: float = 1, generator: Any = None, *, key: Any) -> Any:
    return jax.random.exponential(key, x.shape, x.dtype) / lambd
