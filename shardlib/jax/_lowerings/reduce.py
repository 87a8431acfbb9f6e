"""Reductions over dims, and ops that run along a dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.jax._dtypes import as_dtype
from shardlib.jax._lowerings.gradients import absolute, tangent_of
from shardlib.jax._lowerings.views import on_rows
from shardlib.jax._table import lowering

__all__ = ["axes_of", "p_norm"]


def axes_of(dim: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """Return dims as JAX's `axis`; none named means all of them."""
    if dim is None or isinstance(dim, int):
        return dim
    return tuple(dim) or None


def _summed(x: Any, dtype: Any) -> Any:
    """Convert to the dtype in which torch sums: int64 for integers and booleans."""
    if dtype is not None:
        return x.astype(as_dtype(dtype))
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jax.dtypes.canonicalize_dtype("int64"))


@lowering("aten::sum.default")
def _sum_all(x: Any, dtype: Any = None) -> Any:
    return jnp.sum(_summed(x, dtype))


@lowering("aten::sum.dim_IntList")
@on_rows
def _sum(x: Any, dim: Any, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.sum(_summed(x, dtype), axis=axes_of(dim), keepdims=keepdim)


@lowering("aten::mean.default")
def _mean_all(x: Any, dtype: Any = None) -> Any:
    return jnp.mean(x if dtype is None else x.astype(as_dtype(dtype)))


@lowering("aten::mean.dim")
@on_rows
def _mean(x: Any, dim: Any, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.mean(x if dtype is None else x.astype(as_dtype(dtype)), axis=axes_of(dim), keepdims=keepdim)


@lowering("aten::prod.default")
def _prod_all(x: Any, dtype: Any = None) -> Any:
    return jnp.prod(_summed(x, dtype))


@lowering("aten::prod.dim_int")
@on_rows
def _prod(x: Any, dim: int, keepdim: bool = False, dtype: Any = None) -> Any:
    return jnp.prod(_summed(x, dtype), axis=dim, keepdims=keepdim)


@lowering("aten::var.correction")
@on_rows
def _var(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    axes = axes_of(dim)
    centred = jnp.square(x - jnp.mean(x, axis=axes, keepdims=True))
    total = jnp.sum(centred, axis=axes, keepdims=keepdim)
    return total / max(x.size / max(total.size, 1) - (1 if correction is None else correction), 0)


@lowering("aten::std.correction")
@on_rows
def _std(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    """Return the deviation; where it is zero, its gradient is zero."""
    var = _var(x, dim, correction, keepdim)
    return jnp.where(var > 0, jnp.sqrt(jnp.where(var > 0, var, 1)), var)


@lowering("aten::var_mean.correction")
@on_rows
def _var_mean(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    return _var(x, dim, correction, keepdim), jnp.mean(x, axis=axes_of(dim), keepdims=keepdim)


_REDUCED: dict[str, Callable[..., Any]] = {"amax": jnp.max, "amin": jnp.min}
for _name, _function in _REDUCED.items():

    @lowering(f"aten::{_name}.default")
    @on_rows
    def _extreme(x: Any, dim: Any = (), keepdim: bool = False, _function: Any = _function) -> Any:
        return _function(x, axis=axes_of(dim), keepdims=keepdim)


for _name, _function in {"max": jnp.max, "min": jnp.min}.items():

    @lowering(f"aten::{_name}.default")
    def _extreme_of_all(x: Any, _function: Any = _function) -> Any:
        return _function(x)


for _name, _chosen in {"max": jnp.argmax, "min": jnp.argmin}.items():

    @lowering(f"aten::{_name}.dim")
    @on_rows
    def _extreme_with_index(x: Any, dim: int, keepdim: bool = False, _chosen: Any = _chosen) -> Any:
        """Return extreme values and their indices; the gradient goes to the indexed element."""
        index = _chosen(x, axis=dim, keepdims=True)
        value = jnp.take_along_axis(x, index, axis=dim)
        return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


for _name, _chosen in {"argmax": jnp.argmax, "argmin": jnp.argmin}.items():

    @lowering(f"aten::{_name}.default")
    @on_rows
    def _index_of_extreme(x: Any, dim: int | None = None, keepdim: bool = False, _chosen: Any = _chosen) -> Any:
        return _chosen(x, axis=dim, keepdims=keepdim)


for _name, _function in {"any": jnp.any, "all": jnp.all}.items():

    @lowering(f"aten::{_name}.default")
    def _truth_of_all(x: Any, _function: Any = _function) -> Any:
        return _function(x)

    @lowering(f"aten::{_name}.dim", f"aten::{_name}.dims")
    @on_rows
    def _truth(x: Any, dim: Any = None, keepdim: bool = False, _function: Any = _function) -> Any:
        return _function(x, axis=axes_of(dim), keepdims=keepdim)


@lowering("aten::logsumexp.default")
@on_rows
def _logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(x, axis=axes_of(dim), keepdims=keepdim)


@lowering("aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype")
@on_rows
def _norm(x: Any, p: float | None, dim: Any, keepdim: bool = False, dtype: Any = None) -> Any:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, dtype)


@lowering("aten::linalg_vector_norm.default")
@on_rows
def _vector_norm(x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return p_norm(x if dtype is None else x.astype(as_dtype(dtype)), ord, axes_of(dim), keepdim)


def p_norm(x: Any, p: float, axis: Any, keepdims: bool = False) -> Any:
    """Compute a norm. Where it is zero, and by elements that are zero, its gradient is zero."""
    if p == 0:
        return jnp.sum((x != 0).astype(x.dtype), axis=axis, keepdims=keepdims)
    if p == 2:
        total = jnp.sum(
            jnp.square(x) if jnp.isrealobj(x) else jnp.square(x.real) + jnp.square(x.imag), axis, keepdims=keepdims
        )
        return jnp.where(total > 0, jnp.sqrt(jnp.where(total > 0, total, 1)), total)
    size = absolute(x)
    if math.isinf(p):
        return (jnp.max if p > 0 else jnp.min)(size, axis=axis, keepdims=keepdims)
    if p == 1:
        return jnp.sum(size, axis=axis, keepdims=keepdims)
    some = size != 0
    powers = jnp.where(some, jnp.where(some, size, 1) ** p, 0 if p > 0 else jnp.inf)
    total = jnp.sum(powers, axis=axis, keepdims=keepdims)
    return jnp.where(total != 0, jnp.where(total != 0, total, 1) ** (1 / p), 0)


@lowering("aten::softmax.int", "aten::_softmax.default")
@on_rows
def _softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    return jax.nn.softmax(_wide(x, dtype), axis=dim)


@lowering("aten::_safe_softmax.default")
@on_rows
def _safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """Compute softmax; where all of a row is minus infinity, zeros."""
    x = _wide(x, dtype)
    empty = jnp.all(x == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, x), axis=dim))


@lowering("aten::log_softmax.int", "aten::_log_softmax.default")
@on_rows
def _log_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    return jax.nn.log_softmax(_wide(x, dtype), axis=dim)


def _wide(x: Any, dtype: Any) -> Any:
    """Convert to the given dtype; `_softmax` has a flag in its position, which matters on GPU only."""
    if dtype is not None and not isinstance(dtype, bool):
        x = x.astype(as_dtype(dtype))
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@lowering("aten::cumsum.default")
@on_rows
def _cumsum(x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumsum(_summed(x, dtype), axis=dim)


@lowering("aten::cumprod.default")
@on_rows
def _cumprod(x: Any, dim: int, dtype: Any = None) -> Any:
    return jnp.cumprod(_summed(x, dtype), axis=dim)


@lowering("aten::diff.default")
@on_rows
def _diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    return jnp.diff(x, n, axis=dim, prepend=prepend, append=append)


@lowering("aten::topk.default")
@on_rows
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    index = jnp.moveaxis(lax.top_k(jnp.moveaxis(x if largest else -x, dim, -1), k)[1], -1, dim)
    return jnp.take_along_axis(x, index, axis=dim), index


@lowering("aten::sort.default")
@on_rows
def _sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    index = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, index, axis=dim), index


@lowering("aten::sort.stable")
@on_rows
def _sort_stable(x: Any, stable: bool | None = True, dim: int = -1, descending: bool = False) -> Any:
    return _sort(x, dim, descending)


@lowering("aten::argsort.default")
@on_rows
def _argsort(x: Any, dim: int = -1, descending: bool = False) -> Any:
    return _sort(x, dim, descending)[1]


@lowering("aten::logcumsumexp.default")
@on_rows
def _logcumsumexp(x: Any, dim: int) -> Any:
    return lax.cumlogsumexp(x, axis=dim % x.ndim)


for _name, _running in {"cummax": lax.cummax, "cummin": lax.cummin}.items():

    @lowering(f"aten::{_name}.default")
    @on_rows
    def _running_extreme(x: Any, dim: int, _running: Any = _running) -> Any:
        """Return running extremes and their indices, the last of equals; the gradient goes to the indexed element."""
        dim %= x.ndim
        fixed = lax.stop_gradient(x)
        reached = (fixed == _running(fixed, axis=dim)) | jnp.isnan(fixed)
        index = lax.cummax(jnp.where(reached, lax.broadcasted_iota(jnp.int32, x.shape, dim), 0), axis=dim)
        return jnp.take_along_axis(x, index, axis=dim), index


@lowering("aten::kthvalue.default")
@on_rows
def _kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    return _picked(x, lambda index: lax.index_in_dim(index, k - 1, -1), dim, keepdim)


def _picked(x: Any, choose: Callable[[Any], Any], dim: int, keepdim: bool) -> Any:
    """Return the element of each row that `choose` takes from the indices in sorted order, and its index."""
    rows = jnp.moveaxis(x, dim, -1)
    index = choose(jnp.argsort(rows, axis=-1, stable=True))
    value = jnp.take_along_axis(rows, index, axis=-1)
    if not keepdim:
        return value[..., 0], index[..., 0]
    return jnp.moveaxis(value, -1, dim), jnp.moveaxis(index, -1, dim)


for _name, _skips in {"median": False, "nanmedian": True}.items():

    @lowering(f"aten::{_name}.dim")
    @on_rows
    def _median(x: Any, dim: int, keepdim: bool = False, _skips: bool = _skips) -> Any:
        """Return the lower median and its index. Without `_skips`, NaN is the median of what has one."""
        numbers = jnp.sum(~jnp.isnan(jnp.moveaxis(x, dim, -1)), axis=-1, keepdims=True)
        length = x.shape[dim]
        middle = jnp.maximum(numbers - 1, 0) // 2
        at = middle if _skips else jnp.where(numbers < length, numbers, middle)
        return _picked(x, lambda index: jnp.take_along_axis(index, at, axis=-1), dim, keepdim)

    @lowering(f"aten::{_name}.default")
    def _median_of_all(x: Any, _skips: bool = _skips, _median: Any = _median) -> Any:
        """Return the median; equals share the gradient."""
        value = _median(lax.stop_gradient(x).reshape(-1), 0, _skips=_skips)[0]
        same = (x == value) | (jnp.isnan(x) & jnp.isnan(value))
        return value + jnp.sum(jnp.where(same, tangent_of(x) / jnp.sum(same), 0)) if _inexact(x) else value


def _inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


@lowering("aten::mode.default")
@on_rows
def _mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """Return the most frequent value of each row, the least of several, and its last index."""
    rows = jnp.moveaxis(x, dim, -1)
    fixed = lax.stop_gradient(rows)
    equal = fixed[..., :, None] == fixed[..., None, :]
    counts = jnp.sum(equal, axis=-1)
    most = counts == jnp.max(counts, axis=-1, keepdims=True)
    least = jnp.min(jnp.where(most, fixed, jnp.max(fixed, axis=-1, keepdims=True)), axis=-1, keepdims=True)
    index = rows.shape[-1] - 1 - jnp.argmax(jnp.flip(fixed == least, -1), axis=-1, keepdims=True)
    value = jnp.take_along_axis(rows, index, axis=-1)
    if not keepdim:
        return value[..., 0], index[..., 0]
    return jnp.moveaxis(value, -1, dim), jnp.moveaxis(index, -1, dim)


@lowering("aten::histogram.bin_ct")
def _histogram(x: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    low, high = (jnp.min(x), jnp.max(x)) if range is None else range
    even = low == high
    low, high = jnp.where(even, low - 0.5, low), jnp.where(even, high + 0.5, high)
    return _histogram_of(x, _edges(low, high, bins).astype(x.dtype), weight=weight, density=density)


@lowering("aten::histogram.bins_tensor")
def _histogram_of(x: Any, bins: Any, *, weight: Any = None, density: bool = False) -> Any:
    weights = None if weight is None else weight.reshape(-1)
    counted, edges = jnp.histogram(x.reshape(-1), bins, weights=weights, density=density)
    return counted.astype(x.dtype), edges


@lowering("aten::histc.default")
def _histc(x: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count a histogram; bins are half open except the last; values outside are not counted."""
    flat = x.reshape(-1).astype(jnp.promote_types(x.dtype, jnp.float32))
    low, high = (jnp.min(flat), jnp.max(flat)) if min == max else (jnp.asarray(min, flat.dtype), max)
    even = low == high
    edges = _edges(jnp.where(even, low - 1, low), jnp.where(even, high + 1, high), bins)
    at = jnp.searchsorted(edges, flat, side="right") - 1
    at = jnp.where(flat == edges[-1], bins - 1, at)
    counted = (flat >= edges[0]) & (flat <= edges[-1])
    return jnp.zeros(bins, x.dtype).at[jnp.where(counted, at, 0)].add(counted.astype(x.dtype))


def _edges(low: Any, high: Any, bins: int) -> Any:
    """Return evenly spaced edges, each counted from the nearer end, as by `torch.linspace`, to the last bit."""
    step, at = (high - low) / bins, jnp.arange(bins + 1)
    return jnp.where(at < (bins + 1) // 2, low + step * at, high - step * (bins - at))
