"""Views, and their backward ops.

A split of a dim over one mesh axis of n ranks has the form (k, n, m): the axis's ranks take turns of m elements, k
times. `Shard` has k = 1, a fused `_StridedShard` has k = its split factor. A view regroups adjacent dims; if one of the
new dims has the same (k, n, m), the view needs no communication. So `(qkv heads head)` sharded over heads becomes a
plain shard of `heads` by `view(B, T, 3, heads, head)`, and a sharded sequence dim stays sharded by `view(B * T, C)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import Placement

from shardlib.engine._torch import _StridedShard, split_factor
from shardlib.engine.ops._rows import ANY, Call, Local, Op, P, R, Row, S, aten, is_split, normal_dim, row, rule

__all__: list[str] = []


def _split(dim: int, turns: int) -> Placement:
    """Return the placement whose (k, n, m) has k = turns."""
    return S(dim) if turns == 1 else _StridedShard(dim, split_factor=turns)


# --- view, reshape ------------------------------------------------------------------------------------------------


def _local_size(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Replace the size argument by the local size of the output."""
    return op, [args[0], list(local.outputs[0] or ()), *args[2:]]


@rule(aten("view"), aten("_unsafe_view"), aten("view_copy"), aten("_reshape_copy"), localize=_local_size, empty=True)
def view(call: Call) -> Iterable[Row]:
    yield row([P], [P])
    now, output = call.current[0], call.outputs[0]
    if output is not None and is_split(now):
        out = moved_by_view(call.inputs[0].shape, output.shape, now, call.size)
        if out is not None:
            yield row([out], [now], parallel=_same_dim_alone(call.inputs[0].shape, output.shape, now))


def moved_by_view(old: Sequence[int], new: Sequence[int], now: Any, ranks: int) -> Placement | None:
    """Return the placement of a sharded dim after a view, or None if there is none.

    >>> moved_by_view((2, 6, 12), (2, 6, 3, 4), _StridedShard(2, split_factor=3), 2)
    Shard(dim=3)
    >>> moved_by_view((2, 6, 4), (12, 4), S(1), 2)
    _StridedShard(dim=0, sf=2)
    """
    old_dims, new_dims = next((a, b) for a, b in _groups(old, new) if now.dim in a)
    if not new_dims:
        return None
    if len(old_dims) == len(new_dims) == 1:
        return _split(new_dims[0], split_factor(now))
    if old[now.dim] % (ranks * split_factor(now)):
        return None
    turns = math.prod(old[d] for d in old_dims if d < now.dim) * split_factor(now)
    for dim in new_dims:
        outer = math.prod(new[d] for d in new_dims if d < dim)
        if turns % outer == 0 and new[dim] % (turns // outer * ranks) == 0 and new[dim] > 1:
            return _split(dim, turns // outer)
    return None


def _same_dim_alone(old: Sequence[int], new: Sequence[int], now: Any) -> bool:
    """Return whether the view does not regroup the sharded dim, so that uneven shards are valid."""
    old_dims, new_dims = next((a, b) for a, b in _groups(old, new) if now.dim in a)
    return len(old_dims) == len(new_dims) == 1


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield groups of adjacent dims of `old` and `new` with the same elements. Dims of size 1 are groups of their own.

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
    """Shard all dims but the last, whose bytes are reinterpreted."""
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


# --- permuted dims ------------------------------------------------------------------------------------------------


def _renamed(call: Call, order: Sequence[int | None]) -> Iterator[Row]:
    """Return rows of an op: dim i of each output is dim order[i] of each input (None: a new dim)."""
    outs, ins = len(call.outputs), len(call.inputs)
    for out, dim in enumerate(order):
        if dim is not None:
            yield row([S(out)] * outs, [S(dim)] * ins)
    yield row([P] * outs, [P] * ins)


def _elsewhere(call: Call, dim: int) -> Iterator[Row]:
    """Return rows of an op that leaves all dims but one alone."""
    return _renamed(call, [None if other == dim else other for other in range(call.inputs[0].ndim)])


@rule(aten("t"), aten("t_"), aten("t_copy"), empty=True)
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


@rule(aten("unsqueeze"), aten("unsqueeze_"), aten("unsqueeze_copy"), aten("stack"), empty=True)
@rule(aten("select_backward"), localize=_local_size, empty=True)
def unsqueeze(call: Call) -> Iterable[Row]:
    order: list[int | None] = list(range(call.inputs[0].ndim))
    order.insert(normal_dim(call["dim"], call.inputs[0].ndim + 1), None)
    return _renamed(call, order)


def _squeeze_named_dims(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Replace squeeze by a view that removes dims of *global* size 1: a sharded dim may have local size 1."""
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
    """Return rows that leave named dims unsharded: with a local size of 1 such a dim would be removed."""
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
    return _elsewhere(call, call.dim("dimension")) if call.inputs[0].ndim else ()


# --- slices of a dim ----------------------------------------------------------------------------------------------


@rule(*map(aten, ("select.int", "select_copy.int", "unbind.int", "unbind_copy.int")), empty=True)
def select(call: Call) -> Iterable[Row]:
    gone = call.dim()
    return _renamed(call, [d for d in range(call.inputs[0].ndim) if d != gone])


def _parts(call: Call, dim: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Return rows of an op that takes some ranges of a dim, one output each."""
    yield from _elsewhere(call, dim)
    now = call.current[0]
    if is_split(now) and now.dim == dim:
        group = call.inputs[0].shape[dim] // split_factor(now)
        aligned = [group > 0 and start % group == 0 and end % group == 0 and end > start for start, end in ranges]
        if group and all(aligned) and group % call.size == 0:
            outs = [_split(dim, (end - start) // group) for start, end in ranges]
            yield row(outs, [now], parallel=False)


def _local_part(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Scale start and end of slice(x, dim, start, end, step) on a fused split like the dim."""
    dim = args[1] if len(args) > 1 else 0
    size, local_size = local.global_shapes[0][dim], local.inputs[0][dim]
    if size == local_size:
        return op, args
    start, end = _range(args[2:4], size)
    return op, [args[0], dim, start * local_size // size, end * local_size // size, *args[4:]]


def _range(given: Sequence[Any], size: int) -> tuple[int, int]:
    """Return start and end of a slice of a dim of this size; either may be missing, None, negative or too large.

    >>> _range((None, -1), 5), _range((4,), 5), _range((3, 2), 5), _range((-9, 9), 5)
    ((0, 4), (4, 5), (3, 3), (0, 5))
    """
    start, end, _ = slice(*[*given, None, None][:2]).indices(size)
    return start, max(start, end)


@rule(aten("slice.Tensor"), aten("slice_copy.Tensor"), localize=_local_part, empty=True)
def slice_(call: Call) -> Iterable[Row]:
    dim, x, output = call.dim(), call.inputs[0], call.outputs[0]
    assert output is not None
    start, end = _range((call["start"], call["end"]), x.shape[dim])
    if call["step"] == 1 and output.shape[dim] == x.shape[dim]:
        yield row([S(dim)], [S(dim)])
    pieces = call["step"] == 1 and dim not in dict(x.cut)  # start and end count global indices
    yield from _parts(call, dim, [(start, end) if pieces else (0, 0)])


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


# --- concatenation ------------------------------------------------------------------------------------------------


@rule(aten("cat"), empty=True)
def cat(call: Call) -> Iterable[Row]:
    output = call.outputs[0]
    assert output is not None
    dim = normal_dim(call["dim"], output.ndim)
    # `cat` accepts empty 1-d tensors in any list; they are replicated.
    legacy = [meta.shape == (0,) for meta in call.inputs]
    for other in range(output.ndim):
        if other != dim or legacy.count(False) == 1:  # the first update of a cache: an empty tensor and the first keys
            yield row([S(other)], [R if skip else S(other) for skip in legacy])
    yield row([P], [R if skip else P for skip in legacy])
    yield from _fused_cat(call, dim)


def _fused_cat(call: Call, dim: int) -> Iterator[Row]:
    """Yield rows that join equally sharded pieces to a fused split, as when q, k and v are concatenated."""
    if not all(is_split(now) and now.dim == dim for now in call.current):
        return
    groups = {meta.shape[dim] / split_factor(now) for meta, now in zip(call.inputs, call.current, strict=True)}
    if len(groups) == 1 and next(iter(groups)) % call.size == 0:
        turns = sum(split_factor(now) for now in call.current)
        yield row([_split(dim, turns)], call.current, parallel=False)


# --- backward of slices -------------------------------------------------------------------------------------------


def _local_slice_backward(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    sizes, dim = args[1], args[2]
    local_sizes = list(local.outputs[0] or ())
    start, end = _range(args[3:5], sizes[dim])
    if local_sizes[dim] != sizes[dim]:
        start, end = (bound * local_sizes[dim] // sizes[dim] for bound in (start, end))
    return op, [args[0], local_sizes, dim, start, end, *args[5:]]


@rule(aten("slice_backward"), localize=_local_slice_backward, empty=True)
def slice_backward(call: Call) -> Iterable[Row]:
    output, grad, now = call.outputs[0], call.inputs[0], call.current[0]
    assert output is not None
    dim = normal_dim(call["dim"], output.ndim)
    yield from _elsewhere(call, dim)
    start, end = _range((call["start"], call["end"]), output.shape[dim])
    if is_split(now) and now.dim == dim and call["step"] == 1 and grad.shape[dim] % split_factor(now) == 0:
        group = grad.shape[dim] // split_factor(now)
        if group and all(bound % group == 0 for bound in (start, end, output.shape[dim])) and group % call.size == 0:
            yield row([_split(dim, output.shape[dim] // group)], [now], parallel=False)


# --- functional writes to slices ----------------------------------------------------------------------------------


@rule(aten("slice_scatter"), empty=True)
def slice_scatter(call: Call) -> Iterable[Row]:
    return _elsewhere(call, call.dim())


@rule(aten("select_scatter"), empty=True)
def select_scatter(call: Call) -> Iterable[Row]:
    gone = call.dim()
    for dim in range(call.inputs[1].ndim):
        own = dim + (dim >= gone)
        yield row([S(own)], [S(own), S(dim)])
    yield row([P], [P, P])


# --- new tensors --------------------------------------------------------------------------------------------------


@rule(*map(aten, ("empty_like", "zeros_like", "ones_like", "full_like")), empty=True)
@rule(*map(aten, ("new_empty", "new_zeros", "new_ones", "new_full")), localize=_local_size, empty=True)
def new(call: Call) -> Iterable[Row]:
    """Shard a new tensor as its argument, whose values are not read, if that has its shape."""
    output = call.outputs[0]
    assert output is not None
    if call.inputs[0].shape == output.shape and is_split(call.current[0]):
        for dim in range(output.ndim):
            yield row([S(dim)], [S(dim)])
    else:
        yield row([R], [ANY])


def _local_strides(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
    """Make size and stride of new_empty_strided local, with dims in the memory order of the global strides."""
    size, strides = list(local.outputs[0] or ()), [0] * len(args[2])
    step = 1
    for dim in sorted(range(len(size)), key=lambda d: (args[2][d], -d)):
        strides[dim] = step
        step *= max(1, size[dim])
    return op, [args[0], size, strides, *args[3:]]


@rule(aten("new_empty_strided"), localize=_local_strides, empty=True)
def new_strided(call: Call) -> Iterable[Row]:
    """Shard like `new_empty`, if the strides are dense and do not overlap."""
    output = call.outputs[0]
    assert output is not None
    now = call.current[0]
    if is_split(now) and call.inputs[0].shape == output.shape and _is_dense(call["size"], call["stride"]):
        yield row([S(now.dim)], [S(now.dim)])
    elif not is_split(now):
        yield row([R], [ANY])


def _is_dense(size: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, length in sorted(zip(strides, size, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
