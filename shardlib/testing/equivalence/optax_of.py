"""Optimizers of torch as transformations of optax, one for each parameter: element by element they do the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardlib.errors import InputError

__all__ = ["Stepper", "stepper_of"]


@dataclass(frozen=True)
class Stepper:
    """The optax transformation of one parameter.

    Attributes:
        transformation: the optax transformation.
        state: names of torch's state, and what optax calls the same.
    """

    transformation: Any
    state: Mapping[str, str]


def stepper_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Stepper:
    """Return optax's equivalent of a parameter group of `torch.optim.AdamW`, `Adam` or `SGD`.

    Raises:
        InputError: another optimizer, or an option that optax's has not.
    """
    kind = type(optimizer)
    if kind not in _OF:
        raise InputError(
            f'equivalent(engine="jax") was given an optimizer= that makes {kind.__module__}.{kind.__qualname__}; '
            "torch.optim.AdamW, Adam and SGD have a twin in optax. Use one of them; the JAX engine's gradients are "
            "the same for any other."
        )
    if asked := [name for name in ("amsgrad", "maximize", "dampening") if group.get(name)]:
        raise InputError(
            f'equivalent(engine="jax") was given {kind.__name__} with {asked[0]}={group[asked[0]]!r}, which optax has '
            "not, or has otherwise. Leave it out."
        )
    return _OF[kind](group)


def _adam(group: Mapping[str, Any]) -> Stepper:
    """Return the equivalent of `AdamW` and `Adam`, whose decay is added to the gradient."""
    import optax

    b1, b2 = (float(beta) for beta in group["betas"])
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    if group.get("decoupled_weight_decay"):
        made = optax.adamw(rate, b1, b2, eps=group["eps"], weight_decay=decay)
    else:
        made = optax.chain(optax.add_decayed_weights(decay), optax.adam(rate, b1, b2, eps=group["eps"]))
    return Stepper(made, {"step": "count", "exp_avg": "mu", "exp_avg_sq": "nu"})


def _sgd(group: Mapping[str, Any]) -> Stepper:
    import optax

    momentum = float(group["momentum"])
    made = optax.sgd(float(group["lr"]), momentum or None, nesterov=bool(group["nesterov"]))
    made = optax.chain(optax.add_decayed_weights(float(group["weight_decay"])), made)
    return Stepper(made, {"momentum_buffer": "trace"} if momentum else {})


_OF: dict[type, Callable[[Mapping[str, Any]], Stepper]] = {
    torch.optim.AdamW: _adam,
    torch.optim.Adam: _adam,
    torch.optim.SGD: _sgd,
}
