"""Values with other gradients than JAX would give them: those that torch defines."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["absolute", "scale_gradient", "tangent_of", "with_gradient_of"]


@jax.custom_jvp
def with_gradient_of(value: Any, x: Any) -> Any:
    """Return `value`, whose gradient goes to `x`, of the same shape, unchanged.

    >>> jax.grad(lambda x: with_gradient_of(jnp.floor(x), x))(1.5)
    Array(1., dtype=float32, weak_type=True)
    """
    return value


@with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1].astype(primals[0].dtype)


def tangent_of(x: Any) -> Any:
    """Return zeros, whose gradient goes to `x`: what is multiplied with it is the gradient of a sum.

    >>> jax.grad(lambda x: 5 + 3 * tangent_of(x))(jnp.inf)
    Array(3., dtype=float32, weak_type=True)
    """
    return with_gradient_of(jnp.zeros_like(x), x)


@jax.custom_jvp
def scale_gradient(x: Any, factor: Any) -> Any:
    """Return `x`; its gradient is multiplied by `factor`."""
    return x


@scale_gradient.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[0] * primals[1]


def absolute(x: Any) -> Any:
    """Return the absolute value, whose gradient at zero is zero; JAX's (0.10) is one.

    >>> jax.grad(absolute)(0.0)
    Array(0., dtype=float32, weak_type=True)
    """
    return x * lax.stop_gradient(jnp.sign(x)) if jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) else jnp.abs(x)
