"""Linear algebra and transforms: batch dims may be sharded, the matrices (or transformed dims) may not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardlib.engine.ops._rows import Call, Here, Op, P, R, Row, S, aten, row, rule
from shardlib.engine.ops._rules._reductions import untouched

__all__: list[str] = []


@rule(
    *map(
        aten,
        (
            "linalg_cholesky_ex",
            "cholesky",
            "cholesky_inverse",
            "linalg_inv_ex",
            "linalg_qr",
            "_linalg_svd",
            "_linalg_eigh",
            "linalg_eig",
            "_linalg_eigvals",
            "linalg_lu_factor_ex",
            "linalg_lu",
            "linalg_ldl_factor_ex",
            "_linalg_det",
            "_linalg_slogdet",
            "linalg_matrix_exp",
            "geqrf",
        ),
    )
)
def one_matrix(call: Call) -> Iterable[Row]:
    """Shard the batch dims of ops from one matrix to one or several results."""
    for dim in range(call.inputs[0].ndim - 2):
        yield row([None if m is None else S(dim) for m in call.outputs], [S(dim)])


@rule(aten("tril"), aten("tril_"), aten("triu"), aten("triu_"), empty=True)
def triangle(call: Call) -> Iterable[Row]:
    """Shard any dim; the diagonal shifts by the offset of the local shard."""
    ndim = call.inputs[0].ndim
    for dim in range(ndim - 2):
        yield row([S(dim)], [S(dim)])
    for dim in range(ndim - 2, ndim):
        yield row([S(dim)], [S(dim)], compute=_own_triangle)
    yield row([P], [P])


def _own_triangle(op: Op, args: list[Any], kwargs: dict[str, Any], here: Here) -> torch.Tensor:
    ndim, diagonal = args[0].ndim, args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    return op(args[0], diagonal + here.offset(0, ndim - 2) - here.offset(0, ndim - 1))


@rule(
    *map(
        aten,
        ("linalg_solve_triangular", "cholesky_solve", "linalg_householder_product", "ormqr", "triangular_solve"),
    )
)
def several_matrices(call: Call) -> Iterable[Row]:
    """Shard the batch dims, which all operands share."""
    ndims = {meta.ndim for meta in call.inputs} | {m.ndim for m in call.outputs if m is not None}
    if len(ndims) > 1:
        return
    for dim in range(call.inputs[0].ndim - 2):
        if len({meta.shape[dim] for meta in call.inputs}) == 1:
            yield row([S(dim)] * len(call.outputs), [S(dim)] * len(call.inputs))


@rule(aten("_fft_c2c"), aten("_fft_r2c"), aten("_fft_c2r"))
def fourier(call: Call) -> Iterable[Row]:
    yield from untouched(call, call.dims(), keep=True)
    yield row([P], [P])


@rule(aten("linalg_cross"))
def cross(call: Call) -> Iterable[Row]:
    a, b = call.inputs
    for dim in range(a.ndim):
        if dim != call.dim() and a.ndim == b.ndim and a.shape[dim] == b.shape[dim]:
            yield row([S(dim)], [S(dim), S(dim)])
    yield row([P], [P, R])
    yield row([P], [R, P])
