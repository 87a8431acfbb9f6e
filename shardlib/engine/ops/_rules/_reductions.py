"""Ops along dims: any other dim may be sharded.

Sums over a sharded dim are partial sums. For other reductions of a sharded dim, ranks all-reduce intermediate values
without that dim: maxima, sums of exponentials, norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Placement

from shardlib.engine._torch import schema_of
from shardlib.engine.ops._operands import arguments_by_name
from shardlib.engine.ops._rows import Call, Here, Op, P, R, Row, S, aten, row, rule

__all__ = ["accumulated_in"]


def untouched(call: Call, dims: tuple[int, ...], *, keep: bool, others: int = 0) -> Iterator[Row]:
    """Split each dim of operand 0 that the op leaves alone. `others` more operands have the outputs' shape."""
    ndim = call.inputs[0].ndim
    for dim in range(ndim):
        if dim not in dims:
            out = dim if keep else dim - sum(d < dim for d in dims)
            yield row([S(out)] * len(call.outputs), [S(dim), *[S(out)] * others])


def _keep(call: Call) -> bool:
    return bool(call.values.get("keepdim"))


def _reduction(call: Call, out: Placement, **options: Any) -> Iterator[Row]:
    """Split each dim that is left, and each dim that is reduced, whose outputs have the placement `out`."""
    dims = call.dims() if "dim" in call.values else tuple(range(call.inputs[0].ndim))
    yield from untouched(call, dims, keep=_keep(call))
    for dim in dims:
        yield row([out] * len(call.outputs), [S(dim)], **options)


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch's kernels accumulate numbers of a dtype before they round the result."""
    return torch.promote_types(dtype, torch.float32)


def _dims_of(x: torch.Tensor, dims: Any) -> list[int]:
    given = [dims] if isinstance(dims, int) else dims
    return list(given) if given else list(range(x.ndim))


# --- sums ---------------------------------------------------------------------------------------------------------


@rule(*map(aten, ("sum", "sum.dim_IntList", "nansum", "count_nonzero", "count_nonzero.dim_IntList")), empty=True)
def sums(call: Call) -> Iterable[Row]:
    yield from _reduction(call, P)
    output = call.outputs[0]
    if output is not None and output.dtype == call.inputs[0].dtype and schema_of(call.op).name == "aten::sum":
        yield row([P], [P])


@rule(aten("mean"), aten("mean.dim"), empty=True)
def mean(call: Call) -> Iterable[Row]:
    yield from _reduction(call, P, compute=_local_share_of_mean, anywhere=True)
    yield row([P], [P])


def _local_share_of_mean(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    """Divide this rank's sum by the global number of elements, which is correct for uneven shards."""
    named = arguments_by_name(op, args, kwargs)
    dims, dtype = _dims_of(args[0], named.get("dim")), named["dtype"] or args[0].dtype
    count = math.prod(here.shape(0)[dim] for dim in dims)
    total = torch.sum(args[0], dims, named.get("keepdim", False), dtype=accumulated_in(dtype))
    return (total / count).to(dtype)


# --- maxima, norms ------------------------------------------------------------------------------------------------


@rule(*map(aten, ("amax", "amin", "max", "min", "any", "any.dim", "any.dims", "all", "all.dim", "all.dims")))
def extremes(call: Call) -> Iterable[Row]:
    return _reduction(call, R, compute=_extreme, anywhere=True)


def _extreme(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    local = op(*args, **kwargs)
    upper = schema_of(op).name in {"aten::amax", "aten::max", "aten::any"}
    # Some back ends' maximum does not support booleans or NaN: booleans become integers, NaNs are reduced separately.
    values = local.to(torch.uint8) if local.dtype == torch.bool else local
    found = here.all_reduce(values, "max" if upper else "min").to(local.dtype)
    if not local.is_floating_point():
        return found
    undefined = here.all_reduce(local.isnan().to(torch.uint8), "max").bool()
    return found.masked_fill(undefined, math.nan)


@rule(aten("linalg_vector_norm"), empty=True)
def vector_norm(call: Call) -> Iterable[Row]:
    if call["ord"] > 0:
        return _reduction(call, R, compute=_norm_of_norms, anywhere=True)
    return untouched(call, call.dims(), keep=_keep(call))


def _norm_of_norms(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    """Compute (sum of |x|^p over ranks)^(1/p) from each rank's own norm."""
    named = arguments_by_name(op, args, kwargs)
    order, dtype = named["ord"], named["dtype"] or args[0].dtype
    local = op(**{**named, "dtype": accumulated_in(dtype)})
    if order == math.inf:
        found = here.all_reduce(local, "max")
    else:
        found = here.all_reduce(local**order, "sum") ** (1 / order)
    return found.to(dtype.to_real())


# --- variance -----------------------------------------------------------------------------------------------------


@rule(*map(aten, ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")), empty=True)
def variance(call: Call) -> Iterable[Row]:
    return _reduction(call, R, compute=_split_variance, anywhere=True)


def _split_variance(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> Any:
    """Compute the variance in two passes: the global mean, then the squared deviations from it."""
    given, named = args[0], arguments_by_name(op, args, kwargs)
    x = given.to(accumulated_in(given.dtype))
    dims, correction = _dims_of(x, named["dim"]), named["correction"]
    count = math.prod(here.shape(0)[dim] for dim in dims)
    mean = here.all_reduce(x.sum(dims, keepdim=True), "sum") / count
    squares = here.all_reduce((x - mean).abs().square().sum(dims, keepdim=True), "sum")
    variance = squares / max(0, count - (1 if correction is None else correction))
    found = variance.sqrt() if "std" in schema_of(op).name else variance
    found, mean = found.to(given.dtype.to_real()), mean.to(given.dtype)
    shaped = [y if named["keepdim"] else y.squeeze(dims) for y in (found, mean)]
    return tuple(shaped) if len(schema_of(op).returns) > 1 else shaped[0]


# --- softmax ------------------------------------------------------------------------------------------------------


@rule(aten("_softmax"), aten("_log_softmax"), empty=True)
def softmax(call: Call) -> Iterable[Row]:
    dims = call.dims()
    yield from untouched(call, dims, keep=True)
    if dims and not call["half_to_float"]:
        yield row([S(dims[0])], [S(dims[0])], compute=_split_softmax, anywhere=True)


def _split_softmax(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    """Compute exp(x - m) / s with the maximum m and the sum s over all ranks."""
    given, dim = args[:2]
    x = given.to(accumulated_in(given.dtype))
    shifted = x - here.all_reduce(_max_or_lowest(x, dim), "max")
    exps = shifted.exp()
    total = here.all_reduce(exps.sum(dim, keepdim=True), "sum")
    found = shifted - total.log() if schema_of(op).name == "aten::_log_softmax" else exps / total
    return found.to(given.dtype)


def _max_or_lowest(x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.shape[dim]:
        return x.amax(dim, keepdim=True)
    shape = list(x.shape)
    shape[dim] = 1
    return x.new_full(shape, -math.inf)


@rule(aten("_softmax_backward_data"), aten("_log_softmax_backward_data"), empty=True)
def softmax_backward(call: Call) -> Iterable[Row]:
    dims = call.dims()
    yield from untouched(call, dims, keep=True, others=1)
    if dims and call["input_dtype"] == call.inputs[0].dtype:
        yield row([S(dims[0])], [S(dims[0])] * 2, compute=_split_softmax_backward, anywhere=True)


def _split_softmax_backward(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    wide = accumulated_in(args[0].dtype)
    grad, output, dim = args[0].to(wide), args[1].to(wide), args[2]
    if schema_of(op).name == "aten::_softmax_backward_data":
        weighted = grad * output
        found = weighted - output * here.all_reduce(weighted.sum(dim, keepdim=True), "sum")
    else:
        found = grad - output.exp() * here.all_reduce(grad.sum(dim, keepdim=True), "sum")
    return found.to(args[0].dtype)


@rule(aten("logsumexp"), empty=True)
def logsumexp(call: Call) -> Iterable[Row]:
    return _reduction(call, R, compute=_split_logsumexp, anywhere=True)


def _split_logsumexp(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    local = op(args[0].to(accumulated_in(args[0].dtype)), *args[1:], **kwargs)
    top = here.all_reduce(local, "max")
    shift = top.masked_fill(top.isinf(), 0)
    return (here.all_reduce((local - shift).exp(), "sum").log() + shift).to(args[0].dtype)


# --- ops whose own dims are not sharded ---------------------------------------------------------------------------

_MIXING = (
    "_safe_softmax",
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "cummax",
    "cummin",
    "sort",
    "sort.stable",
    "argsort",
    "argsort.stable",
    "topk",
    "flip",
    "roll",
)
_LINEAR = {"aten::cumsum", "aten::flip", "aten::roll"}


@rule(*map(aten, _MIXING), empty=True)
def mixing(call: Call) -> Iterable[Row]:
    """Shard the dims that the op does not name; the named ones may change their length."""
    dims = call.dims("dims" if "dims" in call.values else "dim")
    yield from untouched(call, dims, keep=True)
    if schema_of(call.op).name in _LINEAR:
        yield row([P], [P])


@rule(aten("glu"))
def glu(call: Call) -> Iterable[Row]:
    """Shard all dims but the one whose halves gate each other."""
    return untouched(call, call.dims(), keep=True)


@rule(aten("glu_backward"))
def glu_backward(call: Call) -> Iterable[Row]:
    yield from untouched(call, call.dims(), keep=True, others=1)
    yield row([P], [P, R])


@rule(aten("renorm"))
def renorm(call: Call) -> Iterable[Row]:
    """Shard the slices along one dim; a slice itself is not sharded, since its norm is limited."""
    yield row([S(call.dim())], [S(call.dim())])


_REDUCING = (
    "max.dim",
    "min.dim",
    "argmax",
    "argmin",
    "prod.dim_int",
    "norm.ScalarOpt_dim",
    "median.dim",
    "nanmedian.dim",
    "mode",
    "kthvalue",
    "aminmax",
)


@rule(*map(aten, _REDUCING))
def reducing(call: Call) -> Iterable[Row]:
    if call.values.get("dim") is not None:
        yield from untouched(call, call.dims(), keep=_keep(call))
