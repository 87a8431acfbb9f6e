"""Helpers of optimizer steps: the closure, parameters with gradients, arguments, and torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from shardlib import errors
from shardlib.engine.data.optimizer import FUSED_DTYPES
from shardlib.errors import InputError

__all__ = ["checked", "has_kernel", "loss_of", "refuse", "with_gradients"]

Closure = Callable[[], Any] | None

_DEVICES = ("cpu", "cuda")


def loss_of(closure: Closure) -> Any:
    """Run a closure with gradients and return its loss; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over the parameters of a group that have a gradient, each with its gradient."""
    for param in group["params"]:
        if param.grad is not None:
            yield param, param.grad


def has_kernel(param: torch.Tensor, grad: torch.Tensor, dtypes: Collection[torch.dtype] = FUSED_DTYPES) -> bool:
    """Return whether torch has a fused kernel for a parameter. Kernels need equal strides of parameter and gradient."""
    return param.device.type in _DEVICES and param.dtype in dtypes and grad.stride() == param.stride()


def checked(who: str, **numbers: float) -> None:
    """Refuse negative numbers, and betas that are not in [0, 1).

    Raises:
        InputError: one is.

    >>> checked("Lamb", lr=1e-3, beta1=0.9)
    """
    for name, value in numbers.items():
        below_one = name.startswith("beta")
        if not value >= 0 or (below_one and not value < 1):
            raise InputError(
                f"{who} was given {name}={value!r}; give a number from 0 {'below 1' if below_one else 'up'}."
            )


def refuse(who: str, options: Iterable[tuple[str, Any, Any, str]]) -> None:
    """Refuse options that have no meaning here: each with its value, the only accepted value, and the reason.

    Raises:
        InputError: a value is another one.
    """
    for option in options:
        errors.refuse(who, *option, error=InputError)
