"""Ops that compute each element by itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.scipy import special

from shardlib.errors import InputError
from shardlib.jax._dtypes import as_dtype, promote, promoted
from shardlib.jax._lowerings.gradients import absolute, scale_gradient, with_gradient_of
from shardlib.jax._table import lowering

__all__: list[str] = []

_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": absolute,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "alias": lambda x: x,
    "angle": lambda x: _argument(x),
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "bitwise_not": jnp.bitwise_not,
    "ceil": jnp.ceil,
    "conj": jnp.conj,
    "conj_physical": jnp.conj,
    "_conj_physical": jnp.conj,
    "_conj": jnp.conj,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": jnp.deg2rad,
    "detach": lax.stop_gradient,
    "detach_copy": lax.stop_gradient,
    "digamma": lambda x: _digamma(x),
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "_neg_view": jnp.negative,
    "frac": lambda x: x - jnp.trunc(x),
    "i0": lambda x: jnp.exp(absolute(x)) * special.i0e(x),
    "imag": jnp.imag,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "lgamma": lambda x: _lgamma(x),
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logical_not": jnp.logical_not,
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "neg": jnp.negative,
    "positive": lambda x: x,
    "rad2deg": jnp.rad2deg,
    "real": jnp.real,
    "reciprocal": lambda x: 1 / x,
    "relu": jax.nn.relu,
    "relu6": lambda x: _between(x, 0, 6, flat_at_bounds=True),
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "selu": jax.nn.selu,
    "sgn": jnp.sign,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "signbit": jnp.signbit,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "special_entr": special.entr,
    "special_erfcx": special.erfcx,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_ndtri": lambda x: _ndtri(x),
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
}
# Whole numbers that are not asked to stay whole become the default float.
_WHOLE = {"abs", "alias", "bitwise_not", "ceil", "conj", "detach", "detach_copy", "floor", "imag", "isfinite", "isinf"}
_WHOLE |= {"_conj", "_conj_physical", "_neg_view", "conj_physical"}
_WHOLE |= {"isnan", "logical_not", "neg", "positive", "real", "relu", "relu6", "round", "sgn", "sign", "signbit"}
_WHOLE |= {"square", "trunc"}


def _register_unary(name: str, function: Callable[[Any], Any]) -> None:
    def on_floats(x: Any) -> Any:
        return function(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32))

    lowering(f"aten::{name}.default", elementwise=True)(function if name in _WHOLE else on_floats)


for _name, _function in _UNARY.items():
    _register_unary(_name, _function)


# --- two operands ---------------------------------------------------------------------------------------------------

_BINARY: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "eq": ("Tensor Scalar", jnp.equal),
    "ne": ("Tensor Scalar", jnp.not_equal),
    "lt": ("Tensor Scalar", jnp.less),
    "le": ("Tensor Scalar", jnp.less_equal),
    "gt": ("Tensor Scalar", jnp.greater),
    "ge": ("Tensor Scalar", jnp.greater_equal),
    "mul": ("Tensor Scalar", jnp.multiply),
    "maximum": ("default", jnp.maximum),
    "minimum": ("default", jnp.minimum),
    "max": ("other", jnp.maximum),
    "min": ("other", jnp.minimum),
    "fmax": ("default", lambda a, b: jnp.where((a >= b) | jnp.isnan(b), a, b)),  # of equals the first has the gradient
    "fmin": ("default", lambda a, b: jnp.where((a <= b) | jnp.isnan(b), a, b)),
    "floor_divide": ("default Scalar", jnp.floor_divide),
    "remainder": ("Tensor Scalar", jnp.remainder),
    "fmod": ("Tensor Scalar", jnp.fmod),
    "pow": ("Tensor_Tensor Scalar", lambda a, b: _powers(a, b)),
    "bitwise_and": ("Tensor Scalar", jnp.bitwise_and),
    "bitwise_or": ("Tensor Scalar", jnp.bitwise_or),
    "bitwise_xor": ("Tensor Scalar", jnp.bitwise_xor),
    "bitwise_left_shift": ("Tensor Tensor_Scalar", jnp.left_shift),
    "bitwise_right_shift": ("Tensor Tensor_Scalar", jnp.right_shift),
    "__and__": ("Tensor Scalar", jnp.bitwise_and),
    "__or__": ("Tensor Scalar", jnp.bitwise_or),
    "__xor__": ("Tensor Scalar", jnp.bitwise_xor),
    "logical_and": ("default", jnp.logical_and),
    "logical_or": ("default", jnp.logical_or),
    "logical_xor": ("default", jnp.logical_xor),
    "hypot": ("default", lambda a, b: _hypotenuses(a, b)),
    "atan2": ("default", lambda a, b: _angle(*jnp.broadcast_arrays(*_floats(a, b)))),
    "logaddexp": ("default", jnp.logaddexp),
    "gcd": ("default", jnp.gcd),
    "igamma": ("default", special.gammainc),
    "igammac": ("default", special.gammaincc),
    "lcm": ("default", jnp.lcm),
    "special_xlog1py": ("default other_scalar self_scalar", lambda a, b: _product_of_log(special.xlog1py, a, b, -1)),
    "xlogy": ("Tensor Scalar_Other Scalar_Self", lambda a, b: _product_of_log(special.xlogy, a, b, 0)),
}


def _powers(a: Any, b: Any) -> Any:
    return _power(*jnp.broadcast_arrays(a, b))


@jax.custom_jvp
def _power(a: Any, b: Any) -> Any:
    """Return powers; at zero, whose logarithm is infinite, gradients are torch's."""
    return jnp.power(a, b)


@_power.defjvp
def _power_jvp(primals: Any, tangents: Any) -> Any:
    (a, b), (a_dot, b_dot) = primals, tangents
    value, flat = _power(a, b), (a == 0) & (jnp.real(b) >= 0)
    of_a = jnp.where(b == 0, 0, b * _power(a, jnp.where(b == 0, 1, b) - 1))
    of_b = jnp.where(flat, 0, value * jnp.log(jnp.where(flat, 1, a)))
    return value, a_dot * of_a + b_dot * of_b


def _hypotenuses(a: Any, b: Any) -> Any:
    return _hypot(*jnp.broadcast_arrays(a, b))


@jax.custom_jvp
def _hypot(a: Any, b: Any) -> Any:
    return jnp.hypot(a, b)


@_hypot.defjvp
def _hypot_jvp(primals: Any, tangents: Any) -> Any:
    value = _hypot(*primals)
    return value, (primals[0] * tangents[0] + primals[1] * tangents[1]) / value


def _argument(x: Any) -> Any:
    """Return the angle of complex numbers; of real ones pi or zero, also for minus zero."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(jnp.pi, x.dtype), 0))


def _angle(y: Any, x: Any) -> Any:
    """Return `atan2(y, x)`, without a gradient at the origin."""
    origin = (y == 0) & (x == 0)
    return jnp.arctan2(*(jnp.where(origin, lax.stop_gradient(each), each) for each in (y, x)))


def _product_of_log(function: Callable[[Any, Any], Any], a: Any, b: Any, pole: float) -> Any:
    """Return `a log(b)`, or of `1 + b`. Where that is zero times infinity, `a` has no gradient."""
    a, b = _floats(a, b)
    return function(jnp.where((a == 0) & (b <= pole), lax.stop_gradient(a), a), b)


def _floats(*operands: Any) -> list[Any]:
    """Convert operands to torch's result dtype, a float also for integers."""
    dtype = promoted(*operands)
    return [jnp.asarray(x, dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32) for x in operands]


def _register_binary(name: str, overloads: str, function: Callable[[Any, Any], Any]) -> None:
    ops = [f"aten::{name}.{overload}" for overload in overloads.split()]

    @lowering(*ops, elementwise=True)
    def on_promoted(a: Any, b: Any) -> Any:
        return function(*promote(a, b))


for _name, (_overloads, _binary) in _BINARY.items():
    _register_binary(_name, _overloads, _binary)


@lowering("aten::add.Tensor", "aten::add.Scalar", elementwise=True)
def _add(a: Any, b: Any, alpha: float = 1) -> Any:
    a, b = promote(a, b)
    if a.dtype == bool:
        return jnp.logical_or(a, b)
    return a + (b if alpha == 1 else b * alpha)


@lowering("aten::sub.Tensor", "aten::sub.Scalar", elementwise=True)
def _sub(a: Any, b: Any, alpha: float = 1) -> Any:
    a, b = promote(a, b)
    return a - (b if alpha == 1 else b * alpha)


@lowering("aten::rsub.Tensor", "aten::rsub.Scalar", elementwise=True)
def _rsub(a: Any, b: Any, alpha: float = 1) -> Any:
    return _sub(b, a, alpha)


@lowering("aten::div.Tensor", "aten::div.Scalar", "aten::true_divide.Tensor", elementwise=True)
def _div(a: Any, b: Any) -> Any:
    a, b = _floats(a, b)
    return a / b


@lowering("aten::div.Tensor_mode", "aten::div.Scalar_mode", elementwise=True)
def _div_mode(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _div(a, b)
    a, b = promote(a, b)
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return jnp.trunc(a / b).astype(a.dtype) if jnp.issubdtype(a.dtype, jnp.inexact) else lax.div(*_broadcast(a, b))


def _broadcast(a: Any, b: Any) -> list[Any]:
    return list(jnp.broadcast_arrays(a, b))


@lowering("aten::pow.Tensor_Scalar", elementwise=True)
def _pow(x: Any, exponent: float) -> Any:
    x = x.astype(promoted(x, exponent))
    if float(exponent).is_integer() and abs(exponent) <= 64:
        return lax.integer_pow(x, int(exponent))
    return jnp.sqrt(x) if exponent == 0.5 else jnp.power(x, exponent)


@lowering("aten::round.decimals", elementwise=True)
def _round(x: Any, decimals: int) -> Any:
    """Round to decimals, by torch's formula, which multiplies and divides by whole numbers only."""
    ten = 10 ** abs(decimals)
    return jnp.round(x * ten) / ten if decimals >= 0 else jnp.round(x / ten) * ten


@lowering("aten::logit.default", elementwise=True)
def _logit(x: Any, eps: float | None = None) -> Any:
    (x,) = _floats(x)
    return _logit_of(x) if eps is None else _logit_of(_between(x, eps, 1 - eps, flat_at_bounds=False))


@jax.custom_jvp
def _logit_of(x: Any) -> Any:
    return jnp.log(x / (1 - x))


@_logit_of.defjvp
def _logit_of_jvp(primals: Any, tangents: Any) -> Any:
    (x,) = primals
    return _logit_of(x), tangents[0] * jnp.where((x < 0) | (x > 1), jnp.nan, 1 / (x * (1 - x)))


@lowering("aten::copysign.Tensor", "aten::copysign.Scalar", elementwise=True)
def _copysign(a: Any, b: Any) -> Any:
    """Return `a` with the sign of `b`; the gradient at zero is zero."""
    a, b = _floats(a, b)
    return jnp.copysign(jnp.where(a == 0, lax.stop_gradient(a), a), b)


@lowering("aten::nextafter.default", elementwise=True)
def _nextafter(a: Any, b: Any) -> Any:
    """Return the next number towards `b`; `a` has the gradient."""
    a, b = _broadcast(*promote(a, b))
    value = jnp.nextafter(lax.stop_gradient(a), lax.stop_gradient(b))
    return with_gradient_of(value, jnp.where(a == b, lax.stop_gradient(a), a))


@jax.custom_jvp
def _zeta(s: Any, q: Any) -> Any:
    """Compute Hurwitz's zeta function; JAX's (0.10) is wrong for negative `q`, whose terms are summed here."""
    terms = jnp.where(q < 0, jnp.ceil(-q), 0)

    def add(k: Any, total: Any) -> Any:
        return total + jnp.where(k < terms, (q + k) ** -s, 0)

    total = lax.fori_loop(0, jnp.max(terms, initial=0).astype(jnp.int32), add, jnp.zeros_like(s + q))
    value = total + special.zeta(s, q + terms)
    value = jnp.where((q < 0) & (s != jnp.floor(s)), jnp.nan, value)
    return jnp.where((q <= 0) & (q == jnp.floor(q)), jnp.inf, value)


@functools.partial(_zeta.defjvp, symbolic_zeros=True)
def _zeta_jvp(primals: Any, tangents: Any) -> Any:
    (s, q), (s_dot, q_dot) = primals, tangents
    if not isinstance(s_dot, SymbolicZero):
        raise InputError("zeta() has no derivative by its first argument, in torch neither. Call .detach() on it.")
    value = _zeta(s, q)
    return value, jnp.zeros_like(value) if isinstance(q_dot, SymbolicZero) else -s * _zeta(s + 1, q) * q_dot


@lowering(
    "aten::special_zeta.default", "aten::special_zeta.other_scalar", "aten::special_zeta.self_scalar", elementwise=True
)
def _special_zeta(s: Any, q: Any) -> Any:
    return _zeta(*_broadcast(*_floats(s, q)))


_ndtri: Any = jax.custom_jvp(special.ndtri)
_digamma: Any = jax.custom_jvp(lambda x: jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x)))
_lgamma: Any = jax.custom_jvp(lambda x: lax.lgamma(x))


@lowering("aten::polygamma.default", elementwise=True)
def _polygamma(n: int, x: Any) -> Any:
    (x,) = _floats(x)
    if n == 0:
        return _digamma(x)
    return (-1) ** (n + 1) * math.factorial(n) * _zeta(jnp.full_like(x, n + 1), x)


# JAX (0.10) has no slope of ndtri at zero and one, and takes those of the others from its own zeta function.
_ndtri.defjvp(
    lambda primals, tangents: (y := _ndtri(*primals), math.sqrt(2 * math.pi) * jnp.exp(y * y / 2) * tangents[0])
)
_digamma.defjvp(lambda primals, tangents: (_digamma(*primals), _polygamma(1, *primals) * tangents[0]))
_lgamma.defjvp(lambda primals, tangents: (_lgamma(*primals), _digamma(*primals) * tangents[0]))


@lowering("aten::frexp.Tensor", elementwise=True)
def _frexp(x: Any) -> Any:
    return jnp.frexp(x)


@lowering("aten::complex.default", elementwise=True)
def _complex(real: Any, imag: Any) -> Any:
    return lax.complex(*_broadcast(real, imag))


@lowering("aten::polar.default", elementwise=True)
def _polar(length: Any, angle: Any) -> Any:
    """Return a complex number; a length of zero has no gradient, as in torch, where a length is positive."""
    length = scale_gradient(length, jnp.sign(length))
    return lax.complex(*_broadcast(length * jnp.cos(angle), length * jnp.sin(angle)))


@lowering("aten::view_as_complex.default")
def _view_as_complex(x: Any) -> Any:
    return lax.complex(x[..., 0], x[..., 1])


@lowering("aten::view_as_real.default")
def _view_as_real(x: Any) -> Any:
    return jnp.stack([x.real, x.imag], axis=-1)


@lowering(
    "aten::where.self", "aten::where.ScalarOther", "aten::where.ScalarSelf", "aten::where.Scalar", elementwise=True
)
def _where(condition: Any, a: Any, b: Any) -> Any:
    return jnp.where(condition, *promote(a, b))


@lowering("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", elementwise=True)
def _masked_fill(x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@lowering("aten::lerp.Scalar", "aten::lerp.Tensor", elementwise=True)
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Interpolate by torch's formula, which meets both ends exactly."""
    return jnp.where(jnp.abs(weight) < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


@lowering("aten::addcmul.default", elementwise=True)
def _addcmul(x: Any, a: Any, b: Any, value: float = 1) -> Any:
    return x + value * a * b


@lowering("aten::addcdiv.default", elementwise=True)
def _addcdiv(x: Any, a: Any, b: Any, value: float = 1) -> Any:
    return x + value * a / b


@lowering("aten::clamp.default", elementwise=True)
def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    dtype = promoted(x, *(bound for bound in (min, max) if bound is not None))
    return _between(x.astype(dtype), min, max, flat_at_bounds=not _slope_at_a_bound(tensor=False))


@lowering("aten::clamp.Tensor", elementwise=True)
def _clamp_by_tensors(x: Any, min: Any = None, max: Any = None) -> Any:
    dtype = promoted(x, *(bound for bound in (min, max) if bound is not None))
    if _slope_at_a_bound(tensor=True) == 1:
        if min is not None and max is not None:  # bounds that are equal leave the lower one without a gradient
            min = jnp.where(min == max, lax.stop_gradient(min), min)
        return _between(x.astype(dtype), min, max, flat_at_bounds=False)
    # JAX halves the gradient between equals, as torch does from 2.14 on.
    x = x.astype(dtype) if min is None else jnp.maximum(x, min)
    return x if max is None else jnp.minimum(x, max)


def _between(x: Any, min: Any, max: Any, *, flat_at_bounds: bool) -> Any:
    """Clamp; the gradient at a bound is zero or one, where that of `jnp.clip` is a half."""
    if min is not None:
        x = jnp.where(x <= min if flat_at_bounds else x < min, jnp.asarray(min, x.dtype), x)
    if max is not None:
        x = jnp.where(x >= max if flat_at_bounds else x > max, jnp.asarray(max, x.dtype), x)
    return x


@functools.cache
def _slope_at_a_bound(*, tensor: bool) -> float:
    """Return torch's gradient of clamp at a bound, a number or a tensor: versions differ.

    Whoever traces may have switched gradients off, or chosen a device without values.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        x = torch.zeros((), requires_grad=True)
        return torch.autograd.grad(torch.clamp(x, min=torch.zeros(()) if tensor else 0.0), x)[0].item()


@lowering("aten::clamp_min.default", elementwise=True)
def _clamp_min(x: Any, min: Any) -> Any:
    return _clamp(x, min, None)


@lowering("aten::clamp_max.default", elementwise=True)
def _clamp_max(x: Any, max: Any) -> Any:
    return _clamp(x, None, max)


@lowering("aten::clamp_min.Tensor", elementwise=True)
def _clamp_min_by_tensor(x: Any, min: Any) -> Any:
    return _clamp_by_tensors(x, min, None)


@lowering("aten::clamp_max.Tensor", elementwise=True)
def _clamp_max_by_tensor(x: Any, max: Any) -> Any:
    return _clamp_by_tensors(x, None, max)


@lowering("aten::hardtanh.default", elementwise=True)
def _hardtanh(x: Any, min_val: float = -1, max_val: float = 1) -> Any:
    return _between(x, min_val, max_val, flat_at_bounds=True)


@lowering("aten::hardsigmoid.default", elementwise=True)
def _hardsigmoid(x: Any) -> Any:
    # torch's slope (2.13) is the float32 next to 1/6, in float64 too.
    return scale_gradient(_between(x + 3, 0, 6, flat_at_bounds=True) / 6, float(np.float32(1 / 6)) * 6)


@lowering("aten::hardswish.default", elementwise=True)
def _hardswish(x: Any) -> Any:
    return x * (_between(x + 3, 0, 6, flat_at_bounds=True) / 6)


@lowering("aten::gelu.default", elementwise=True)
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":  # not JAX's, which takes the complement of another term and rounds otherwise
        return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))
    return jax.nn.gelu(x, approximate=True)


@lowering("aten::elu.default", elementwise=True)
def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    below = alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)
    return jnp.where(x > 0, x, below) * jnp.asarray(scale, x.dtype)


@lowering("aten::celu.default", elementwise=True)
def _celu(x: Any, alpha: float = 1) -> Any:
    return _elu(x, alpha, 1, 1 / alpha)


@lowering("aten::leaky_relu.default", elementwise=True)
def _leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    return jnp.where(x > 0, x, x * negative_slope)


@lowering("aten::threshold.default", elementwise=True)
def _threshold(x: Any, threshold: float, value: float) -> Any:
    return jnp.where(x > threshold, x, jnp.asarray(value, x.dtype))


@lowering("aten::softplus.default", elementwise=True)
def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(jnp.where(scaled > threshold, 0, scaled))) / beta)


@lowering("aten::nan_to_num.default", elementwise=True)
def _nan_to_num(x: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@lowering("aten::_to_copy.default", elementwise=True)
def _to_copy(x: Any, dtype: Any = None, **_where_to: Any) -> Any:
    """Convert the dtype; layout, device and memory format have no meaning here."""
    if dtype is None:
        return x
    target = as_dtype(dtype)
    if target.kind == "b":
        return x != 0
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(target, jnp.complexfloating):
        x = x.real
    return x.astype(target)


@lowering("aten::clone.default", "aten::contiguous.default", "aten::lift_fresh_copy.default", elementwise=True)
def _clone(x: Any, memory_format: Any = None) -> Any:
    return x


@lowering("aten::fill.Scalar", "aten::fill.Tensor")
def _fill(x: Any, value: Any) -> Any:
    return jnp.broadcast_to(jnp.asarray(value, x.dtype), x.shape)


@lowering("aten::copy.default")
def _copy(x: Any, source: Any, non_blocking: bool = False) -> Any:
    return jnp.broadcast_to(_to_copy(source, None).astype(x.dtype), x.shape)
