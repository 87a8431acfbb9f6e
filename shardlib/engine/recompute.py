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
from torch.utils.checkpoint import checkpoint

from shardlib.errors import PlanError, nearest
from shardlib.rules.patterns import compile_pattern

__all__ = ["modules_to_recompute", "recompute"]


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


def recompute(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `inner`, and call it again in backward instead of saving its activations."""
    if not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    return checkpoint(functools.partial(inner, **kwargs), *args, use_reentrant=False)
