"""Ops that look elements up, or put them where an index says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardlib.errors import InputError
from shardlib.jax._table import lowering

__all__: list[str] = []


def _looked_up(x: Any, index: Any) -> Any:
    """Look up indices. Out of bounds gives NaN where the dtype has one: torch raises, which a compiled program
    cannot."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.at[index].get(mode="fill", fill_value=jnp.nan)
    return x.at[index].get(mode="clip")


@lowering("aten::embedding.default")
def _embedding(
    weight: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if scale_grad_by_freq:
        raise InputError("An embedding with scale_grad_by_freq=True has no lowering. Leave the option out.")
    rows = weight.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    if padding_idx < 0:
        return rows
    return jnp.where((ids == padding_idx)[..., None], lax.stop_gradient(rows), rows)


@lowering("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    _refuse_masks(indices)
    return _looked_up(x, tuple(slice(None) if index is None else index for index in indices))


def _refuse_masks(indices: Sequence[Any]) -> None:
    if any(index is not None and index.dtype == bool for index in indices):
        raise InputError(
            "A tensor is indexed by a mask, so that the shape of the result depends on values; a compiled program has "
            "fixed shapes. Use torch.where(mask, x, other)."
        )


@lowering("aten::index_put.default", "aten::_unsafe_index_put.default")
def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    values = values.astype(x.dtype)
    if len(indices) == 1 and indices[0].dtype == bool and values.size == 1:
        mask = indices[0].reshape(*indices[0].shape, *[1] * (x.ndim - indices[0].ndim))
        return jnp.where(mask, x + values.reshape(()) if accumulate else values.reshape(()), x)
    _refuse_masks(indices)
    at = x.at[tuple(slice(None) if index is None else index for index in indices)]
    return at.add(values) if accumulate else at.set(values)


@lowering("aten::index_select.default")
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return _looked_up(x, (*[slice(None)] * (dim % x.ndim), index.reshape(-1)))


@lowering("aten::index_add.default")
def _index_add(x: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> Any:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].add((source * alpha).astype(x.dtype))


@lowering("aten::index_copy.default")
def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(source.astype(x.dtype))


@lowering("aten::gather.default")
def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    return _looked_up(x, _along(index, dim, x.ndim)) if x.ndim else jnp.broadcast_to(x, index.shape)


def _along(index: Any, dim: int, ndim: int) -> tuple[Any, ...]:
    """Return an index with the identity in every other dim; the index may be smaller than the tensor."""
    own = [jnp.arange(n).reshape([-1 if i == d else 1 for i in range(ndim)]) for d, n in enumerate(index.shape)]
    own[dim % ndim] = index
    return tuple(own)


@lowering("aten::scatter.src", "aten::scatter.value")
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_along(index, dim, x.ndim)].set(_for_index(source, index, x))


@lowering("aten::scatter_add.default")
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_along(index, dim, x.ndim)].add(_for_index(source, index, x))


def _for_index(source: Any, index: Any, x: Any) -> Any:
    """Return the part of the source with the index's shape."""
    source = jnp.asarray(source, x.dtype)
    return source[tuple(slice(n) for n in index.shape)] if source.ndim else source


@lowering("aten::one_hot.default")
def _one_hot(x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise InputError("one_hot() without num_classes depends on the values; say how many classes there are.")
    return (x[..., None] == jnp.arange(num_classes)).astype(x.dtype)


@lowering("aten::bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")
