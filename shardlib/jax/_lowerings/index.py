"""Ops that look elements up, or put them where an index says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.errors import InputError
from shardlib.jax._lowerings.gradients import scale_gradient, tangent_of
from shardlib.jax._lowerings.views import on_rows
from shardlib.jax._table import lowering

__all__ = ["put_at"]


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
    rows = weight.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    if scale_grad_by_freq:
        rows = scale_gradient(rows, 1 / _frequencies(ids, weight)[..., None])
    if padding_idx < 0:
        return rows
    return jnp.where((ids == padding_idx)[..., None], lax.stop_gradient(rows), rows)


def _frequencies(ids: Any, weight: Any) -> Any:
    """Return for each id how often it stands there."""
    return jnp.zeros(weight.shape[0], weight.dtype).at[ids.reshape(-1)].add(1)[ids]


@lowering("aten::_embedding_bag.default", "aten::_embedding_bag_forward_only.default")
def _embedding_bag(
    weight: Any,
    ids: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Return the sum, mean or maximum of each bag's rows; what torch's backward reads beside it is not computed."""
    if scale_grad_by_freq:  # torch (2.13) divides by the frequencies of other ids where one repeats
        raise InputError("An embedding_bag with scale_grad_by_freq=True has no lowering. Leave the option out.")
    count = offsets.shape[0] - include_last_offset
    bags = jnp.searchsorted(offsets[:count], jnp.arange(ids.shape[0]), side="right") - 1
    rows = _embedding(weight, ids)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    kept = jnp.ones(ids.shape, bool) if padding_idx < 0 else ids != padding_idx
    bags = jnp.where(kept, bags, count)  # what is out of bounds is dropped
    sizes = jnp.zeros(count, rows.dtype).at[bags].add(1, mode="drop")[:, None]
    if mode == 2:
        return _largest(rows, bags, sizes), None, None, None
    total = jnp.zeros((count, rows.shape[1]), rows.dtype).at[bags].add(rows, mode="drop")
    return total / jnp.maximum(sizes, 1) if mode == 1 else total, None, None, None


def _largest(rows: Any, bags: Any, sizes: Any) -> Any:
    """Return the maximum of each bag; the gradient goes to the first of equals."""
    shape = (sizes.shape[0], rows.shape[1])
    fixed = lax.stop_gradient(rows)
    largest = jnp.full(shape, -jnp.inf, rows.dtype).at[bags].max(fixed, mode="drop")
    own = largest.at[bags].get(mode="fill", fill_value=jnp.nan)
    place = jnp.where(fixed == own, jnp.arange(rows.shape[0])[:, None], rows.shape[0])
    first = jnp.full(shape, rows.shape[0]).at[bags].min(place, mode="drop")
    return jnp.where(sizes > 0, jnp.take_along_axis(rows, first, axis=0, mode="fill", fill_value=0), 0)


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
    at = tuple(slice(None) if index is None else index for index in indices)
    return x.at[at].add(values) if accumulate else put_at(x, at, values)


@lowering("aten::index_select.default")
@on_rows
def _index_select(x: Any, dim: int, index: Any) -> Any:
    return _looked_up(x, (*[slice(None)] * (dim % x.ndim), index.reshape(-1)))


@lowering("aten::index_add.default")
@on_rows
def _index_add(x: Any, dim: int, index: Any, source: Any, alpha: float = 1) -> Any:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].add((source * alpha).astype(x.dtype))


@lowering("aten::index_copy.default")
@on_rows
def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
    return put_at(x, (*[slice(None)] * (dim % x.ndim), index), source)


@lowering("aten::gather.default")
def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    return _looked_up(x, _along(index, dim, x.ndim)) if x.ndim else jnp.broadcast_to(x, index.shape)


def _along(index: Any, dim: int, ndim: int) -> tuple[Any, ...]:
    """Return an index with the identity in every other dim; the index may be smaller than the tensor."""
    if not ndim:
        return ()
    own = [jnp.arange(n).reshape([-1 if i == d else 1 for i in range(ndim)]) for d, n in enumerate(index.shape)]
    own[dim % ndim] = index
    return tuple(own)


@lowering("aten::scatter.src", "aten::scatter.value")
def _scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    return put_at(x, _along(index, dim, x.ndim), _for_index(source, index, x))


@lowering("aten::scatter_add.default")
def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return x.at[_along(index, dim, x.ndim)].add(_for_index(source, index, x))


@lowering("aten::scatter_reduce.two")
def _scatter_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    return _reduced_at(x, _along(index, dim, x.ndim), _for_index(source, index, x), reduce, include_self)


@lowering("aten::index_reduce.default")
@on_rows
def _index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    at = (*[slice(None)] * (dim % x.ndim), index)
    return _reduced_at(x, at, source.astype(x.dtype), reduce, include_self)


def _neutral(reduce: str, dtype: Any) -> Any:
    """Return the number that a reduction begins with."""
    if reduce in ("amax", "amin"):
        low = reduce == "amax"
        if jnp.issubdtype(dtype, jnp.inexact):
            return jnp.asarray(-jnp.inf if low else jnp.inf, dtype)
        return not low if dtype == np.bool_ else (jnp.iinfo(dtype).min if low else jnp.iinfo(dtype).max)
    return jnp.asarray(reduce == "prod", dtype)


def _reduced_at(x: Any, at: Any, source: Any, reduce: str, include_self: bool) -> Any:
    """Reduce a source into the places of an index, which may come several times."""
    given = x
    if not include_self:
        x = x.at[at].set(_neutral(reduce, x.dtype))
    if reduce == "sum":
        return x.at[at].add(source)
    if reduce == "mean":
        count = jnp.maximum(jnp.full(x.shape, int(include_self)).at[at].add(1), 1)
        total = x.at[at].add(source)
        return total / count.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else total // count
    if reduce == "prod":
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x.at[at].multiply(source)
        places, arrays = _apart(at)
        return _product_at(places, x, jnp.broadcast_to(source, jnp.shape(x[at])), *arrays)
    return _extreme_at(x, at, source, reduce, given)


def _extreme_at(x: Any, at: Any, source: Any, reduce: str, given: Any) -> Any:
    """Return extremes; equals share the gradient, among them what was given, even if it is left out, as in torch."""
    fixed, moved = lax.stop_gradient(x), lax.stop_gradient(source)
    value = fixed.at[at].max(moved) if reduce == "amax" else fixed.at[at].min(moved)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return value
    own, from_source = lax.stop_gradient(given) == value, moved == value[at]
    shares = own.astype(x.dtype).at[at].add(from_source.astype(x.dtype))
    gradient = jnp.where(own, tangent_of(x), 0).at[at].add(jnp.where(from_source, tangent_of(source), 0))
    return value + gradient / jnp.maximum(shares, 1)


# An index comes apart into its arrays, and into which of its places are arrays: custom derivatives take the second as a
# constant.
_Places = tuple[bool, ...]


def _apart(at: Any) -> tuple[_Places, tuple[Any, ...]]:
    at = at if isinstance(at, tuple) else (at,)
    return tuple(not isinstance(each, slice) for each in at), tuple(each for each in at if not isinstance(each, slice))


def _together(places: _Places, arrays: Sequence[Any]) -> tuple[Any, ...]:
    given = iter(arrays)
    return tuple(next(given) if is_array else slice(None) for is_array in places)


def put_at(x: Any, at: Any, source: Any) -> Any:
    """Return `x` with the source in the places of an index; several sources of one place have each its gradient.

    So it is in torch. JAX's own gives the gradient to the one whose value is there.
    """
    places, arrays = _apart(at)
    shape = jnp.shape(x[_together(places, arrays)])
    return _put_at(places, x, jnp.broadcast_to(jnp.asarray(source, x.dtype), shape), *arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _put_at(places: _Places, x: Any, source: Any, *arrays: Any) -> Any:
    return x.at[_together(places, arrays)].set(source)


@_put_at.defjvp
def _put_at_jvp(places: _Places, primals: Any, tangents: Any) -> Any:
    (x, source, *arrays), (x_dot, source_dot, *_) = primals, tangents
    at = _together(places, arrays)
    replaced = jnp.zeros(x.shape, bool).at[at].set(True)
    return _put_at(places, x, source, *arrays), jnp.where(replaced, 0, x_dot).at[at].add(source_dot)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product_at(places: _Places, x: Any, source: Any, *arrays: Any) -> Any:
    """Return products, with a gradient also where an index repeats, for which JAX has none."""
    return x.at[_together(places, arrays)].multiply(source)


@_product_at.defjvp
def _product_at_jvp(places: _Places, primals: Any, tangents: Any) -> Any:
    """Each factor's derivative is the product of the others: of all that are not zero, if no other one is."""
    (x, source, *arrays), (x_dot, source_dot, *_) = primals, tangents
    at = _together(places, arrays)
    zeros = (x == 0).astype(jnp.int32).at[at].add((source == 0).astype(jnp.int32))
    nonzero_x, nonzero = (jnp.where(each == 0, 1, each) for each in (x, source))
    nonzeros = _product_at(places, nonzero_x, nonzero, *arrays)

    def others(factor: Any, nonzero_factor: Any, zeros: Any, product: Any) -> Any:
        return jnp.where(zeros - (factor == 0) == 0, product / nonzero_factor, 0)

    of_x = x_dot * others(x, nonzero_x, zeros, nonzeros)
    of_source = source_dot * others(source, nonzero, zeros[at], nonzeros[at])
    return _product_at(places, x, source, *arrays), of_x.at[at].add(of_source)


def _for_index(source: Any, index: Any, x: Any) -> Any:
    """Return the part of the source with the index's shape."""
    source = jnp.asarray(source, x.dtype)
    if not x.ndim:
        return source.reshape(())
    return source[tuple(slice(n) for n in index.shape)] if source.ndim else source


@lowering("aten::take.default")
def _take(x: Any, index: Any) -> Any:
    return _looked_up(x.reshape(-1), index)


@lowering("aten::put.default")
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    flat, at, source = x.reshape(-1), index.reshape(-1), source.reshape(-1).astype(x.dtype)
    return (flat.at[at].add(source) if accumulate else put_at(flat, at, source)).reshape(x.shape)


@lowering("aten::masked_scatter.default")
def _masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """Replace elements where the mask is true, in order, by those of the source."""
    x, mask = jnp.broadcast_arrays(x, mask)
    nth = jnp.cumsum(mask.reshape(-1)).reshape(mask.shape) - 1
    return jnp.where(mask, source.reshape(-1).at[nth].get(mode="clip", wrap_negative_indices=False), x)


@lowering("aten::searchsorted.Tensor")
def _searchsorted(
    boundaries: Any, x: Any, *, out_int32: bool = False, right: bool = False, side: Any = None, sorter: Any = None
) -> Any:
    if sorter is not None:
        boundaries = jnp.take_along_axis(boundaries, sorter, axis=-1)
    search = functools.partial(jnp.searchsorted, side=side or ("right" if right else "left"))
    if boundaries.ndim == 1:
        return search(boundaries, x)
    rows = jax.vmap(search)(boundaries.reshape(-1, boundaries.shape[-1]), x.reshape(-1, x.shape[-1]))
    return rows.reshape(x.shape)


@lowering("aten::searchsorted.Scalar")
def _searchsorted_number(boundaries: Any, x: Any, **options: Any) -> Any:
    return _searchsorted(boundaries, jnp.asarray(x), **options)


@lowering("aten::bucketize.Scalar")
def _bucketize_number(x: Any, boundaries: Any, **options: Any) -> Any:
    return _searchsorted(boundaries, jnp.asarray(x), **options)


@lowering("aten::one_hot.default")
def _one_hot(x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise InputError("one_hot() without num_classes depends on the values; say how many classes there are.")
    return (x[..., None] == jnp.arange(num_classes)).astype(x.dtype)


@lowering("aten::bucketize.Tensor")
def _bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")
