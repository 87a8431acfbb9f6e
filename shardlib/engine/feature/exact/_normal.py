"""Logarithm and normal quantile in float64 from +, -, *, / and square root alone.

IEEE 754 defines the rounding of these five on every processor. It does not define that of `log` or `erfinv`: a library
may give an element other last bits in a vector's tail than inside it, or on another processor, so that a value would
depend on its position in the shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["log", "quantile"]


def log(x: torch.Tensor) -> torch.Tensor:
    """Compute the natural logarithm of positive numbers, to about one unit in the last place.

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)), and log m = 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172. The
    first term of artanh's series that is left out, s**23 / 23, is below 2**-62 of s.
    """
    m, e = torch.frexp(x)
    low = m < math.sqrt(0.5)
    m = torch.where(low, m * 2, m)
    e = (e - low.to(e.dtype)).to(x.dtype)
    s = (m - 1) / (m + 1)
    squared = s * s
    series = _polynomial([1 / k for k in range(1, 23, 2)], squared)
    return e * _LOG_2_HIGH + (series * s * 2 + e * _LOG_2_LOW)


# log 2 in two parts, the first short enough that its product with an exponent is exact.
_LOG_2_HIGH = 6.93147180369123816490e-01
_LOG_2_LOW = 1.90821492927058770002e-10


def quantile(x: torch.Tensor) -> torch.Tensor:
    """Compute the quantile of the standard normal distribution at probability (x + 1) / 2, for x in (-1, 1).

    Wichura's algorithm AS 241 (Applied Statistics 37, 1988), PPND16: about 16 digits.
    """
    q = x * 0.5
    r = 0.180625 - q * q
    z = q * _polynomial(_A, r) / _polynomial(_B, r)
    tail = (q.abs() > 0.425).nonzero().squeeze(1)
    if not len(tail):
        return z
    outer = q[tail]
    r = (-log(0.5 - outer.abs())).sqrt()
    near, far = r - 1.6, r - 5.0
    value = torch.where(
        r <= 5.0,
        _polynomial(_C, near) / _polynomial(_D, near),
        _polynomial(_E, far) / _polynomial(_F, far),
    )
    z[tail] = torch.where(outer < 0, -value, value)
    return z


def _polynomial(coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    """Evaluate a polynomial, its constant term first, by Horner's rule. Products and sums are rounded, never fused."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value.mul_(x).add_(coefficient)
    return value


# fmt: off
_A = (3.3871328727963666080e0, 1.3314166789178437745e+2, 1.9715909503065514427e+3, 1.3731693765509461125e+4,
      4.5921953931549871457e+4, 6.7265770927008700853e+4, 3.3430575583588128105e+4, 2.5090809287301226727e+3)
_B = (1.0, 4.2313330701600911252e+1, 6.8718700749205790830e+2, 5.3941960214247511077e+3,
      2.1213794301586595867e+4, 3.9307895800092710610e+4, 2.8729085735721942674e+4, 5.2264952788528545610e+3)
_C = (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
      1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4)
_D = (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
      1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9)
_E = (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
      2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7)
_F = (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
      7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15)
# fmt: on
