"""Shapes as one types them, `2x128` or `ids=2x128:int64`, for tensors of torch and arrays of JAX alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from shardlib.cli.usage import UsageError
from shardlib.errors import nearest

__all__ = ["no_dtype", "read_shapes"]

_EXAMPLE = re.compile(r"(?:(\w+)=)?(\d+(?:x\d+)*)(?::(\w+))?")


def read_shapes(given: list[str], make: Callable[[str, tuple[int, ...], str], Any]) -> Any:
    """Return the inputs that the options describe, all by position, or all by name.

    `make` is given the option, the sizes and the name of the dtype.
    """
    inputs = [_input(text, make) for text in given]
    named = {name: made for name, made in inputs if name}
    if named and len(named) < len(inputs):
        raise UsageError(f"--example {', '.join(given)}: give a different name to every input, or a name to none.")
    return named or tuple(made for _, made in inputs)


def no_dtype(text: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for a name that is not a dtype."""
    return UsageError(
        f'--example "{text}": "{name}" is not a dtype, as "int64" or "bfloat16" are.{nearest(name, known)}'
    )


def _input(text: str, make: Callable[[str, tuple[int, ...], str], Any]) -> tuple[str | None, Any]:
    match = _EXAMPLE.fullmatch(text)
    if match is None:
        raise UsageError(
            f'--example "{text}" cannot be read; write a shape, and a name or dtype if needed, as in 2x128 or '
            "pixels=2x3x224x224:float32."
        )
    name, sizes, dtype_name = match.groups()
    return name, make(text, tuple(int(size) for size in sizes.split("x")), dtype_name or "int64")
