"""The value `Transform`: a function from plan to plan that compares, serializes, composes, and prints as its call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from shardlib._dtypes import name_of
from shardlib._plan import LossScale, Plan
from shardlib.errors import PlanError

__all__ = ["Pipeline", "Transform"]


@dataclass(frozen=True, repr=False)
class Transform:
    """A function from plan to plan. Each kind is a frozen dataclass that implements `__call__`.

    Laws: `(plan | a) | b == plan | (a | b)`; `replicate() | a`, `a` and `a | replicate()` give equal plans; the repr is
    the call that makes the transform.
    """

    call: ClassVar[str] = ""
    """The name of the public function that returns it."""
    leading: ClassVar[int] = 1
    """The number of fields that this function takes by position."""

    def __call__(self, plan: Plan) -> Plan:
        raise NotImplementedError

    def __or__(self, other: Transform | Callable[[Plan], Plan]) -> Pipeline:
        """Compose this transform with a later one."""
        if not callable(other):
            raise PlanError(f"{self} | {other!r}: give functions that take a Plan and return a Plan.")
        return Pipeline((*_parts(self), *_parts(other)))

    def __ror__(self, other: Callable[[Plan], Plan]) -> Pipeline:
        """Compose a plain function with this transform, which is later."""
        if not callable(other):
            raise PlanError(f"{other!r} | {self}: give functions that take a Plan and return a Plan.")
        return Pipeline((other, *_parts(self)))

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)
        first, rest = fields[: self.leading], fields[self.leading :]
        given = [_text(getattr(self, f.name)) for f in first if getattr(self, f.name) != f.default]
        named = ((f.name, getattr(self, f.name)) for f in rest if getattr(self, f.name) != f.default)
        return f"{self.call}({', '.join([*given, *(f'{name}={_text(value)}' for name, value in named)])})"


@dataclass(frozen=True, repr=False)
class Pipeline(Transform):
    """Several transforms in sequence."""

    parts: tuple[Callable[[Plan], Plan], ...]

    def __call__(self, plan: Plan) -> Plan:
        for part in self.parts:
            plan = part(plan)
        return plan

    def __repr__(self) -> str:
        return " | ".join(getattr(part, "__name__", None) or repr(part) for part in self.parts)


def _parts(transform: Callable[[Plan], Plan]) -> tuple[Callable[[Plan], Plan], ...]:
    return transform.parts if isinstance(transform, Pipeline) else (transform,)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if type(value).__name__ == "dtype" or hasattr(value, "itemsize"):
        return f'"{name_of(value)}"'
    if isinstance(value, LossScale):
        return _scale_text(value)
    return repr(value)


def _scale_text(scale: LossScale) -> str:
    changed = [(f.name, getattr(scale, f.name)) for f in dataclasses.fields(scale)]
    defaults = LossScale()
    return f"LossScale({', '.join(f'{n}={v!r}' for n, v in changed if v != getattr(defaults, n))})"
