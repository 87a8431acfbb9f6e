"""Activation checkpointing: some modules recompute their forward in backward instead of saving activations.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, by `torch.utils.checkpoint`. The wrapper is the
outermost one around a module's call: a recomputed module passes its regions, its compiled graph and its unit as in
forward. Units that it is a part of are unsharded again (`units.py`), as they are for the model's own checkpointing.
Names, hooks and state dicts do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from shardlib.errors import PlanError, nearest
from shardlib.rules.patterns import compile_pattern

__all__ = ["modules_to_recompute", "recompute_in"]


def modules_to_recompute(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return a name of each module that patterns match, in the model's order; a module may have several names.

    Raises:
        PlanError: a pattern matches no module.

    >>> modules_to_recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["^0"])
    ('0',)
    """
    names = {name: one for name, one in model.named_modules(remove_duplicate=False) if name} if patterns else {}
    compiled = {text: compile_pattern(text) for text in patterns}
    for text, pattern in compiled.items():
        if not any(map(pattern.matches, names)):
            raise PlanError(
                f'checkpoint_activations("{text}"): the pattern matches none of the {len(names)} modules; patterns are '
                f"written as in rules.{nearest(text, names)}"
            )
    found: dict[nn.Module, str] = {}
    for name, module in names.items():
        if any(pattern.matches(name) for pattern in compiled.values()):
            found.setdefault(module, name)
    return tuple(found.values())


def recompute_in(module: nn.Module) -> Callable[..., Any]:
    """Return the function that calls a module's forward, and calls it again in backward instead of saving activations.

    The second call ends where it has made all tensors that backward needs. torch takes the noise of `nn.RReLU` before
    the op has drawn it, so a call that ends there goes back with memory that nothing was written into: a module that
    has one is called to its end.
    """
    to_end = any(isinstance(child, nn.RReLU) for child in module.modules())
    return functools.partial(_recompute, stop=not to_end)


def _recompute(inner: Callable[..., Any], *args: Any, stop: bool, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    call = functools.partial(checkpoint, functools.partial(inner, **kwargs), *args, use_reentrant=False)
    if stop:
        return call()
    with set_checkpoint_early_stop(False):
        return call()
