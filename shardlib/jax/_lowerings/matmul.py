"""Products of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.jax._lowerings.gradients import absolute, tangent_of
from shardlib.jax._lowerings.reduce import p_norm
from shardlib.jax._table import lowering

__all__: list[str] = []


@lowering("aten::linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    y = jnp.einsum("...i,oi->...o", x, weight) if weight.ndim == 2 else x @ weight
    return y if bias is None else y + bias


@lowering("aten::mm.default", "aten::bmm.default", "aten::matmul.default", "aten::mv.default", "aten::dot.default")
def _matmul(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b)


@lowering("aten::addmm.default", "aten::addmv.default")
def _addmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _scaled(x, beta) + _scaled(jnp.matmul(a, b), alpha)


@lowering("aten::baddbmm.default")
def _baddbmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Compute `beta * x + alpha * a @ b`; with beta 0, `x` is not read, NaN or not."""
    product = _scaled(jnp.matmul(a, b), alpha)
    return product if beta == 0 else _scaled(x, beta) + product


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


@lowering("aten::addbmm.default")
def _addbmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _scaled(jnp.einsum("bij,bjk->ik", a, b), alpha)
    return product if beta == 0 else _scaled(x, beta) + product


@lowering("aten::vdot.default")
def _vdot(a: Any, b: Any) -> Any:
    return jnp.vdot(a, b)


@lowering("aten::_cdist_forward.default")
def _cdist(a: Any, b: Any, p: float, compute_mode: int | None = None) -> Any:
    return distances(a[..., :, None, :] - b[..., None, :, :], p)


@lowering("aten::_pdist_forward.default")
def _pdist(x: Any, p: float = 2) -> Any:
    rows, columns = np.triu_indices(x.shape[0], 1)
    return distances(x[rows] - x[columns], p)


def distances(difference: Any, p: float) -> Any:
    """Return the p-norm of the last dim."""
    if not math.isinf(p):
        return p_norm(difference, p, -1)
    size = absolute(difference)  # each of several largest has the whole gradient
    largest = lax.stop_gradient(jnp.max(size, axis=-1, initial=0))
    return largest + jnp.sum(jnp.where(size == largest[..., None], tangent_of(size), 0), axis=-1)


@lowering("aten::outer.default", "aten::ger.default")
def _outer(a: Any, b: Any) -> Any:
    return jnp.outer(a, b)


@lowering("aten::einsum.default")
def _einsum(equation: str, tensors: Sequence[Any], path: Any = None) -> Any:
    return jnp.einsum(equation, *tensors)


@lowering("aten::bilinear.default")
def _bilinear(a: Any, b: Any, weight: Any, bias: Any = None) -> Any:
    y = jnp.einsum("...i,oij,...j->...o", a, weight, b)
    return y if bias is None else y + bias


@lowering("aten::_grouped_mm.default", "transformers::grouped_mm_fallback.default")
def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply the rows of `a` from `offs[i - 1]` up to `offs[i]` with matrix `i` of `b`."""
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    return lax.ragged_dot(a, b, sizes)
