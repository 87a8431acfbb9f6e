"""Scaled dot product attention, as torch defines it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.jax._table import lowering

__all__: list[str] = []


@lowering("aten::scaled_dot_product_attention.default", random=True)
def _attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: Any = None,
) -> Any:
    """Compute attention of `(..., heads, queries, head)`; a fully masked row gives zeros.

    Low precision is computed in float32, as torch's kernels do inside.
    """
    dtype = q.dtype
    if dtype in (jnp.bfloat16, jnp.float16):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = jnp.einsum("...qd,...kd->...qk", q * factor, k)
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool)) if is_causal else None
    if attn_mask is not None and attn_mask.dtype == bool:
        allowed = attn_mask if allowed is None else allowed & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = _softmax(scores, allowed, attn_mask is not None)
    if dropout_p > 0:
        kept = jax.random.bernoulli(key, 1 - dropout_p, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout_p), 0)
    return jnp.einsum("...qk,...kd->...qd", weights, v).astype(dtype)


def _softmax(scores: Any, allowed: Any, may_be_empty: bool) -> Any:
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    if not may_be_empty:
        return jax.nn.softmax(scores, axis=-1)
    empty = jnp.all(scores == -jnp.inf, axis=-1, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), axis=-1))
