"""Linear algebra, and Fourier transforms. Factors are LAPACK's in both libraries; status codes are zero.

torch raises for a singular matrix, which a compiled program cannot: JAX gives NaN or infinity there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.errors import InputError
from shardlib.jax._lowerings.gradients import with_gradient_of
from shardlib.jax._table import lowering

__all__: list[str] = []


def _adjoint(x: Any) -> Any:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _good(x: Any) -> Any:
    """Return the status of a factorisation that succeeded, for each matrix of the batch."""
    return jnp.zeros(x.shape[:-2], jnp.int32)


def _nothing(dtype: Any) -> Any:
    return jnp.zeros((0,), dtype)


# --- factorisations -------------------------------------------------------------------------------------------------


@lowering("aten::_linalg_svd.default")
def _svd(
    x: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Any, Any, Any]:
    """Factorise; the vectors that only full matrices have carry no gradient, as in torch."""
    if not compute_uv:
        return _nothing(x.dtype), jnp.linalg.svd(x, compute_uv=False), _nothing(x.dtype)
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    if full_matrices and x.shape[-1] != x.shape[-2]:
        more_u, _, more_vh = jnp.linalg.svd(lax.stop_gradient(x), full_matrices=True)
        count = s.shape[-1]
        u = jnp.concatenate([u, more_u[..., count:]], axis=-1)
        vh = jnp.concatenate([vh, more_vh[..., count:, :]], axis=-2)
    return u, s, vh


@lowering("aten::_linalg_eigh.default")
def _eigh(x: Any, uplo: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    """Factorise what one triangle says."""
    lower = uplo.upper() == "L"
    vectors, values = lax.linalg.eigh(_hermitian(x, lower), lower=lower, symmetrize_input=False)
    return values, vectors if compute_v else _nothing(x.dtype)


def _hermitian(x: Any, lower: bool) -> Any:
    """Return the matrix that one triangle of `x` says. The gradient is Hermitian, and goes to both, as torch's."""
    diagonal = jnp.real(jnp.diagonal(x, axis1=-2, axis2=-1))
    strict = jnp.tril(x, -1) if lower else jnp.triu(x, 1)
    made = strict + _adjoint(strict) + jnp.eye(x.shape[-1], dtype=x.dtype) * diagonal[..., None, :].astype(x.dtype)
    return with_gradient_of(made, (x + _adjoint(x)) / 2)


@lowering("aten::linalg_eig.default")
def _eig(x: Any) -> tuple[Any, Any]:
    """Factorise; eigenvectors have norm one, and torch's gradient, which a change of their phases is not in."""
    values, vectors = lax.linalg.eig(x, compute_left_eigenvectors=False, enable_eigvec_derivs=True)
    return values, vectors


@lowering("aten::linalg_eigvals.default", "aten::_linalg_eigvals.default")
def _eigvals(x: Any) -> Any:
    return jnp.linalg.eigvals(x)


@lowering("aten::linalg_qr.default")
def _qr(x: Any, mode: str = "reduced") -> tuple[Any, Any]:
    if mode == "r":
        return _nothing(x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


@lowering("aten::geqrf.default")
def _geqrf(x: Any) -> tuple[Any, Any]:
    reflectors, scales = jnp.linalg.qr(x, mode="raw")
    return jnp.swapaxes(reflectors, -1, -2), scales


@lowering("aten::linalg_householder_product.default")
def _householder_product(reflectors: Any, scales: Any) -> Any:
    m, n = reflectors.shape[-2:]
    eye = jnp.broadcast_to(jnp.eye(m, n, dtype=reflectors.dtype), reflectors.shape)
    return _reflected(reflectors, scales, eye, adjoint=False)


def _reflected(reflectors: Any, scales: Any, x: Any, *, adjoint: bool) -> Any:
    """Apply `H_1 H_2 ... H_k`, or its adjoint, from the left; `H_i = 1 - scale_i v_i v_i^H`."""
    count = scales.shape[-1]
    m, n = reflectors.shape[-2:]
    below = jnp.tril(reflectors, -1) + jnp.eye(m, n, dtype=reflectors.dtype)
    for i in range(count) if adjoint else reversed(range(count)):
        v = below[..., :, i : i + 1]
        scale = scales[..., i, None, None]
        x = x - (jnp.conj(scale) if adjoint else scale) * (v @ (_adjoint(v) @ x))
    return x


@lowering("aten::ormqr.default")
def _ormqr(reflectors: Any, scales: Any, x: Any, left: bool = True, transpose: bool = False) -> Any:
    if left:
        return _reflected(reflectors, scales, x, adjoint=transpose)
    return _adjoint(_reflected(reflectors, scales, _adjoint(x), adjoint=not transpose))


@lowering("aten::linalg_cholesky_ex.default")
def _cholesky_ex(x: Any, *, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    return _cholesky(x, upper), _good(x)


@lowering("aten::cholesky.default")
def _cholesky(x: Any, upper: bool = False) -> Any:
    """Factorise what one triangle says."""
    factor = lax.linalg.cholesky(_hermitian(x, not upper), symmetrize_input=False)
    return _adjoint(factor) if upper else factor


@lowering("aten::cholesky_solve.default")
def _cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    return _solve_product(_adjoint(factor) if upper else factor, b)


@jax.custom_jvp
def _solve_product(lower: Any, b: Any) -> Any:
    """Solve `lower lower^H x = b`. The gradient of the factor is not only of its triangle, as in torch."""
    return _triangular(_adjoint(jnp.tril(lower)), _triangular(lower, b, upper=False), upper=True)


@_solve_product.defjvp
def _solve_product_jvp(primals: Any, tangents: Any) -> Any:
    (lower, b), (lower_dot, b_dot) = primals, tangents
    x, triangle = _solve_product(lower, b), jnp.tril(lower)
    product_dot = lower_dot @ _adjoint(triangle) + triangle @ _adjoint(lower_dot)
    return x, _solve_product(lower, b_dot - product_dot @ x)


@lowering("aten::cholesky_inverse.default")
def _cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    return _cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowering("aten::linalg_lu_factor_ex.default")
def _lu_factor_ex(x: Any, *, pivot: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any]:
    if not pivot:
        raise InputError("An LU factorisation without pivots has no lowering. Leave pivot=False out.")
    factors, pivots, _ = lax.linalg.lu(x)
    return factors, pivots + 1, _good(x)


@lowering("aten::linalg_lu.default")
def _lu(x: Any, *, pivot: bool = True) -> tuple[Any, Any, Any]:
    factors, pivots, _ = _lu_factor_ex(x, pivot=pivot)
    return _lu_unpack(factors, pivots)


@lowering("aten::lu_unpack.default")
def _lu_unpack(factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> tuple[Any, Any, Any]:
    m, n = factors.shape[-2:]
    count = min(m, n)
    nothing = _nothing(factors.dtype)
    order = lax.linalg.lu_pivots_to_permutation(pivots - 1, m)
    rows = jax.nn.one_hot(order, m, axis=-2, dtype=factors.dtype)
    lower = jnp.tril(factors[..., :, :count], -1) + jnp.eye(m, count, dtype=factors.dtype)
    upper = jnp.triu(factors[..., :count, :])
    return rows if unpack_pivots else nothing, *((lower, upper) if unpack_data else (nothing, nothing))


@lowering("aten::linalg_lu_solve.default")
def _lu_solve(factors: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:  # x a = b is a^H x^H = b^H
        return _adjoint(_lu_solve(factors, pivots, _adjoint(b), adjoint=not adjoint))
    rows, lower, upper = _lu_unpack(factors, pivots)
    if adjoint:
        return rows @ _triangular(_adjoint(lower), _triangular(_adjoint(upper), b, upper=False), upper=True)
    return _triangular(upper, _triangular(lower, _adjoint(rows) @ b, upper=False), upper=True)


# --- equations ------------------------------------------------------------------------------------------------------


def _triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unit: bool = False) -> Any:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unit)


@lowering("aten::linalg_solve_triangular.default")
def _solve_triangular(a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    return _triangular(a, b, upper=upper, left=left, unit=unitriangular)


@lowering("aten::triangular_solve.default")
def _triangular_solve(
    b: Any, a: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    full = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    a = jnp.swapaxes(full, -1, -2) if transpose else full
    return _triangular(a, b, upper=upper != transpose, unit=unitriangular), full


@lowering("aten::_linalg_solve_ex.default")
def _solve_ex(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any, Any]:
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    columns = b[..., None] if vector else b
    batch = jnp.broadcast_shapes(a.shape[:-2], columns.shape[:-2])
    full, columns = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, columns))
    x = (
        jnp.linalg.solve(full, columns)
        if left
        else jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(full, -1, -2), jnp.swapaxes(columns, -1, -2)), -1, -2)
    )
    return x[..., 0] if vector else x, None, None, _good(a)  # torch's backward reads the factors


# torch checks the status in these, which has an effect beside the result.
@lowering("aten::linalg_inv.default", "aten::inverse.default")
def _inv(x: Any) -> Any:
    return jnp.linalg.inv(x)


@lowering("aten::linalg_tensorinv.default")
def _tensorinv(x: Any, ind: int = 2) -> Any:
    return jnp.linalg.tensorinv(x, ind)


@lowering("aten::linalg_solve.default")
def _solve(a: Any, b: Any, *, left: bool = True) -> Any:
    return _solve_ex(a, b, left=left)[0]


@lowering("aten::linalg_cholesky.default")
def _linalg_cholesky(x: Any, *, upper: bool = False) -> Any:
    return _cholesky(x, upper)


@lowering("aten::linalg_lu_factor.default")
def _lu_factor(x: Any, *, pivot: bool = True) -> tuple[Any, Any]:
    return _lu_factor_ex(x, pivot=pivot)[:2]


@lowering("aten::linalg_inv_ex.default")
def _inv_ex(x: Any, *, check_errors: bool = False) -> tuple[Any, Any]:
    return jnp.linalg.inv(x), _good(x)


@lowering("aten::linalg_pinv.atol_rtol_tensor")
def _pinv(x: Any, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    """Return the pseudoinverse, for which singular values up to `max(atol, rtol * largest)` are zeros."""
    if hermitian:
        raise InputError("A pseudoinverse with hermitian=True has no lowering. Leave the option out.")
    if rtol is None:
        rtol = jnp.finfo(x.dtype).eps * max(x.shape[-2:]) if atol is None else 0.0
    if atol is not None:
        largest = jnp.max(jnp.linalg.svd(lax.stop_gradient(x), compute_uv=False), axis=-1, initial=0)
        rtol = jnp.maximum(rtol, jnp.where(largest > 0, atol / jnp.where(largest > 0, largest, 1), 0))
    return jnp.linalg.pinv(x, rtol=lax.stop_gradient(rtol))


@lowering("aten::_linalg_det.default")
def _det(x: Any) -> tuple[Any, Any, Any]:
    return jnp.linalg.det(x) if x.size else jnp.ones(x.shape[:-2], x.dtype), None, None


@lowering("aten::_linalg_slogdet.default")
def _slogdet(x: Any) -> tuple[Any, Any, Any, Any]:
    return *jnp.linalg.slogdet(x), None, None


@lowering("aten::linalg_matrix_exp.default")
def _matrix_exp(x: Any) -> Any:
    return jax.scipy.linalg.expm(x)


# --- Fourier transforms ---------------------------------------------------------------------------------------------


def _normalised(x: Any, count: int, normalization: int) -> Any:
    """Divide by nothing, by the root of the number of points, or by it."""
    return x * (1, 1 / math.sqrt(count), 1 / count)[normalization]


def _transformed(x: Any, dims: Sequence[int], forward: bool) -> Any:
    for dim in dims:
        x = jnp.fft.fft(x, axis=dim) if forward else jnp.fft.ifft(x, axis=dim, norm="forward")
    return x


@lowering("aten::_fft_c2c.default")
def _fft_c2c(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    return _normalised(_transformed(x, dim, forward), math.prod(x.shape[d] for d in dim), normalization)


@lowering("aten::_fft_r2c.default")
def _fft_r2c(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    last = jnp.fft.rfft(x, axis=dim[-1]) if onesided else jnp.fft.fft(x, axis=dim[-1])
    return _normalised(_transformed(last, dim[:-1], True), math.prod(x.shape[d] for d in dim), normalization)


@lowering("aten::_fft_c2r.default")
def _fft_c2r(x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    others = _transformed(x, dim[:-1], False)
    y = jnp.fft.irfft(others, last_dim_size, axis=dim[-1], norm="forward")
    return _normalised(y, math.prod(y.shape[d] for d in dim), normalization)
