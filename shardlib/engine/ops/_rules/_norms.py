"""Normalisations and embeddings: rows for the dims that the statistics do not reduce."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch

from shardlib.engine.ops._operands import arguments_by_name
from shardlib.engine.ops._rows import Call, Compute, Here, Local, Meta, Op, P, R, Row, S, aten, row, rule
from shardlib.engine.ops._rules._reductions import accumulated_in

__all__: list[str] = []


# --- layer norm, rms norm: statistics over the last dims ----------------------------------------------------------


@rule(aten("native_layer_norm"), aten("_fused_rms_norm"))
def layer_norm(call: Call) -> Iterable[Row]:
    lead = call.inputs[0].ndim - len(call["normalized_shape"])
    for dim in range(lead):
        yield row([S(dim)] * len(call.outputs), [S(dim)] + [R] * (len(call.inputs) - 1))
    if len(call["normalized_shape"]) == 1:
        outs = [S(lead), *[R] * (len(call.outputs) - 1)]
        affine = [S(0)] * (len(call.inputs) - 1)
        statistic = call.outputs[-1]
        assert statistic is not None
        yield row(outs, [S(lead), *affine], compute=_over_features(statistic.dtype), anywhere=True)


@rule(aten("native_layer_norm_backward"), aten("_fused_rms_norm_backward"))
def layer_norm_backward(call: Call) -> Iterable[Row]:
    """Shard grad_out, input, [mean,] rstd [, weight, bias] -> grad_input, grad_weight [, grad_bias]."""
    lead = call.inputs[1].ndim - len(call["normalized_shape"])
    statistics = [R] * len({"mean", "rstd"}.intersection(call.names))
    affine = [R] * len({"weight", "bias"}.intersection(call.names))
    grads = len(call.outputs) - 1
    for dim in range(lead):
        yield row([S(dim), *[P] * grads], [*[S(dim)] * (2 + len(statistics)), *affine])
    yield row([P] * len(call.outputs), [P, R, *statistics, *affine])
    if len(call["normalized_shape"]) == 1:
        ins = [S(lead), S(lead), *statistics, *[S(0)] * len(affine)]
        yield row([S(lead), *[S(0)] * grads], ins, compute=_norm_backward_of_own, anywhere=True)


# Where the features themselves are sharded, ranks all-reduce two numbers for each row, in forward and in backward.


@cache
def _over_features(dtype: torch.dtype) -> Compute:
    """Make the computation. Cached: one function for all mesh axes and all calls with this dtype of statistics."""
    return partial(_norm_features, dtype)


def _norm_features(dtype: torch.dtype, op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> Any:
    """Normalise rows whose features are sharded: squares of centred values are summed over ranks."""
    named = arguments_by_name(op, args, kwargs)
    given, count = named["input"], here.shape(0)[-1]
    x = given.to(accumulated_in(given.dtype))
    statistics = []
    if "bias" in named:
        mean = here.all_reduce(x.sum(-1, keepdim=True), "sum") / count
        x = x - mean
        statistics.append(mean.to(dtype))
    eps = named["eps"]
    square = here.all_reduce(x.square().sum(-1, keepdim=True), "sum") / count
    rstd = (square + (torch.finfo(given.dtype).eps if eps is None else eps)).rsqrt()
    y = x * rstd
    y = y if named["weight"] is None else y * named["weight"]
    y = y if named.get("bias") is None else y + named["bias"]
    return (y.to(given.dtype), *statistics, rstd.to(dtype))


def _norm_backward_of_own(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> Any:
    named = arguments_by_name(op, args, kwargs)
    grad, given, weight = named["grad_out"], named["input"], named["weight"]
    wide = accumulated_in(given.dtype)
    centred = "mean" in named
    x = (given.to(wide) - named["mean"]) if centred else given.to(wide)
    normal, g = x * named["rstd"], grad.to(wide)
    scaled = g if weight is None else g * weight
    sums = [(scaled * normal).sum(-1, keepdim=True), *([scaled.sum(-1, keepdim=True)] if centred else [])]
    share, *rest = (here.all_reduce(torch.stack(sums), "sum") / here.shape(1)[-1]).unbind()
    grad_input = (scaled - normal * share - (rest[0] if centred else 0)) * named["rstd"]
    affine = [g * normal, g] if centred else [g * normal]
    dtype = given.dtype if weight is None else weight.dtype
    grads = [grad_input.to(given.dtype), *(each.flatten(0, -2).sum(0).to(dtype) for each in affine)]
    return tuple(value if wanted else None for value, wanted in zip(grads, named["output_mask"], strict=True))


@rule(aten("_weight_norm_interface"), aten("_weight_norm_interface_backward"))
def weight_norm(call: Call) -> Iterable[Row]:
    """Shard v, g -> g v / |v|, |v|, with norms of the slices along one dim; grad_w, v, g, norms -> grads of v and g."""
    dim = call.dim()
    if min(meta.ndim for meta in call.inputs) > dim:
        yield row([S(dim), S(dim)], [S(dim)] * len(call.inputs))


# --- embedding ----------------------------------------------------------------------------------------------------


@rule(aten("embedding"))
def embedding(call: Call) -> Iterable[Row]:
    """Shard weight, indices -> rows of weight. With a sharded vocabulary, the result is a partial sum."""
    weight, indices = call.inputs
    for dim in range(indices.ndim):
        yield row([S(dim)], [R, S(dim)])
    yield row([S(indices.ndim + weight.ndim - 2)], [S(1), R])
    yield row([P], [P, R])
    yield row([P], [S(0), R], compute=_own_rows)


def _own_rows(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    weight, indices = args[:2]
    own = indices - here.offset(0, 0)
    absent = (own < 0) | (own >= weight.shape[0])
    return op(weight, own.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0)


@rule(aten("embedding_dense_backward"))
def embedding_backward(call: Call) -> Iterable[Row]:
    """Shard grad_out, indices -> grad of weight, a sum over tokens."""
    grad, indices = call.inputs
    if not call["scale_grad_by_freq"]:
        for dim in range(indices.ndim):
            yield row([P], [S(dim), S(dim)])
    yield row([S(1)], [S(grad.ndim - 1), R])
    yield row([P], [P, R])


# --- group norm ---------------------------------------------------------------------------------------------------


def _local_group_norm(first: int) -> Any:
    """Make N, C, HxW, group at args[first:] local: N and C by the input's shape, groups in the ratio of C."""

    def localize(op: Op, args: list[Any], local: Local) -> tuple[Op, list[Any]]:
        n, c = local.inputs[0][:2]
        groups = args[first + 3] * c // args[first + 1]
        return op, [*args[:first], n, c, args[first + 2], groups, *args[first + 4 :]]

    return localize


@rule(aten("native_group_norm"), localize=_local_group_norm(3))
def group_norm(call: Call) -> Iterable[Row]:
    affine = len(call.inputs) - 1
    yield row([S(0)] * 3, [S(0)] + [R] * affine)
    if call["group"] % call.size == 0:
        yield row([S(1)] * 3, [S(1)] + [S(0)] * affine)


@rule(aten("native_group_norm_backward"), localize=_local_group_norm(5))
def group_norm_backward(call: Call) -> Iterable[Row]:
    """Shard grad_out, input, mean, rstd [, weight] -> grad_input, grad_weight, grad_bias."""
    affine = len(call.inputs) - 4
    yield row([S(0), P, P], [S(0)] * 4 + [R] * affine)
    if call["group"] % call.size == 0:
        yield row([S(1), S(0), S(0)], [S(1)] * 4 + [S(0)] * affine)


# --- batch norm: statistics over everything but the channels -------------------------------------------------------


@rule(
    *map(
        aten,
        (
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit.no_stats",
            "_native_batch_norm_legit_no_training",
            "_native_batch_norm_legit_functional",
            "_batch_norm_with_update",
            "_batch_norm_with_update_functional",
            "_batch_norm_no_update",
            "cudnn_batch_norm",
            "native_batch_norm_backward",
            "batch_norm_backward",
            "cudnn_batch_norm_backward",
        ),
    )
)
def batch_norm(call: Call) -> Iterable[Row]:
    """Shard the channels, and all tensors per channel with them."""
    reserve = any(m is not None and m.dtype == torch.uint8 for m in (*call.outputs, *call.inputs))
    if not reserve and call.inputs[0].ndim > 1:
        yield row([_by_channel(meta) for meta in call.outputs], [_by_channel(meta) for meta in call.inputs])


def _by_channel(meta: Meta | None) -> Any:
    """Return the placement for sharded channels. The empty batch statistics of evaluation are replicated."""
    if meta is None:
        return None
    return S(1) if meta.ndim > 1 else R if meta.shape == (0,) else S(0)
