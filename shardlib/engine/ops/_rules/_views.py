"""Views, and what views need in backward.

A split of a tensor along one mesh axis of n ranks reads, on the flat elements of a dim, as (k, n, m): the axis's
ranks take turns of m elements, k times over. `Shard` is k = 1, a fused `_StridedShard` k = its split factor. A view
regroups neighbouring dims, so that the same (k, n, m) is looked for in one of the new dims; where it is there, the
view costs nothing. This is what makes `(qkv heads head)` split over heads come out of `view(B, T, 3, heads, head)`
as a plain split of `heads`, and a split sequence dim survive `view(B * T, C)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from shardlib.engine._torch import _StridedShard
from shardlib.engine.ops._rows import ANY, Call, Local, Op, P, R, Row, S, aten, normal_dim, row, rule

__all__: list[str] = []


def _split(dim: int, turns: int) -> Placement:
    """The placement whose (k, n, m) has k = turns."""
    return S(dim) if turns == 1 else _StridedShard(dim, split_factor=turns)


def _turns(placement: Any) -> int:
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _is_split(placement: Any) -> TypeGuard[Shard | _StridedShard]:
    return isinstance(placement, Shard | _StridedShard)


# --- view, reshape ------------------------------------------------------------------------------------------------


def _local_size(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """The size argument becomes the local size of the output."""
    return op, [args[0], list(local.outputs[0] or ()), *args[2:]]


@rule(aten("view"), aten("_unsafe_view"), aten("view_copy"), aten("_reshape_copy"), localize=_local_size, empty=True)
def view(call: Call) -> Iterable[Row]:
    yield row([P], [P])
    now, output = call.current[0], call.outputs[0]
    if output is not None and _is_split(now):
        place = moved_by_view(call.inputs[0].shape, output.shape, now, call.size)
        if place is not None:
            yield row([place], [now], parallel=_same_dim_alone(call.inputs[0].shape, output.shape, now, place))


def moved_by_view(old: Sequence[int], new: Sequence[int], now: Any, ranks: int) -> Placement | None:
    """Where a split dim goes in a view, or None where it falls apart.

    >>> moved_by_view((2, 6, 12), (2, 6, 3, 4), _StridedShard(2, split_factor=3), 2)
    Shard(dim=3)
    >>> moved_by_view((2, 6, 4), (12, 4), Shard(1), 2)
    _StridedShard(dim=0, sf=2)
    """
    old_dims, new_dims = next((a, b) for a, b in _groups(old, new) if now.dim in a)
    if not new_dims:
        return None
    if len(old_dims) == len(new_dims) == 1:
        return _split(new_dims[0], _turns(now))
    if old[now.dim] % (ranks * _turns(now)):
        return None
    turns = math.prod(old[d] for d in old_dims if d < now.dim) * _turns(now)
    for dim in new_dims:
        outer = math.prod(new[d] for d in new_dims if d < dim)
        if turns % outer == 0 and new[dim] % (turns // outer * ranks) == 0 and new[dim] > 1:
            return _split(dim, turns // outer)
    return None


def _same_dim_alone(old: Sequence[int], new: Sequence[int], now: Any, place: Any) -> bool:
    """Whether the split dim is regrouped with no other, so that uneven shards do as well."""
    old_dims, new_dims = next((a, b) for a, b in _groups(old, new) if now.dim in a)
    return len(old_dims) == len(new_dims) == 1


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Neighbouring dims of `old` and of `new` that hold the same elements. Dims of size 1 stand alone.

    >>> list(_groups((2, 6, 12), (2, 6, 3, 4)))
    [([0], [0]), ([1], [1]), ([2], [2, 3])]
    """
    if 0 in old:
        yield from (([d], []) for d in range(len(old)))
        return
    left = [d for d, size in enumerate(old) if size != 1]
    right = [d for d, size in enumerate(new) if size != 1]
    yield from (([d], []) for d, size in enumerate(old) if size == 1)
    while left or right:
        a, b = [left.pop(0)], [right.pop(0)]
        while (have := math.prod(old[d] for d in a)) != (want := math.prod(new[d] for d in b)):
            a, b = ([*a, left.pop(0)], b) if have < want else (a, [*b, right.pop(0)])
        yield a, b


@rule(aten("view.dtype"), empty=True)
def view_dtype(call: Call) -> Iterable[Row]:
    """Reinterprets the bytes of the last dim; the others may be split."""
    output = call.outputs[0]
    last = call.inputs[0].ndim - 1
    same = output is not None and output.shape == call.inputs[0].shape
    for dim in range(call.inputs[0].ndim if same else last):
        yield row([S(dim)], [S(dim)])


@rule(aten("view_as_real"), aten("view_as_complex"), empty=True)
def complex_views(call: Call) -> Iterable[Row]:
    output = call.outputs[0]
    assert output is not None
    for dim in range(min(call.inputs[0].ndim, output.ndim)):
        yield row([S(dim)], [S(dim)])
    yield row([P], [P])


# --- dims that only change places ---------------------------------------------------------------------------------


def _renamed(call: Call, order: Sequence[int | None]) -> Iterator[Row]:
    """Rows of an op whose output dim i is input dim order[i] (None: a new dim)."""
    for out, dim in enumerate(order):
        if dim is not None:
            yield row([S(out)], [S(dim)])
    yield row([P], [P])


@rule(aten("t"), aten("t_"), aten("t_copy"), aten("numpy_T"), aten("adjoint"), empty=True)
def transposed_matrix(call: Call) -> Iterable[Row]:
    return _renamed(call, tuple(reversed(range(call.inputs[0].ndim))))


@rule(aten("transpose.int"), aten("transpose_"), aten("transpose_copy.int"), empty=True)
def transpose(call: Call) -> Iterable[Row]:
    order = list(range(call.inputs[0].ndim))
    if order:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return _renamed(call, order)


@rule(aten("permute"), aten("permute_copy"), empty=True)
def permute(call: Call) -> Iterable[Row]:
    return _renamed(call, call.dims("dims"))


@rule(aten("unsqueeze"), aten("unsqueeze_"), aten("unsqueeze_copy"), empty=True)
def unsqueeze(call: Call) -> Iterable[Row]:
    order: list[int | None] = list(range(call.inputs[0].ndim))
    order.insert(normal_dim(call["dim"], call.inputs[0].ndim + 1), None)
    return _renamed(call, order)


def _squeeze_named_dims(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Only dims of *global* size 1 go: a split dim may have local size 1. (A view cannot tell; the sizes can.)"""
    return torch.ops.aten.view.default, [args[0], list(local.outputs[0] or ())]


@rule(
    aten("squeeze"),
    aten("squeeze.dim"),
    aten("squeeze.dims"),
    aten("squeeze_copy"),
    aten("squeeze_copy.dim"),
    localize=_squeeze_named_dims,
    empty=True,
)
def squeeze(call: Call) -> Iterable[Row]:
    shape = call.inputs[0].shape
    named = call.dims() if "dim" in call.values and shape else range(len(shape))
    return _renamed(call, [d for d, size in enumerate(shape) if size != 1 or d not in named])


@rule(aten("squeeze_.dim"), aten("squeeze_.dims"), empty=True)
def squeeze_in_place(call: Call) -> Iterable[Row]:
    """Dims that are named and longer than 1 stay, but might have local size 1: they are not split."""
    shape, named = call.inputs[0].shape, call.dims()
    kept = [d for d, size in enumerate(shape) if size != 1 or d not in named]
    return _renamed(call, [None if d in named else d for d in kept])


@rule(aten("expand"), aten("expand_copy"), localize=_local_size, empty=True)
def expand(call: Call) -> Iterable[Row]:
    (meta,), output = call.inputs, call.outputs[0]
    assert output is not None
    new = output.ndim - meta.ndim
    for dim, size in enumerate(meta.shape):
        if size == output.shape[dim + new]:
            yield row([S(dim + new)], [S(dim)])
    yield row([P], [P])


@rule(aten("diagonal"), aten("diagonal_copy"), empty=True)
def diagonal(call: Call) -> Iterable[Row]:
    gone = {call.dim("dim1"), call.dim("dim2")}
    order = [d for d in range(call.inputs[0].ndim) if d not in gone]
    return _renamed(call, [*order, None])


@rule(aten("unfold"), empty=True)
def unfold(call: Call) -> Iterable[Row]:
    if call.inputs[0].ndim:
        touched = call.dim("dimension")
        yield from _renamed(call, [None if d == touched else d for d in range(call.inputs[0].ndim)])


# --- taking parts of a dim ----------------------------------------------------------------------------------------


@rule(aten("select.int"), aten("select_copy.int"), empty=True)
def select(call: Call) -> Iterable[Row]:
    gone = call.dim()
    return _renamed(call, [d for d in range(call.inputs[0].ndim) if d != gone])


@rule(aten("unbind.int"), aten("unbind_copy.int"), empty=True)
def unbind(call: Call) -> Iterable[Row]:
    gone = call.dim()
    for dim in range(call.inputs[0].ndim):
        if dim != gone:
            yield row([S(dim - (dim > gone))] * len(call.outputs), [S(dim)])
    yield row([P] * len(call.outputs), [P])


def _parts(call: Call, dim: int, borders: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Rows of an op that takes the ranges `borders` of a dim, one output each."""
    count = len(call.outputs)
    for other in range(call.inputs[0].ndim):
        if other != dim:
            yield row([S(other)] * count, [S(other)])
    yield row([P] * count, [P])
    now = call.current[0]
    if _is_split(now) and now.dim == dim:
        group = call.inputs[0].shape[dim] // _turns(now)
        whole = [group > 0 and start % group == 0 and end % group == 0 and end > start for start, end in borders]
        if group and all(whole) and group % call.size == 0:
            outs = [_split(dim, (end - start) // group) for start, end in borders]
            yield row(outs, [now], parallel=False)


def _local_part(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """slice(x, dim, start, end, step) on a fused split: the borders shrink as the dim does."""
    dim = args[1] if len(args) > 1 else 0
    whole, mine = local.wholes[0][dim], local.inputs[0][dim]
    if whole == mine:
        return op, args
    start, end = _range(args[2:4], whole)
    return op, [args[0], dim, start * mine // whole, end * mine // whole, *args[4:]]


def _range(given: Sequence[Any], size: int) -> tuple[int, int]:
    start = 0 if len(given) < 1 or given[0] is None else given[0]
    end = size if len(given) < 2 or given[1] is None else given[1]
    start, end = (b + size if b < 0 else b for b in (start, end))
    start = min(max(start, 0), size)
    return start, max(start, min(end, size))


@rule(aten("slice.Tensor"), aten("slice_copy.Tensor"), localize=_local_part, empty=True)
def slice_(call: Call) -> Iterable[Row]:
    dim, size = call.dim(), call.inputs[0].shape[call.dim()]
    borders = _range((call["start"], call["end"]), size)
    if call["step"] == 1:
        if borders == (0, size):
            yield row([S(dim)], [S(dim)])
        yield from _parts(call, dim, [borders])
    else:
        yield from (r for r in _parts(call, dim, [(0, 0)]) if r.ins[0] != call.current[0] or r.parallel)


def _local_split(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    dim = args[2] if len(args) > 2 else 0
    sizes = [shape[dim] for shape in local.outputs if shape is not None]
    return op, [args[0], sizes if isinstance(args[1], list | tuple) else sizes[0], dim]


@rule(
    *map(
        aten,
        (
            "split.Tensor",
            "split_with_sizes",
            "unsafe_split.Tensor",
            "unsafe_split_with_sizes",
            "split_copy.Tensor",
            "split_with_sizes_copy",
        ),
    ),
    localize=_local_split,
    empty=True,
)
def split(call: Call) -> Iterable[Row]:
    dim = call.dim()
    ends = [0]
    for output in call.outputs:
        assert output is not None
        ends.append(ends[-1] + output.shape[dim])
    return _parts(call, dim, list(pairwise(ends)))


# --- putting parts together ---------------------------------------------------------------------------------------


@rule(aten("cat"), empty=True)
def cat(call: Call) -> Iterable[Row]:
    output = call.outputs[0]
    assert output is not None
    dim = normal_dim(call["dim"], output.ndim)
    # A 1-d tensor without elements may stand in any list to be joined; it stays whole.
    legacy = [meta.shape == (0,) for meta in call.inputs]
    for other in range(output.ndim):
        if other != dim or legacy.count(False) == 1:  # a cache begins so: nothing, joined with the first keys
            yield row([S(other)], [R if skip else S(other) for skip in legacy])
    yield row([P], [R if skip else P for skip in legacy])
    yield from _fused_cat(call, dim)


def _fused_cat(call: Call, dim: int) -> Iterator[Row]:
    """Pieces that are split alike join to a fused split: the way back of taking q, k, v from a fused dim."""
    if not all(_is_split(now) and now.dim == dim for now in call.current):
        return
    groups = {meta.shape[dim] / _turns(now) for meta, now in zip(call.inputs, call.current, strict=True)}
    if len(groups) == 1 and next(iter(groups)) % call.size == 0:
        turns = sum(_turns(now) for now in call.current)
        yield row([_split(dim, turns)], call.current, parallel=False)


@rule(aten("stack"), empty=True)
def stack(call: Call) -> Iterable[Row]:
    new = normal_dim(call["dim"], call.inputs[0].ndim + 1)
    for dim in range(call.inputs[0].ndim):
        yield row([S(dim + (dim >= new))], [S(dim)] * len(call.inputs))
    yield row([P], [P] * len(call.inputs))


# --- the way back of taking parts ---------------------------------------------------------------------------------


@rule(aten("select_backward"), localize=_local_size, empty=True)
def select_backward(call: Call) -> Iterable[Row]:
    output = call.outputs[0]
    assert output is not None
    gone = normal_dim(call["dim"], output.ndim)
    for dim in range(call.inputs[0].ndim):
        yield row([S(dim + (dim >= gone))], [S(dim)])
    yield row([P], [P])


def _local_slice_backward(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    sizes, dim = args[1], args[2]
    mine = list(local.outputs[0] or ())
    start, end = _range(args[3:5], sizes[dim])
    if mine[dim] != sizes[dim]:
        start, end = (border * mine[dim] // sizes[dim] for border in (start, end))
    return op, [args[0], mine, dim, start, end, *args[5:]]


@rule(aten("slice_backward"), localize=_local_slice_backward, empty=True)
def slice_backward(call: Call) -> Iterable[Row]:
    output, grad, now = call.outputs[0], call.inputs[0], call.current[0]
    assert output is not None
    dim = normal_dim(call["dim"], output.ndim)
    for other in range(output.ndim):
        if other != dim:
            yield row([S(other)], [S(other)])
    yield row([P], [P])
    start, end = _range((call["start"], call["end"]), output.shape[dim])
    if _is_split(now) and now.dim == dim and call["step"] == 1 and grad.shape[dim] % _turns(now) == 0:
        group = grad.shape[dim] // _turns(now)
        if group and all(border % group == 0 for border in (start, end, output.shape[dim])) and group % call.size == 0:
            yield row([_split(dim, output.shape[dim] // group)], [now], parallel=False)


# --- a tensor with a part of it replaced --------------------------------------------------------------------------


@rule(aten("slice_scatter"), empty=True)
def slice_scatter(call: Call) -> Iterable[Row]:
    for dim in range(call.inputs[0].ndim):
        if dim != call.dim():
            yield row([S(dim)], [S(dim), S(dim)])
    yield row([P], [P, P])


@rule(aten("select_scatter"), empty=True)
def select_scatter(call: Call) -> Iterable[Row]:
    gone = call.dim()
    for dim in range(call.inputs[1].ndim):
        whole_dim = dim + (dim >= gone)
        yield row([S(whole_dim)], [S(whole_dim), S(dim)])
    yield row([P], [P, P])


# --- tensors made like another ------------------------------------------------------------------------------------


@rule(
    *map(aten, ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")),
    empty=True,
)
def likes(call: Call) -> Iterable[Row]:
    """A new tensor is laid out as its model; the model's values are not read."""
    now = call.current[0]
    if not _is_split(now):
        yield row([R], [ANY])
    for dim in range(call.inputs[0].ndim):
        yield row([S(dim)], [S(dim)])


@rule(*map(aten, ("new_empty", "new_zeros", "new_ones", "new_full")), localize=_local_size, empty=True)
def news(call: Call) -> Iterable[Row]:
    output = call.outputs[0]
    assert output is not None
    same = call.inputs[0].shape == output.shape
    if not (same and _is_split(call.current[0])):
        yield row([R], [ANY])
    elif not isinstance(call.current[0], Replicate):
        for dim in range(output.ndim):
            yield row([S(dim)], [S(dim)])


def _local_strides(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """new_empty_strided(self, size, stride): the local size, its dims in memory in the order of the strides."""
    size, strides = list(local.outputs[0] or ()), [0] * len(args[2])
    step = 1
    for dim in sorted(range(len(size)), key=lambda d: (args[2][d], -d)):
        strides[dim] = step
        step *= max(1, size[dim])
    return op, [args[0], size, strides, *args[3:]]


@rule(aten("new_empty_strided"), localize=_local_strides, empty=True)
def new_strided(call: Call) -> Iterable[Row]:
    """As `new_empty`, where the strides leave no gaps and overlap nowhere."""
    output = call.outputs[0]
    assert output is not None
    now = call.current[0]
    if _is_split(now) and call.inputs[0].shape == output.shape and _is_dense(call["size"], call["stride"]):
        yield row([S(now.dim)], [S(now.dim)])
    elif not _is_split(now):
        yield row([R], [ANY])


def _is_dense(size: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, length in sorted(zip(strides, size, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
