"""Ops that draw random numbers, each from a key of its own. The numbers are JAX's, not torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from shardlib.jax._dtypes import as_dtype, promote
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


@lowering("aten::bernoulli.Tensor", random=True)
def _bernoulli_tensor(x: Any, p: Any, generator: Any = None, *, key: Any) -> Any:
    return jax.random.bernoulli(key, jnp.broadcast_to(p, x.shape)).astype(x.dtype)


@lowering("aten::randint.default", random=True)
def _randint_from_zero(high: int, size: Sequence[int], dtype: Any = None, *, key: Any, **where: Any) -> Any:
    return _randint(0, high, size, dtype, key=key)


@lowering("aten::randint_like.default", random=True)
def _randint_like(x: Any, high: int, dtype: Any = None, *, key: Any, **where: Any) -> Any:
    return _randint_like_from(x, 0, high, dtype, key=key)


@lowering("aten::randint_like.low_dtype", random=True)
def _randint_like_from(x: Any, low: int, high: int, dtype: Any = None, *, key: Any, **where: Any) -> Any:
    drawn = jax.random.randint(key, x.shape, low, high, _integer())
    return drawn.astype(x.dtype if dtype is None else as_dtype(dtype))


def _integer() -> Any:
    return as_dtype(torch.int64)


@lowering("aten::randperm.default", random=True)
def _randperm(n: int, dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return jax.random.permutation(key, n).astype(as_dtype(torch.int64 if dtype is None else dtype))


@lowering("aten::random.default", random=True)
def _random(x: Any, generator: Any = None, *, key: Any) -> Any:
    """Draw from all numbers that the dtype has exactly, as torch does."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _random_from(x, 0, 2 ** (jnp.finfo(x.dtype).nmant + 1) + 1, key=key)
    return _random_from(x, 0, 2 if x.dtype == bool else None, key=key)


@lowering("aten::random.from", random=True)
def _random_from(x: Any, low: int, high: int | None, generator: Any = None, *, key: Any) -> Any:
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else _integer()
    last = jnp.iinfo(dtype).max
    # `randint` leaves its upper end out, and the largest number has no successor.
    drawn = jax.random.randint(key, x.shape, low, last if high is None else min(high, last), dtype)
    return drawn.astype(x.dtype)


@lowering("aten::random.to", random=True)
def _random_to(x: Any, high: int, generator: Any = None, *, key: Any) -> Any:
    return _random_from(x, 0, high, key=key)


@lowering("aten::normal.Tensor_Tensor", "aten::normal.Tensor_float", "aten::normal.float_Tensor", random=True)
def _normal(mean: Any, std: Any = 1, generator: Any = None, *, key: Any) -> Any:
    mean, std = promote(mean, std)
    shape = jnp.broadcast_shapes(mean.shape, std.shape)
    return lax.stop_gradient(mean + std * jax.random.normal(key, shape, mean.dtype))


@lowering("aten::normal.float_float", random=True)
def _normal_of(mean: float, std: float, size: Sequence[int], dtype: Any = None, *, key: Any, **_where: Any) -> Any:
    return mean + std * jax.random.normal(key, tuple(size), _float(dtype))


@lowering("aten::normal_functional.default", random=True)
def _normal_like(x: Any, mean: float = 0, std: float = 1, generator: Any = None, *, key: Any) -> Any:
    return mean + std * jax.random.normal(key, x.shape, x.dtype)


@lowering("aten::log_normal.default", random=True)
def _log_normal(x: Any, mean: float = 1, std: float = 2, generator: Any = None, *, key: Any) -> Any:
    return jnp.exp(_normal_like(x, mean, std, key=key))


@lowering("aten::cauchy.default", random=True)
def _cauchy(x: Any, median: float = 0, sigma: float = 1, generator: Any = None, *, key: Any) -> Any:
    return median + sigma * jax.random.cauchy(key, x.shape, x.dtype)


@lowering("aten::geometric.default", random=True)
def _geometric(x: Any, p: float, generator: Any = None, *, key: Any) -> Any:
    return jax.random.geometric(key, p, x.shape).astype(x.dtype)


@lowering("aten::poisson.default", random=True)
def _poisson(x: Any, generator: Any = None, *, key: Any) -> Any:
    return jax.random.poisson(key, lax.stop_gradient(x), dtype=_integer()).astype(x.dtype)


@lowering("aten::multinomial.default", random=True)
def _multinomial(x: Any, num_samples: int, replacement: bool = False, generator: Any = None, *, key: Any) -> Any:
    """Draw by Gumbel's maximum: the largest of the perturbed logarithms, of which several are without replacement."""
    logs = jnp.log(lax.stop_gradient(x))
    if replacement:
        noise = jax.random.gumbel(key, (*x.shape[:-1], num_samples, x.shape[-1]), x.dtype)
        return jnp.argmax(logs[..., None, :] + noise, axis=-1)
    return lax.top_k(logs + jax.random.gumbel(key, x.shape, x.dtype), num_samples)[1]


@lowering("aten::rrelu_with_noise_functional.default", random=True)
def _rrelu(
    x: Any,
    noise: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
    *,
    key: Any,
) -> Any:
    if not training:
        return jnp.where(x > 0, x, x * ((lower + upper) / 2)), noise
    slopes = jax.random.uniform(key, x.shape, x.dtype, lower, upper)
    return jnp.where(x > 0, x, x * slopes), jnp.where(x > 0, 1, slopes)


@lowering("aten::exponential.default", random=True)
def _exponential(x: Any, lambd: float = 1, generator: Any = None, *, key: Any) -> Any:
    return jax.random.exponential(key, x.shape, x.dtype) / lambd
