"""Losses. A mean over a sharded batch is the local sum divided by the global number of elements (or weights).

PyTorch's reductions are numbers: 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardlib.engine.ops._operands import arguments_by_name
from shardlib.engine.ops._rows import Call, Here, Op, P, R, Row, S, aten, row, rule
from shardlib.engine.ops._rules._pointwise import aligned, pointwise_rows
from shardlib.engine.ops._rules._reductions import accumulated_in

__all__: list[str] = []

_NONE, _MEAN, _SUM = 0, 1, 2


# --- losses of elements -------------------------------------------------------------------------------------------

_ELEMENTWISE = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
)


@rule(*map(aten, _ELEMENTWISE))
def elementwise_loss(call: Call) -> Iterable[Row]:
    """Shard input, target [, weights] -> one loss per element, or their sum, or their mean."""
    if call["reduction"] == _NONE:
        yield from pointwise_rows(call)
    else:
        yield from _over_elements(call, 0, lambda dim: P, _share_of_mean)


@rule(*(aten(f"{name}_backward") for name in _ELEMENTWISE))
def elementwise_loss_backward(call: Call) -> Iterable[Row]:
    """Shard grad_output, input, target [, weight] -> grad of input."""
    yield row([P], [P] + [R] * (len(call.inputs) - 1), compute=_mean_by_whole_count)
    if call["reduction"] == _NONE:
        yield from pointwise_rows(call)
    else:
        yield from _over_elements(call, 1, S, _mean_by_whole_count)


def _over_elements(call: Call, first: int, out: Any, compute: Any) -> Iterator[Row]:
    """Split the elements of operand `first` and of those that broadcast onto it; the operands before it are scalars."""
    shape = call.inputs[first].shape
    for dim in range(len(shape)):
        places = [S(d) if (d := aligned(meta, dim, shape)) is not None else R for meta in call.inputs[first:]]
        yield row([out(dim)], [*[R] * first, *places], compute=compute, anywhere=True)


def _share_of_mean(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    named = arguments_by_name(op, args, kwargs)
    if named["reduction"] == _SUM:
        return op(**named)
    each = op(**{**named, "reduction": _NONE})
    return (each.sum(dtype=accumulated_in(each.dtype)) / math.prod(here.shape(0))).to(each.dtype)


def _mean_by_whole_count(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    named = arguments_by_name(op, args, kwargs)
    if named["reduction"] != _MEAN:
        return op(*args, **kwargs)
    share = named["grad_output"] / math.prod(here.shape(1))
    return op(**{**named, "grad_output": share, "reduction": _SUM})


# --- negative log likelihood --------------------------------------------------------------------------------------


def _class_weight(call: Call, place: Any) -> list[Any]:
    return [place] if call["weight"] is not None else []


@rule(aten("nll_loss_forward"), aten("nll_loss2d_forward"))
def nll_loss(call: Call) -> Iterable[Row]:
    """Shard log-probabilities, target [, class weights] -> loss, total weight, by examples or classes."""
    scores, target = call.inputs[:2]
    if scores.ndim < 2:
        return
    each = call["reduction"] == _NONE
    for dim in range(target.ndim):
        from_scores = S(dim if dim == 0 else dim + 1)
        outs = [S(dim), R] if each else [P, R if call["reduction"] == _MEAN else P]
        yield row(outs, [from_scores, S(dim), *_class_weight(call, R)], compute=_nll_of_own, anywhere=True)
    yield row([P, R if call["reduction"] != _SUM else P], [S(1), R, *_class_weight(call, S(0))], compute=_nll_of_own)


def _nll_of_own(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> Any:
    """Compute the loss of local examples and classes; a mean is divided by the global weight."""
    scores, target, weight, reduction, ignore = args[:5]
    target = _own_classes(scores, target, ignore, here, operand=0)
    if reduction != _MEAN:
        return op(scores, target, weight, reduction, _IGNORED)
    wide = accumulated_in(scores.dtype)
    loss, total = op(scores.to(wide), target, None if weight is None else weight.to(wide), _SUM, _IGNORED)
    total = here.all_reduce(total, "sum")
    return (loss / total).to(scores.dtype), total.to(scores.dtype)


_IGNORED = -100


def _own_classes(scores: torch.Tensor, target: torch.Tensor, ignore: int, here: Here, *, operand: int) -> torch.Tensor:
    """Shift targets by this rank's first class; those of other ranks are ignored, like the user's ignored targets.

    A target that no rank has stays out of range, for PyTorch to refuse.
    """
    own = target - here.offset(operand, 1)
    absent = ((own < 0) | (own >= scores.shape[1])) & (target >= 0) & (target < here.shape(operand)[1])
    return own.masked_fill(absent | (target == ignore), _IGNORED)


@rule(aten("nll_loss_backward"), aten("nll_loss2d_backward"))
def nll_loss_backward(call: Call) -> Iterable[Row]:
    """Shard grad_output, log-probabilities, target [, class weights], total weight -> grad of log-probabilities."""
    scores, target = call.inputs[1:3]
    if scores.ndim < 2:
        return
    each = call["reduction"] == _NONE
    for dim in range(target.ndim):
        place = S(dim if dim == 0 else dim + 1)
        yield row([place], [S(dim) if each else R, place, S(dim), *_class_weight(call, R), R])
    yield row([S(1)], [R, S(1), R, *_class_weight(call, S(0)), R], compute=_nll_backward_of_own)
    yield row([P], [P, *[R] * (len(call.inputs) - 1)])


def _nll_backward_of_own(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    grad, scores, target, weight, reduction, ignore, total = args
    target = _own_classes(scores, target, ignore, here, operand=1)
    return op(grad, scores, target, weight, reduction, _IGNORED, total)
