"""Options of trainers: transforms as users give them, and options that a sharded model refuses."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlib._plan import Plan
from shardlib.errors import PlanError
from shardlib.transforms import parse

__all__ = ["Transforms", "as_transforms", "leaving_steps_to", "refuse", "without_loss_scale"]

Transforms = str | Callable[[Plan], Plan] | Sequence[Callable[[Plan], Plan]] | None


def as_transforms(given: Transforms) -> tuple[Callable[[Plan], Plan], ...]:
    """Return transforms that were given as text, one, several or none.

    >>> as_transforms("zero(2)")
    (zero(2),)
    """
    if not given:
        return ()
    if isinstance(given, str):
        return (parse(given),)
    return (given,) if callable(given) else tuple(given)


def leaving_steps_to(host: str, *, accumulate: str, fp16: str) -> Callable[[Plan], Plan]:
    """Return a transform that refuses plans whose steps only an `OptimizerWrapper` takes, before anything is sharded.

    Args:
        host: the library whose loop takes the steps.
        accumulate: the host's argument for the number of accumulated passes.
        fp16: what to write for the host's autocast to float16, with its loss scale.
    """

    def checked(plan: Plan) -> Plan:
        if plan.step.accumulate > 1:
            raise PlanError(
                f"The transforms have accumulate({plan.step.accumulate}). {host} counts passes itself: write "
                f"{accumulate}={plan.step.accumulate} instead."
            )
        if plan.step.scaler is not None:
            raise PlanError(
                'The transforms scale the loss, as precision("fp16") does for a shardlib.OptimizerWrapper. '
                f"{host} has a scale of its own: write {fp16} instead."
            )
        return plan

    return checked


def without_loss_scale(plan: Plan) -> Plan:
    """Leave the scale of the loss to a `torch.amp.GradScaler`, which asks all ranks for what is not finite."""
    return plan.replace(step=plan.step.replace(scaler=None))


def refuse(taker: str, given: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Refuse options that are given and true, with what to write instead.

    >>> refuse("TrainingArguments", {"fsdp": True}, {"fsdp": 'Write sharding="dp=-1 | fsdp()".'})
    Traceback (most recent call last):
    ...
    shardlib.errors.PlanError: TrainingArguments(fsdp=True) was given. Write sharding="dp=-1 | fsdp()".
    """
    for name, what_to_write in instead.items():
        if given.get(name):
            raise PlanError(f"{taker}({name}={reprlib.repr(given[name])}) was given. {what_to_write}")
