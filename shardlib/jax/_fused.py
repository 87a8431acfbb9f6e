"""Values whose fused dims are kept as several dims, one for each factor or run of factors.

A fused layout such as `(qkv heads@tp head) embed` has no `PartitionSpec`: its pieces are not one run of the dim. The
engine therefore keeps such a tensor with the dim in parts, `(qkv) (heads head)@tp (embed)`, which is the same memory
under another shape, and hands the parts on for as long as ops allow: a product with the weight has them as dims of its
own, splitting q, k and v is an index, a view that names the heads is a reshape. So a fused projection costs no
communication. An op without support for parts gets the unfused value: correct, with a permutation where it is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from shardlib.jax._lowerings.views import concrete
from shardlib.jax._table import Lowering

__all__ = ["Fused", "call", "unfused", "with_parts"]

Parts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Fused:
    """An array whose dims are the parts of the dims of the tensor that it stands for.

    Attributes:
        array: an array of shape `parts`, flattened.
        parts: for each dim of the tensor the sizes of its parts, outermost first.
    """

    array: Any
    parts: Parts

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(sizes) for sizes in self.parts)

    @property
    def ndim(self) -> int:
        return len(self.parts)

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def unfused(value: Any) -> Any:
    """Return the tensor of a value with parts; anything else unchanged."""
    return value.array.reshape(value.shape) if isinstance(value, Fused) else value


def _fused(array: Any, dims: Sequence[Sequence[int]]) -> Any:
    """Return an array with parts, if a dim has several."""
    parts = tuple(tuple(sizes) for sizes in dims)
    flat = array.reshape([size for sizes in parts for size in sizes])
    return Fused(flat, parts) if any(len(sizes) > 1 for sizes in parts) else flat


def call(op: str, known: Lowering, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a lowering on operands of which some have parts."""
    result = _elementwise(known, args, kwargs) if known.elementwise else NotImplemented
    if result is NotImplemented and op in _WITH_PARTS:
        result = _WITH_PARTS[op](*args, **kwargs)
    if result is NotImplemented:
        result = known.function(*map(_whole_tree, args), **{k: _whole_tree(v) for k, v in kwargs.items()})
    return result


def _whole_tree(value: Any) -> Any:
    return [unfused(v) for v in value] if isinstance(value, list | tuple) else unfused(value)


# --- ops that compute each element by itself ------------------------------------------------------------------------


def _elementwise(known: Lowering, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an elementwise lowering on operands with the same parts, dims aligned from the last one."""
    operands = [a for a in (*args, *kwargs.values()) if isinstance(a, Fused) or hasattr(a, "ndim")]
    parts = _common_parts(operands)
    if parts is None:
        return NotImplemented
    cut = [_in_parts(a, parts) for a in args]
    return _fused(known.function(*cut, **{k: _in_parts(v, parts) for k, v in kwargs.items()}), parts)


def _common_parts(operands: Sequence[Any]) -> Parts | None:
    """Return the parts of each dim of the result, or None where operands disagree."""
    ndim = max(operand.ndim for operand in operands)
    found: list[tuple[int, ...]] = []
    for dim in range(-ndim, 0):
        sizes = {_parts_of(o)[dim] for o in operands if o.ndim >= -dim and o.shape[dim] != 1}
        several = {each for each in sizes if len(each) > 1}
        if len(several) > 1:
            return None
        found.append(several.pop() if several else sizes.pop() if sizes else (1,))
    return tuple(found)


def _parts_of(value: Any) -> Parts:
    return value.parts if isinstance(value, Fused) else tuple((size,) for size in value.shape)


def _in_parts(value: Any, parts: Parts) -> Any:
    if not (isinstance(value, Fused) or hasattr(value, "ndim")) or value.ndim == 0:
        return value
    array = value.array if isinstance(value, Fused) else value
    own = parts[len(parts) - value.ndim :]
    ones = [(1,) * len(sizes) if n == 1 else sizes for n, sizes in zip(value.shape, own, strict=True)]
    return array.reshape([size for sizes in ones for size in sizes])


# --- ops that hand parts on -----------------------------------------------------------------------------------------

_WITH_PARTS: dict[str, Callable[..., Any]] = {}


def with_parts(*ops: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of an op that takes operands with parts, or returns NotImplemented."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _WITH_PARTS.update(dict.fromkeys(ops, function))
        return function

    return register


@with_parts("aten::linear.default")
def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return _product(x, _transposed(weight), bias) if weight.ndim == 2 else NotImplemented


@with_parts("aten::mm.default", "aten::matmul.default", "aten::bmm.default")
def _matmul(a: Any, b: Any) -> Any:
    return _product(a, b, None) if b.ndim == 2 else _batched(a, b)


@with_parts("aten::addmm.default")
def _addmm(x: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _product(a, b, x) if beta == alpha == 1 else NotImplemented


def _product(x: Any, weight: Any, bias: Any) -> Any:
    """Compute `(..., in) @ (in, out) + (out)`, whose dim `out` has the weight's parts; contracted dims have one
    part."""
    x_parts, (ins, outs) = _parts_of(x), _parts_of(weight)
    if len(ins) > 1 or len(x_parts[-1]) > 1:
        return NotImplemented
    y = jnp.tensordot(_array(x), _array(weight), 1)
    if bias is not None:
        if bias.ndim != 1 or _parts_of(bias)[-1] not in (outs, (math.prod(outs),)):
            return NotImplemented
        y = y + _array(bias).reshape(outs)
    return _fused(y, (*x_parts[:-1], outs))


def _batched(a: Any, b: Any) -> Any:
    """Compute `(batch, rows, in) @ (batch, in, out)`, either side with parts in a dim that is not contracted."""
    if a.ndim != 3 or b.ndim != 3:
        return NotImplemented
    (batch, rows, left), (_, right, outs) = _parts_of(a), _parts_of(b)
    if any(len(sizes) > 1 for sizes in (batch, left, right)):
        return NotImplemented
    a, b = _array(a), _array(b)
    flat_rows, flat_outs = tuple("ijkl"[: len(rows)]), tuple("wxyz"[: len(outs)])
    equation = f"b{''.join(flat_rows)}c,bc{''.join(flat_outs)}->b{''.join(flat_rows)}{''.join(flat_outs)}"
    return _fused(jnp.einsum(equation, a, b), (batch, rows, outs))


def _array(value: Any) -> Any:
    return value.array if isinstance(value, Fused) else value


@with_parts("aten::t.default", "aten::mT.default")
def _transposed(x: Any) -> Any:
    return _permuted(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


@with_parts("aten::transpose.int")
def _transpose(x: Any, dim0: int, dim1: int) -> Any:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(x, order)


@with_parts("aten::permute.default")
def _permuted(x: Any, dims: Sequence[int]) -> Any:
    if not isinstance(x, Fused):
        return jnp.transpose(x, tuple(dims))
    dims = [dim % x.ndim for dim in dims]
    flat = [at for dim in dims for at in _flat_dims(x, dim)]
    return _fused(jnp.transpose(x.array, flat), [x.parts[dim] for dim in dims])


def _flat_dims(x: Fused, dim: int) -> range:
    """Return the dims of the array that are the parts of a dim."""
    first = sum(len(sizes) for sizes in x.parts[:dim])
    return range(first, first + len(x.parts[dim]))


@with_parts("aten::view.default", "aten::_unsafe_view.default", "aten::reshape.default")
def _view(x: Any, shape: Sequence[int]) -> Any:
    """View a tensor. The array has the tensor's order of elements, so any view is a reshape of the array.

    A trailing dim that the view leaves alone keeps its parts.
    """
    shape = concrete(shape, x.size)
    parts: list[tuple[int, ...]] = [(size,) for size in shape]
    for back in range(1, min(x.ndim, len(shape)) + 1):
        if x.shape[-back] != shape[-back]:
            break
        parts[-back] = x.parts[-back]
    return _fused(x.array, parts)


@with_parts("aten::split.Tensor")
def _split(x: Any, size: int, dim: int = 0) -> Any:
    length = x.shape[dim]
    ends = [min(at + size, length) for at in range(0, length, size)]
    return _split_with_sizes(x, [end - start for start, end in zip([0, *ends], ends, strict=False)], dim)


@with_parts("aten::split_with_sizes.default")
def _split_with_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    dim %= x.ndim
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    pieces = [_run(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else tuple(pieces)


@with_parts("aten::slice.Tensor")
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, _ = slice(start, end).indices(x.shape[dim])
    return _run(x, dim % x.ndim, first, last) if step == 1 else NotImplemented


def _run(x: Fused, dim: int, start: int, stop: int) -> Any:
    """Slice a dim between two of its outermost parts."""
    inner = x.parts[dim][1:]
    each = math.prod(inner)
    if start % each or stop % each:
        return NotImplemented
    at = (*[slice(None)] * _flat_dims(x, dim).start, slice(start // each, stop // each))
    count = (stop - start) // each
    own = inner if count == 1 and inner else (count, *inner)
    return _fused(x.array[at], [*x.parts[:dim], own, *x.parts[dim + 1 :]])


@with_parts("aten::select.int")
def _select(x: Any, dim: int, index: int) -> Any:
    dim %= x.ndim
    if len(x.parts[dim]) > 1:
        return NotImplemented
    flat = x.array[(*[slice(None)] * _flat_dims(x, dim).start, index)]
    return _fused(flat, [*x.parts[:dim], *x.parts[dim + 1 :]])


@with_parts("aten::unsqueeze.default")
def _unsqueeze(x: Any, dim: int) -> Any:
    at = dim % (x.ndim + 1)
    return _fused(x.array, [*x.parts[:at], (1,), *x.parts[at:]])


@with_parts("aten::squeeze.dim")
def _squeeze(x: Any, dim: int) -> Any:
    at = dim % x.ndim
    return x if x.shape[at] != 1 else _fused(x.array, [*x.parts[:at], *x.parts[at + 1 :]])


@with_parts("aten::index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Any:
    """Index the first dim, as for one expert's weights."""
    if len(indices) != 1 or not isinstance(x, Fused) or len(x.parts[0]) > 1 or indices[0].dtype == bool:
        return NotImplemented
    index = unfused(indices[0])
    return _fused(x.array.at[index].get(mode="clip"), [*((n,) for n in index.shape), *x.parts[1:]])
