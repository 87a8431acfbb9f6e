"""Dtypes of 64 bits that JAX would halve without a word, where `jax_enable_x64` is off."""

from __future__ import annotations

from typing import Any

import jax

from shardlib._dtypes import name_of
from shardlib.errors import InputError

__all__ = ["fitting", "refuse_narrowed"]

_ON = 'Call jax.config.update("jax_enable_x64", True) before the first array is made'


def refuse_narrowed(dtype: Any, what: str, *, convert: str = "the array") -> None:
    """Refuse a floating or complex dtype, of torch or JAX or by name, in which JAX computes with half of the bits."""
    name = name_of(dtype)
    kept = jax.dtypes.canonicalize_dtype(name).name if name in ("float64", "complex128") else name
    if kept != name:
        raise InputError(
            f"{what} is {dtype}, and JAX would silently make it {kept}, since jax_enable_x64 is off. {_ON}, or "
            f"convert {convert}."
        )


def fitting(values: Any, what: str) -> Any:
    """Return integers in the dtype that JAX has for them, and refuse those that it would change; other values as they
    are."""
    dtype = jax.dtypes.canonicalize_dtype(values.dtype)
    if dtype == values.dtype or values.dtype.kind not in "iu":
        return values
    narrow = values.astype(dtype)
    if (values != narrow).any():
        raise InputError(
            f"{what} holds {values.dtype.name} numbers that {dtype.name} cannot hold, and jax_enable_x64 is off. {_ON}."
        )
    return narrow
