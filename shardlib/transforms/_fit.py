"""Offloading to fit a budget of device memory, with as little in host memory as possible."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Phase, Plan, Row
from shardlib._plan.readable import human_bytes
from shardlib.errors import PlanError
from shardlib.transforms._choose import add_note
from shardlib.transforms._offload import put_on_host
from shardlib.transforms._transform import Transform

__all__ = ["fit_memory"]

_CHEAPEST_FIRST: tuple[tuple[Phase, ...], ...] = (("state",), ("state", "stored", "grad"))
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def fit_memory(budget: float | str, *, state_tensors: int = 2) -> Transform:
    """Offload to host memory until each rank fits a budget of device memory.

    The cheapest tensors are offloaded first: optimizer state, which is updated on the host, the largest tensors first;
    then stored shards of parameters and their gradients, which are copied to the device whenever they are used. A plan
    that fits is not changed. Apply `fit_memory` after transforms that shard and that change precision.

    Args:
        budget: bytes of device memory for one rank's parameters, gradients, state, buffers and workspace of a step
            (`Plan.memory`), without activations. A number, or text such as "40GB" (10**9) or "40GiB" (2**30).
        state_tensors: tensors of optimizer state for each parameter: 2 for Adam, 1 for SGD with momentum.

    Raises:
        PlanError: a malformed budget; applied to a plan, a budget that cannot be met.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> made = sl.plan(nn.Linear(1000, 1000), "dp=4", {"**": None}) | sl.zero(2)
    >>> made.memory().device + made.memory().buckets
    10019000
    >>> fitted = made | fit_memory("9MB")
    >>> fitted["weight"].state.memory, fitted.memory().device + fitted.memory().buckets
    ('host', 8019000)
    >>> (made | fit_memory("11MB")).rows == made.rows
    True
    """
    return _Fit(_bytes(budget), state_tensors)


@dataclass(frozen=True, repr=False)
class _Fit(Transform):
    call: ClassVar[str] = "fit_memory"

    budget: int
    state_tensors: int = 2

    def __call__(self, plan: Plan) -> Plan:
        went = 0
        for phases in _CHEAPEST_FIRST:
            left = {row.name: self._size(row, phases, plan) for row in plan.rows if _may_go(row, phases, plan)}
            while (over := self._over(plan)) > 0 and left:
                going = _enough(left, over)
                went += sum(left.pop(name) for name in going)
                for phase in phases:
                    plan = put_on_host(plan, phase, going)
        if (over := self._over(plan)) > 0:
            raise PlanError(
                f"{self}: with everything offloaded that can be, a rank's device still holds "
                f"{human_bytes(self.budget + over)}. Divide more, with zero(3) or over more ranks, or give a larger "
                "budget."
            )
        return add_note(plan, f"{self} moved {human_bytes(went)} of each rank to host memory.") if went else plan

    def _over(self, plan: Plan) -> int:
        memory = plan.memory(state_tensors=self.state_tensors)
        return memory.device + memory.buckets - self.budget

    def _size(self, row: Row, phases: Sequence[Phase], plan: Plan) -> int:
        """Return the bytes that leave the device with a row."""
        copies = {"state": self.state_tensors + row.has_master}
        here = (phase for phase in phases if row.layouts[phase].memory != "host")
        return sum(copies.get(phase, 1) * row.local_bytes(plan.mesh, phase=phase) for phase in here)


def _enough(sizes: Mapping[str, int], wanted: int) -> set[str]:
    """Choose few names whose sizes add up to at least `wanted`, with little more than that; all names if they do not.

    >>> sorted(_enough({"a": 5, "b": 3, "c": 2, "d": 2}, 7)), sorted(_enough({"a": 5}, 7))
    (['a', 'c'], ['a'])
    """
    left, going = sorted(sizes, key=lambda name: sizes[name]), set[str]()
    while wanted > 0 and left:
        name = next((name for name in left if sizes[name] >= wanted), left[-1])
        left.remove(name)
        going.add(name)
        wanted -= sizes[name]
    return going


def _may_go(row: Row, phases: Sequence[Phase], plan: Plan) -> bool:
    in_parts = any(plan.mesh[axis] > 1 for axis in plan.mesh.data_axes if axis in row.added("stored"))
    return all(phase in row.layouts for phase in phases) and (in_parts or "stored" not in phases)


def _bytes(budget: float | str) -> int:
    """Parse a number of bytes.

    >>> _bytes("40GB"), _bytes("1.5 GiB"), _bytes(1e9)
    (40000000000, 1610612736, 1000000000)
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", budget.lower()) if isinstance(budget, str) else None
    try:
        number = float(found[1]) * _UNITS[found[2]] if found else float(budget)
    except (ValueError, TypeError, KeyError):
        number = -1.0
    if isinstance(budget, bool) or not 0 < number < float("inf"):
        raise PlanError(f'fit_memory({budget!r}): give bytes of device memory, such as "40GB", "40GiB" or 40e9.')
    return int(number)
