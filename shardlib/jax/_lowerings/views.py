"""Ops that move elements without computing: in JAX nothing is a view, and a new array says the same."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.errors import InputError
from shardlib.jax._dtypes import as_dtype, promote
from shardlib.jax._table import lowering

__all__ = ["concrete", "on_rows"]

F = TypeVar("F", bound=Callable[..., Any])


def concrete(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Return a shape with its -1, if any, replaced by the inferred size.

    >>> concrete((2, -1), 6)
    (2, 3)
    """
    known = math.prod(size for size in shape if size != -1)
    return tuple(count // known if size == -1 else size for size in shape)


def on_rows(function: F) -> F:
    """Let a function along a dim take a tensor without dims as a row of one element."""

    @functools.wraps(function)
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.ndim:
            return function(x, *args, **kwargs)
        result = function(x.reshape(1), *args, **kwargs)
        return tuple(each.reshape(()) for each in result) if isinstance(result, tuple) else result.reshape(())

    return run  # type: ignore[return-value]


@lowering("aten::view.default", "aten::_unsafe_view.default", "aten::reshape.default")
def _view(x: Any, shape: Sequence[int]) -> Any:
    return x.reshape(concrete(shape, x.size))


@lowering("aten::flatten.using_ints")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % max(x.ndim, 1), end_dim % max(x.ndim, 1)
    return x.reshape(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])


@lowering("aten::unflatten.int")
def _unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Any:
    dim %= x.ndim
    return x.reshape(*x.shape[:dim], *concrete(sizes, x.shape[dim]), *x.shape[dim + 1 :])


@lowering("aten::transpose.int")
def _transpose(x: Any, dim0: int, dim1: int) -> Any:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@lowering("aten::t.default", "aten::numpy_T.default")
def _t(x: Any) -> Any:
    return x.T


@lowering("aten::mT.default")
def _mt(x: Any) -> Any:
    return jnp.swapaxes(x, -1, -2)


@lowering("aten::permute.default")
def _permute(x: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(x, tuple(dims))


@lowering("aten::movedim.intlist")
def _movedim(x: Any, source: Sequence[int], destination: Sequence[int]) -> Any:
    return jnp.moveaxis(x, tuple(source), tuple(destination))


@lowering("aten::unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    return jnp.expand_dims(x, dim)


@lowering("aten::squeeze.default")
def _squeeze_all(x: Any) -> Any:
    return jnp.squeeze(x)


@lowering("aten::squeeze.dim", "aten::squeeze.dims")
def _squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    """Squeeze dims; those of another size than one stay."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return jnp.squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1)) if x.ndim else x


@lowering("aten::expand.default")
def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Any:
    new = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - new] if n == -1 else n for i, n in enumerate(size)])


@lowering("aten::expand_as.default")
def _expand_as(x: Any, other: Any) -> Any:
    return jnp.broadcast_to(x, other.shape)


@lowering("aten::repeat.default")
def _repeat(x: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(x, tuple(repeats))


@lowering("aten::repeat_interleave.self_int")
def _repeat_interleave(x: Any, repeats: int, dim: int | None = None, output_size: int | None = None) -> Any:
    if dim is None:
        x, dim = x.reshape(-1), 0
    dim %= x.ndim
    spread = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]))
    return spread.reshape(*x.shape[:dim], x.shape[dim] * repeats, *x.shape[dim + 1 :])


@lowering("aten::cat.default", "aten::concatenate.default")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate; empty one-dimensional tensors are skipped, as in torch."""
    return jnp.concatenate(promote(*[t for t in tensors if t.shape != (0,)] or tensors[:1]), axis=dim)


@lowering("aten::stack.default")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return jnp.stack(promote(*tensors), axis=dim)


@lowering("aten::split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    length = x.shape[dim]
    return tuple(_piece(x, at, min(at + size, length), dim) for at in range(0, max(length, 1), max(size, 1)))


@lowering("aten::split_with_sizes.default", "aten::split_with_sizes_copy.default")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(_piece(x, end - size, end, dim) for size, end in zip(sizes, ends, strict=True))


@lowering("aten::chunk.default")
def _chunk(x: Any, chunks: int, dim: int = 0) -> Any:
    return _split(x, -(-x.shape[dim] // chunks), dim)


def _piece(x: Any, start: int, stop: int, dim: int) -> Any:
    return lax.slice_in_dim(x, start, stop, axis=dim)


@lowering("aten::unbind.int")
def _unbind(x: Any, dim: int = 0) -> Any:
    return tuple(_select(x, dim, i) for i in range(x.shape[dim]))


@lowering("aten::select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(x, index % x.shape[dim], dim, keepdims=False)


@lowering("aten::slice.Tensor")
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return x[_at(x, dim, start, end, step)]


def _at(x: Any, dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    end = None if end == sys.maxsize else end  # torch's way to say "to the end", of a symbolic dim too
    return (*[slice(None)] * (dim % x.ndim), slice(start, end, step))


@lowering("aten::narrow.default")
def _narrow(x: Any, dim: int, start: int, length: int) -> Any:
    return _piece(x, start % x.shape[dim] if start < 0 else start, start + length, dim)


@lowering("aten::slice_scatter.default")
def _slice_scatter(
    x: Any, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return x.at[_at(x, dim, start, end, step)].set(source.astype(x.dtype))


@lowering("aten::select_scatter.default")
def _select_scatter(x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(source.astype(x.dtype))


@lowering("aten::diagonal_scatter.default")
def _diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    own = jnp.diagonal(jnp.arange(x.size).reshape(x.shape), offset, dim1, dim2)
    return x.reshape(-1).at[own].set(source.astype(x.dtype)).reshape(x.shape)


@lowering("aten::flip.default")
def _flip(x: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(x, tuple(dims))


@lowering("aten::roll.default")
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x, shifts[0])


@lowering("aten::tril.default")
def _tril(x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowering("aten::triu.default")
def _triu(x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lowering("aten::diagonal.default")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


@lowering("aten::unfold.default")
def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    if not x.ndim:
        return x.reshape(1)[:size]
    dim %= x.ndim
    starts = jnp.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


_PADS = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@lowering("aten::pad.default")
def _pad(x: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode == "constant":
        return _constant_pad(x, pad, value or 0)
    widths = _widths(x, pad)
    padded = jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in widths], mode=_PADS[mode])
    return lax.pad(padded, jnp.zeros((), x.dtype), [(min(low, 0), min(high, 0), 0) for low, high in widths])


@lowering("aten::constant_pad_nd.default")
def _constant_pad(x: Any, pad: Sequence[int], value: float = 0) -> Any:
    """Pad with a constant; negative widths crop."""
    widths = [(low, high, 0) for low, high in _widths(x, pad)]
    return lax.pad(x, jnp.asarray(value, x.dtype), widths)


def _widths(x: Any, pad: Sequence[int]) -> list[tuple[int, int]]:
    """Return the widths of each dim; torch lists pairs from the last dim on."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]


@lowering("aten::view.dtype")
def _view_dtype(x: Any, dtype: Any) -> Any:
    """View the bits as another dtype, without a gradient; the last dim grows or shrinks with the size of numbers."""
    own, new = x.dtype, as_dtype(dtype)
    if np.bool_ in (own, new) or any(jnp.issubdtype(each, jnp.complexfloating) for each in (own, new)):
        raise InputError(f"A tensor of {own} is viewed as {dtype}, bit by bit, for which JAX has no op. Use .to().")
    x = lax.stop_gradient(x)
    if own.itemsize < new.itemsize:
        x = x.reshape(*x.shape[:-1], -1, new.itemsize // own.itemsize)
    y = lax.bitcast_convert_type(x, new)
    return y.reshape(*y.shape[:-2], -1) if own.itemsize > new.itemsize else y
