"""Ops along dims: a split of any other dim stays. Sums over a split dim are left to be done (Partial)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardlib.engine.ops._rows import Call, Here, Op, P, Row, S, aten, row, rule

__all__: list[str] = []


def untouched(call: Call, dims: tuple[int, ...], *, keep: bool, others: int = 0) -> Iterator[Row]:
    """Split each dim of operand 0 that the op leaves alone. `others` more operands have the outputs' shape."""
    ndim = call.inputs[0].ndim
    for dim in range(ndim):
        if dim not in dims:
            out = dim if keep else dim - sum(d < dim for d in dims)
            yield row([S(out)] * len(call.outputs), [S(dim), *[S(out)] * others])


@rule(aten("sum"), aten("sum.dim_IntList"), aten("nansum"), empty=True)
def sums(call: Call) -> Iterable[Row]:
    dims = call.dims() if "dim" in call.values else tuple(range(call.inputs[0].ndim))
    yield from untouched(call, dims, keep=bool(call.values.get("keepdim")))
    output = call.outputs[0]
    if output is not None and output.dtype != torch.bool:
        for dim in dims:
            yield row([P], [S(dim)])
    if output is not None and output.dtype == call.inputs[0].dtype and call.op._schema.name == "aten::sum":
        yield row([P], [P])


@rule(aten("mean"), aten("mean.dim"), empty=True)
def mean(call: Call) -> Iterable[Row]:
    dims = call.dims() if "dim" in call.values else tuple(range(call.inputs[0].ndim))
    yield from untouched(call, dims, keep=bool(call.values.get("keepdim")))
    for dim in dims:
        yield row([P], [S(dim)], compute=_local_share_of_mean)
    yield row([P], [P])


def _local_share_of_mean(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    """This rank's sum over the number of elements of the whole: right for uneven shards."""
    x, dims, keep = args[0], args[1] if len(args) > 1 else None, args[2] if len(args) > 2 else False
    dims = list(range(x.ndim)) if dims is None or dims == [] else dims
    count = 1
    for dim in [dims] if isinstance(dims, int) else dims:
        count *= here.shape(0)[dim]
    return torch.sum(x, dims, keep, dtype=kwargs.get("dtype")) / count


@rule(
    *map(
        aten,
        (
            "_softmax",
            "_log_softmax",
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
        ),
    ),
    empty=True,
)
def along_dim(call: Call) -> Iterable[Row]:
    """One dim (or several) is mixed, the shape of the others is kept."""
    dims = call.dims("dims" if "dims" in call.values else "dim")
    if call.op._schema.name == "aten::roll" and not call["dims"]:
        return
    yield from untouched(call, dims, keep=True)
    if call.op._schema.name in {"aten::cumsum", "aten::flip", "aten::roll"}:
        yield row([P], [P])


@rule(aten("renorm"), empty=True)
def renorm(call: Call) -> Iterable[Row]:
    """Norms of the slices along one dim: slices may be split among ranks, not cut."""
    yield row([S(call.dim())], [S(call.dim())])


@rule(aten("_softmax_backward_data"), aten("_log_softmax_backward_data"), empty=True)
def softmax_backward(call: Call) -> Iterable[Row]:
    dims = call.dims()
    yield from untouched(call, dims, keep=True, others=1)


@rule(
    *map(
        aten,
        (
            "amax",
            "amin",
            "max.dim",
            "min.dim",
            "argmax",
            "argmin",
            "prod.dim_int",
            "any.dim",
            "any.dims",
            "all.dim",
            "all.dims",
            "logsumexp",
            "var.dim",
            "var.correction",
            "var_mean.correction",
            "std.correction",
            "std_mean.correction",
            "norm.ScalarOpt_dim",
            "linalg_vector_norm",
            "median.dim",
            "nanmedian.dim",
            "mode",
            "kthvalue",
            "count_nonzero.dim_IntList",
            "aminmax",
        ),
    ),
    empty=True,
)
def reduced(call: Call) -> Iterable[Row]:
    """Reductions that are no sums: only dims that are not reduced may be split."""
    if call.values.get("dim") is None:
        return
    yield from untouched(call, call.dims(), keep=bool(call.values.get("keepdim")))
