"""Normalisation. Statistics of low precision are taken in float32, as torch's kernels do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardlib.jax._table import lowering

__all__: list[str] = []


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@lowering("aten::layer_norm.default")
def _layer_norm(
    x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Any:
    return _native_layer_norm(x, shape, weight, bias, eps)[0]


@lowering("aten::native_layer_norm.default")
def _native_layer_norm(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    axes = tuple(range(-len(shape), 0))
    y, mean, rstd = _standardised(_wide(x), axes, eps)
    # The statistics have no gradient of their own.
    return _affine(y, weight, bias).astype(x.dtype), lax.stop_gradient(mean), lax.stop_gradient(rstd)


def _standardised(x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    mean = jnp.mean(x, axis=axes, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True) + eps)
    return (x - mean) * rstd, mean, rstd


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@lowering("aten::rms_norm.default")
def _rms_norm(x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    wide = _wide(x)
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    mean = jnp.mean(jnp.square(wide), axis=tuple(range(-len(shape), 0)), keepdims=True)
    return _affine(wide * lax.rsqrt(mean + eps), weight, None).astype(x.dtype)


@lowering("aten::group_norm.default")
def _group_norm(
    x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    return _native_group_norm(x, weight, bias, x.shape[0], x.shape[1], 0, groups, eps)[0]


@lowering("aten::native_group_norm.default")
def _native_group_norm(
    x: Any, weight: Any, bias: Any, count: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    grouped = _wide(x).reshape(count, groups, channels // groups * math.prod(x.shape[2:]))
    y, mean, rstd = _standardised(grouped, (-1,), eps)
    y = _affine(y.reshape(x.shape), *(_by_channel(t, x.ndim) for t in (weight, bias))).astype(x.dtype)
    return y, mean[..., 0], rstd[..., 0]


def _by_channel(t: Any, ndim: int) -> Any:
    return None if t is None else t.reshape(1, -1, *[1] * (ndim - 2))


@lowering("aten::_native_batch_norm_legit_functional.default")
def _batch_norm_functional(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Return `y, mean, 1/deviation, new running mean, new running variance`; statistics are of the global batch."""
    y, saved_mean, rstd, batch_mean, batch_var = _batch_norm(x, weight, bias, mean, var, training, eps)
    if not training:
        return y, saved_mean, rstd, mean, var
    count = math.prod(x.shape) // x.shape[1]
    unbiased = batch_var * (count / max(count - 1, 1))
    new = [
        (1 - momentum) * old + momentum * lax.stop_gradient(now) for old, now in ((mean, batch_mean), (var, unbiased))
    ]
    return y, saved_mean, rstd, *new


@lowering("aten::_batch_norm_with_update_functional.default")
def _batch_norm_with_update(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> tuple[Any, ...]:
    y, saved_mean, rstd, *new = _batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return y, saved_mean, rstd, jnp.zeros(0, jnp.uint8), *new


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float) -> tuple[Any, ...]:
    wide, axes = _wide(x), (0, *range(2, x.ndim))
    if training:
        mean = jnp.mean(wide, axis=axes)
        var = jnp.mean(jnp.square(wide - _by_channel(mean, x.ndim)), axis=axes)
    rstd = lax.rsqrt(var + eps)
    y = (wide - _by_channel(mean, x.ndim)) * _by_channel(rstd, x.ndim)
    y = _affine(y, *(_by_channel(t, x.ndim) for t in (weight, bias))).astype(x.dtype)
    if not training:
        nothing = jnp.zeros(0, wide.dtype)
        return y, nothing, nothing, mean, var
    # What torch keeps for backward has no gradient of its own.
    return y, lax.stop_gradient(mean), lax.stop_gradient(rstd), mean, var


@lowering("aten::_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    return _batch_norm(x, weight, bias, None, None, True, eps)[:3]


@lowering("aten::_native_batch_norm_legit_no_training.default")
def _batch_norm_no_training(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> Any:
    return _batch_norm(x, weight, bias, mean, var, False, eps)[:3]


@lowering("aten::batch_norm.default")
def _batch_norm_composite(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn: bool = True
) -> Any:
    return _batch_norm(x, weight, bias, mean, var, training, eps)[0]
