"""Ops with index tensors: dims that are not indexed may be sharded, and so may the indices.

Partial sums pass through, since reading and adding elements is linear in their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from shardlib.engine.ops._rows import Call, Meta, P, R, Row, S, aten, row, rule

__all__: list[str] = []


# --- x[i, j]: an index tensor, or none, for each leading dim ------------------------------------------------------


@rule(aten("index.Tensor"), empty=True)
def index(call: Call) -> Iterable[Row]:
    """Shard self, indices... -> self[indices]."""
    indices, indexed = call.inputs[1:], _Indexed(call)
    replicated = [R] * len(indices)
    for dim, out in indexed.kept():
        yield row([S(out)], [S(dim), *replicated])
    yield row([P], [P, *replicated])
    for at, size in enumerate(indexed.shape):
        if size > 1:
            yield row([S(indexed.first + at)], [R, *(_along(meta, at, indexed.shape) for meta in indices)])


@rule(*map(aten, ("index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put")), empty=True)
def index_put(call: Call) -> Iterable[Row]:
    """Shard self, indices..., values -> self with values written or added at the indices."""
    (_, *indices, values) = call.inputs
    if any(meta.dtype in (torch.bool, torch.uint8) for meta in indices):
        return
    indexed = _Indexed(call)
    replicated = [R] * len(indices)
    ndim = indexed.first + len(indexed.shape) + indexed.behind
    for dim, out in indexed.kept():
        own = out - (ndim - values.ndim)
        split = own >= 0 and values.shape[own] == call.inputs[0].shape[dim]
        if split or own < 0 or values.shape[own] == 1:
            yield row([S(dim)], [S(dim), *replicated, S(own) if split else R])
    if call["accumulate"]:
        yield row([P], [P, *replicated, P], partition=True)


class _Indexed:
    """The dims of `x[indices]`.

    Attributes:
        shape: shape of the index tensors, broadcast against each other.
        first: their first dim in the result: 0 if a kept dim lies between indexed dims.
        behind: the number of kept dims after them.
    """

    def __init__(self, call: Call) -> None:
        self.ndim = call.inputs[0].ndim
        self.indexed = [dim for dim, given in enumerate(call["indices"]) if given is not None]
        given = [meta for meta, name in zip(call.inputs, call.names, strict=True) if name == "indices"]
        self.shape = _broadcast(given)
        adjacent = self.indexed == list(range(self.indexed[0], self.indexed[-1] + 1))
        self.first = self.indexed[0] if adjacent else 0
        self.behind = self.ndim - len(self.indexed) - self.first

    def kept(self) -> Iterator[tuple[int, int]]:
        """Yield (dim, dim of the result) for each dim that is not indexed."""
        rest = [dim for dim in range(self.ndim) if dim not in self.indexed]
        for at, dim in enumerate(rest):
            yield dim, at if at < self.first else at + len(self.shape)


def _broadcast(metas: Sequence[Meta]) -> tuple[int, ...]:
    ndim = max(meta.ndim for meta in metas)
    padded = [(1,) * (ndim - meta.ndim) + meta.shape for meta in metas]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def _along(meta: Meta, dim: int, shape: tuple[int, ...]) -> Placement:
    own = dim - (len(shape) - meta.ndim)
    return S(own) if own >= 0 and meta.shape[own] == shape[dim] else R


# --- one dim, one index vector ------------------------------------------------------------------------------------


@rule(aten("index_select"), empty=True)
def index_select(call: Call) -> Iterable[Row]:
    """Shard self, index -> the slices of self at indices of one dim."""
    for dim in _others(call):
        yield row([S(dim)], [S(dim), R])
    if call.inputs[0].ndim and call.inputs[1].ndim:
        yield row([S(call.dim())], [R, S(0)])
    yield row([P], [P, R])


@rule(aten("index_add"), aten("index_add_"), empty=True)
def index_add(call: Call) -> Iterable[Row]:
    """Shard self, index, source -> self with the slices of source added at indices of one dim."""
    for dim in _others(call):
        yield row([S(dim)], [S(dim), R, S(dim)])
    yield row([P], [P, R, P], partition=True)


# --- one index for each element -----------------------------------------------------------------------------------


@rule(aten("gather"), empty=True)
def gather(call: Call) -> Iterable[Row]:
    """Shard self, index -> self's elements at the indices of one dim."""
    for dim in _aligned(call):
        yield row([S(dim)], [S(dim), S(dim)])
    if call.inputs[0].ndim and call.inputs[1].ndim:
        yield row([S(call.dim())], [R, S(call.dim())])
    yield row([P], [P, R])


@rule(aten("scatter_add"), aten("scatter_add_"), empty=True)
def scatter_add(call: Call) -> Iterable[Row]:
    """Shard self, index, src -> self with the elements of src added at the indices of one dim."""
    for dim in _aligned(call):
        yield row([S(dim)], [S(dim)] * 3)
    yield row([P], [P, R, P], partition=True)


def _others(call: Call) -> list[int]:
    ndim = call.inputs[0].ndim
    return [dim for dim in range(ndim) if dim != call.dim()]


def _aligned(call: Call, *others: Meta) -> list[int]:
    """Return the dims in which others (by default all) are as long as the first: other shards would not align."""
    first: Any = call.inputs[0].shape
    return [d for d in _others(call) if all(m.ndim > d and m.shape[d] == first[d] for m in others or call.inputs)]


@rule(*map(aten, ("scatter.src", "scatter_.src", "scatter_reduce.two", "scatter_reduce_.two")), empty=True)
@rule(aten("scatter.value"), aten("scatter_.value"), empty=True)
def scatter(call: Call) -> Iterable[Row]:
    """Shard self, index [, src] -> self with the elements of src, or a value, written at the indices of one dim."""
    for dim in _aligned(call):
        yield row([S(dim)], [S(dim)] * len(call.inputs))


@rule(aten("index_copy"), aten("index_copy_"), aten("index_reduce"), aten("index_reduce_"), empty=True)
def index_copy(call: Call) -> Iterable[Row]:
    """Shard self, index, source -> self with slices of one dim replaced by (or reduced with) those of source."""
    for dim in _aligned(call, call.inputs[2]):
        yield row([S(dim)], [S(dim), R, S(dim)])


@rule(*map(aten, ("index_fill.int_Scalar", "index_fill_.int_Scalar")), empty=True)
@rule(*map(aten, ("index_fill.int_Tensor", "index_fill_.int_Tensor")), empty=True)
def index_fill(call: Call) -> Iterable[Row]:
    """Shard self, index [, value] -> self with a number at the indices of one dim."""
    for dim in _others(call):
        yield row([S(dim)], [S(dim)] + [R] * (len(call.inputs) - 1))


@rule(aten("bucketize.Tensor"), aten("isin.Tensor_Tensor"), empty=True)
def looked_up(call: Call) -> Iterable[Row]:
    """Shard self, boundaries or elements -> the bucket of each element of self, or whether it is an element."""
    for dim in range(call.inputs[0].ndim):
        yield row([S(dim)], [S(dim), R])


@rule(aten("take"), empty=True)
def take(call: Call) -> Iterable[Row]:
    """Shard self, index -> elements of the flattened self."""
    for dim in range(call.inputs[1].ndim):
        yield row([S(dim)], [R, S(dim)])
    yield row([P], [P, R])


@rule(aten("repeat"), empty=True)
def repeat(call: Call) -> Iterable[Row]:
    """Shard the dims that are not repeated."""
    (meta,), repeats = call.inputs, call["repeats"]
    new = len(repeats) - meta.ndim
    for dim in range(meta.ndim):
        if repeats[dim + new] == 1:
            yield row([S(dim + new)], [S(dim)])
    yield row([P], [P])
