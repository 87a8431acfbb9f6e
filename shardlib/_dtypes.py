"""Dtypes by name, so that layouts, rules and plans need neither torch nor JAX.

A value keeps the name of a dtype. It is shown as torch's dtype in a process that has imported torch, and as numpy's
(with those of `ml_dtypes`, which JAX uses) in one that has not.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, TypeVar

import numpy as np

from shardlib.errors import InputError, nearest

__all__ = ["NAMES", "dtype_named", "is_dtype_name", "keeps_dtype_names", "name_of"]

T = TypeVar("T", bound=type[Any])

NAMES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
_SYNONYMS = {"double": "float64", "float": "float32", "half": "float16", "cfloat": "complex64", "cdouble": "complex128"}
_SYNONYMS |= {"long": "int64", "int": "int32", "short": "int16", "chalf": "complex32", "bool_": "bool"}


def name_of(dtype: Any) -> str:
    """Return the name of a dtype of torch, numpy or JAX, or of one that was given by name.

    Raises:
        InputError: it is none of these.

    >>> name_of(np.dtype("int8")), name_of("half")
    ('int8', 'float16')
    """
    try:
        return _name_of(dtype)
    except TypeError:  # it has no hash
        return _name_of.__wrapped__(dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    if isinstance(dtype, str) or (type(dtype).__name__ == "dtype" and type(dtype).__module__ == "torch"):
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, type) and issubclass(dtype, np.generic):
        name = np.dtype(dtype).name
    else:
        name = str(getattr(getattr(dtype, "dtype", dtype), "name", dtype))
    name = _SYNONYMS.get(name, name)
    if not is_dtype_name(name) and (isinstance(dtype, str) or not hasattr(dtype, "itemsize")):
        raise InputError(
            f'{dtype!r} was given as a dtype; give one of torch or numpy, or a name such as "float32" or "bfloat16".'
            f"{nearest(name, NAMES)}"
        )
    return name


def is_dtype_name(name: str) -> bool:
    """Tell whether a dtype has this name: one of `NAMES`, or where torch has been imported, any of torch's.

    >>> is_dtype_name("bfloat16"), is_dtype_name("bfloat61")
    (True, False)
    """
    torch = sys.modules.get("torch")
    return name in NAMES or (torch is not None and isinstance(getattr(torch, name, None), torch.dtype))


def dtype_named(name: str) -> Any:
    """Return the dtype of a name: torch's where torch has been imported, else numpy's.

    >>> str(dtype_named("bfloat16")).removeprefix("torch.")
    'bfloat16'
    """
    return _of_torch(name) if "torch" in sys.modules else _of_numpy(name)


@functools.cache
def _of_torch(name: str) -> Any:
    import torch

    return getattr(torch, name)


@functools.cache
def _of_numpy(name: str) -> Any:
    if hasattr(np, name):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return _of_torch(name)
    return np.dtype(getattr(ml_dtypes, name))


class _Dtype:
    """A field of a dataclass that keeps a dtype by name."""

    def __init__(self, field: str) -> None:
        self.field = field

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        name = vars(owner)[self.field]
        return None if name is None else dtype_named(name)

    def __set__(self, owner: Any, dtype: Any) -> None:
        vars(owner)[self.field] = None if dtype is None else name_of(dtype)


def keeps_dtype_names(cls: T) -> T:
    """Let the fields of a dataclass that are annotated as `torch.dtype` keep names; `vars(value)` has them.

    >>> @keeps_dtype_names
    ... @dataclasses.dataclass(frozen=True)
    ... class Sent:
    ...     dtype: "torch.dtype"
    >>> vars(Sent("bfloat16")), str(Sent("bfloat16").dtype).removeprefix("torch.")
    ({'dtype': 'bfloat16'}, 'bfloat16')
    """
    for field in dataclasses.fields(cls):
        if "torch.dtype" in str(field.type):
            setattr(cls, field.name, _Dtype(field.name))
    return cls
