"""Activation checkpointing: the activations of a module are not kept after forward, and recomputed in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Plan
from shardlib.errors import PlanError
from shardlib.rules.patterns import compile_pattern
from shardlib.transforms._choose import as_names
from shardlib.transforms._transform import Transform

__all__ = ["CheckpointActivations", "checkpoint_activations"]


def checkpoint_activations(pattern: str | Sequence[str] = "units") -> Transform:
    """Recompute the activations of modules in backward: less memory, one more forward of these modules.

    Several such transforms add up. Buffers change once, as by a forward that is not recomputed.

    Args:
        pattern: patterns of modules, as in rules, or "units" for the repeated blocks that the plan found.

    Raises:
        PlanError: applied to a plan, "units" of a model without repeated blocks.
        RuleError: a pattern that cannot be read.

    >>> import torch
    >>> from torch import nn
    >>> import shardlib as sl
    >>> model = nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    >>> (sl.plan(model, "dp=2", {"**.weight": "out in", "**.bias": "out"}) | checkpoint_activations()).step.recompute
    ('^0.0', '^0.1')
    """
    for text in (pattern,) if isinstance(pattern, str) else pattern:
        compile_pattern(text)
    return CheckpointActivations(as_names(pattern) or ())


@dataclass(frozen=True, repr=False)
class CheckpointActivations(Transform):
    """The transform that `checkpoint_activations` returns."""

    call: ClassVar[str] = "checkpoint_activations"
    pattern: str | tuple[str, ...] = "units"

    def __call__(self, plan: Plan) -> Plan:
        given = (self.pattern,) if isinstance(self.pattern, str) else self.pattern
        patterns = [each for text in given for each in (self._units(plan) if text == "units" else (text,))]
        recompute = tuple(dict.fromkeys((*plan.step.recompute, *patterns)))
        return plan.replace(step=plan.step.replace(recompute=recompute))

    def _units(self, plan: Plan) -> tuple[str, ...]:
        if not plan.repeated:
            raise PlanError(
                f'{self}: the model has no repeated blocks (a ModuleList of two or more) that "units" could mean. Name '
                'the modules, as in checkpoint_activations("layers.*").'
            )
        return tuple(f"^{name}" for name in plan.repeated)
