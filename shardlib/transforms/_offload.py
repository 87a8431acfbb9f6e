"""Offloading of parameters, gradients and optimizer state to host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Phase, Plan, Row
from shardlib.errors import PlanError, nearest
from shardlib.transforms._choose import Names, as_names, chosen, quoted
from shardlib.transforms._transform import Transform

__all__ = ["Offload", "offload", "put_on_host"]

_PHASES: dict[str, Phase] = {"state": "state", "params": "stored", "grads": "grad"}


def offload(what: str | Sequence[str] = "state", *, fraction: float = 1.0, only: Names = None) -> Transform:
    """Keep phases of parameters in host memory. Optimizer state is updated there; parameters are copied to the device
    to be used.

        "state"   gradients are copied to the host for the update, and updated parameters back to the device
        "all"     with zero(3) or fsdp(): parameters are copied to the device whenever a unit unshards them, and
                  gradients to the host as soon as they are reduced

    On an accelerator only these two can run. torch keeps a gradient on the device of its parameter and updates it
    there, so "params" or "grads" without the others can only be planned. Where the device is a CPU, nothing is copied.

    Args:
        what: "state" (the optimizer's), "params" (between steps), "grads", several of them, or "all".
        fraction: the fraction of each phase's bytes to offload, from 0 to 1. Tensors are not divided; the largest are
            offloaded first.
        only: patterns of parameters, or of modules, as in rules; None is all.

    Raises:
        PlanError: another word, a fraction outside of 0 to 1; applied to a plan, a pattern that matches nothing.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> made = sl.plan(nn.Linear(64, 64), "dp=4", {"weight": "out in", "bias": "out"}) | offload(fraction=0.5)
    >>> str(made["weight"].state), str(made["bias"].state)
    ('out in : host', 'out')
    """
    words = (what,) if isinstance(what, str) else tuple(what)
    for word in words:
        if word not in _PHASES and (word != "all" or len(words) > 1):
            raise PlanError(
                f'offload({what!r}): "{word}" is not one of {quoted(list(_PHASES))}, of which several may be '
                f'given, and "all" stands for all three.{nearest(str(word), [*_PHASES, "all"])}'
            )
    if not words or isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise PlanError(f"offload({what!r}, fraction={fraction!r}): give something to move, and from 0 to 1 of it.")
    return Offload(what if isinstance(what, str) else words, fraction, as_names(only))


@dataclass(frozen=True, repr=False)
class Offload(Transform):
    """The transform that `offload` returns."""

    call: ClassVar[str] = "offload"
    what: str | tuple[str, ...] = "state"
    fraction: float = 1.0
    only: str | tuple[str, ...] | None = None

    def __call__(self, plan: Plan) -> Plan:
        words = (self.what,) if isinstance(self.what, str) else self.what
        names = chosen(plan, self.only, self)
        for word in _PHASES if words == ("all",) else words:
            plan = _phase_on_host(plan, _PHASES[word], names, self.fraction)
        return plan


def _phase_on_host(plan: Plan, phase: Phase, names: set[str], fraction: float) -> Plan:
    rows = [row for row in plan.rows if row.name in names and phase in row.layouts]
    going = _largest(plan, rows, phase, fraction)
    return put_on_host(plan, phase, going)


def _largest(plan: Plan, rows: Sequence[Row], phase: Phase, fraction: float) -> set[str]:
    """Return the names of the largest rows that together have at least a fraction of all bytes."""
    sizes = {row.name: row.local_bytes(plan.mesh, phase=phase) for row in rows}
    wanted, going = fraction * sum(sizes.values()), set[str]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sum(sizes[each] for each in going) >= wanted and fraction < 1:
            break
        going.add(name)
    return going


def put_on_host(plan: Plan, phase: Phase, names: Collection[str]) -> Plan:
    """Return the plan with one phase of some rows in host memory."""

    def on_host(row: Row) -> Row:
        if row.name not in names:
            return row
        return row.replace(**{phase: dataclasses.replace(row.layouts[phase], memory="host")})

    return plan.map_rows(on_host)
