"""What steps have in common: the closure, the parameters that have gradients, arguments, and torch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from shardlib import errors
from shardlib.engine.optimizer import FUSED_DTYPES
from shardlib.errors import InputError

__all__ = ["checked", "has_kernel", "loss_of", "refuse", "with_gradients"]

Closure = Callable[[], Any] | None

_DEVICES = ("cpu", "cuda")


def loss_of(closure: Closure) -> Any:
    """What a closure returns, run with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of a group that have a gradient, each with it."""
    for param in group["params"]:
        if param.grad is not None:
            yield param, param.grad


def has_kernel(param: torch.Tensor, grad: torch.Tensor, dtypes: Collection[torch.dtype] = FUSED_DTYPES) -> bool:
    """Whether torch has a fused kernel for a parameter where it lies. They walk parameter and gradient in step."""
    return param.device.type in _DEVICES and param.dtype in dtypes and grad.stride() == param.stride()


def checked(who: str, **numbers: float) -> None:
    """Refuse what is negative, and what is called a beta and is not in [0, 1).

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
    """Refuse options that have no meaning here: each with its value, the only one that is taken, and the reason.

    Raises:
        InputError: a value is another one.
    """
    for option in options:
        errors.refuse(who, *option, error=InputError)
