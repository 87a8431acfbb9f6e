"""Modules of experts as one op each in an exported graph, which `torch.export` does not look into.

The op has the module's operands, and the number of a program: what one expert computes of one token. So the graph knows
no routing, and the JAX engine chooses how tokens get to experts.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardlib._plan import Plan, expert_axis, expert_rows, stacked_experts
from shardlib.engine import _torch
from shardlib.engine.feature.experts import counts_experts
from shardlib.engine.undo import Undo, replace_forward
from shardlib.errors import PlanError
from shardlib.jax._one_expert import NotSeparableError, OneExpert, one_expert_of

__all__ = ["OP", "Routing", "opaque"]

OP = "shardlib::experts"
_library = torch.library.Library("shardlib", "FRAGMENT")
_library.define(
    "experts(Tensor tokens, Tensor numbers, Tensor weights, Tensor[] params, int program, ScalarType dtype, "
    "str axis, float capacity) -> Tensor"
)
torch.library.register_fake(
    OP,
    lambda tokens, numbers, weights, params, program, dtype, axis, capacity: tokens.new_empty(
        tokens.shape, dtype=dtype
    ),
    lib=_library,
)


@dataclass(frozen=True)
class Routing:
    """The settings of a plan for experts.

    Attributes:
        axes: for each module whose experts are sharded over an expert axis, this axis.
        capacity: the most choices that an expert takes from a rank, as a multiple of the mean; 0 is without limit.
    """

    axes: Mapping[str, str] = field(default_factory=dict)
    capacity: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> Routing:
        rows = expert_rows(plan.rows, plan.mesh)
        return cls({name: expert_axis(own[0], plan.mesh) for name, own in rows.items()}, plan.step.capacity_factor or 0)


# The modules of a compiled model are its own copies, which nobody changes, so a record holds for all its graphs.
_recorded: weakref.WeakKeyDictionary[nn.Module, dict[Any, OneExpert]] = weakref.WeakKeyDictionary()


class Found:
    """The experts that were found while a model was exported.

    Attributes:
        programs: what one expert computes, different ones only, each with the module that had it first.
        refused: modules of experts that are exported as they are, each with the reason.
        mixture: whether the model has experts.
    """

    def __init__(self, *, mixture: bool = False) -> None:
        self.mixture = mixture
        self.programs: list[tuple[str, OneExpert]] = []
        self.refused: dict[str, str] = {}
        self._numbers: dict[Any, int] = {}

    @property
    def hint(self) -> str:
        """A sentence on how experts are compiled, and why some are not; for an error of an export."""
        if not self.mixture:
            return ""
        refused = (f'\n"{name}" was exported as it is, since {why}.' for name, why in self.refused.items())
        return (
            " Experts are compiled in a module forward(self, tokens, numbers, weights) with all their parameters, "
            f"whose first dim counts them (docs/experts.md).{''.join(refused)}"
        )

    def number(self, name: str, program: OneExpert) -> int:
        """Return the number of a program. Programs that compute the same have one number, and one graph."""
        number = self._numbers.setdefault(program.form, len(self.programs))
        if number == len(self.programs):
            self.programs.append((name, program))
        return number


@contextmanager
def opaque(model: nn.Module, routing: Routing, named: Callable[[str], str]) -> Iterator[Found]:
    """Let each module of experts call one op inside the block.

    A module that the op cannot replace runs as it is. `named` gives the plan's name of a module.

    Raises:
        PlanError: on a call of such a module, if the plan limits the capacity of its experts.
    """
    found, undo = Found(mixture=any(map(counts_experts, model.modules()))), Undo()
    try:
        for name, module in model.named_modules():
            if (experts := stacked_experts(module)) is not None:
                own = _Opaque(named(name), module, experts, routing, found)
                undo.callback(replace_forward(module, own))
        yield found
    finally:
        undo.run()


class _Opaque:
    """The forward of a module of experts during an export."""

    def __init__(self, name: str, module: nn.Module, experts: int, routing: Routing, found: Found) -> None:
        self.name, self.module, self.experts, self.found = name, module, experts, found
        self.axis = routing.axes.get(name, "")
        self.capacity = routing.capacity if self.axis else 0.0
        self.inner = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.inner).bind(*args, **kwargs).arguments
        try:
            tokens, numbers, weights = _three(list(given.values()))
            program = self._one_expert(tokens, weights)
        except NotSeparableError as error:
            if self.capacity:
                raise PlanError(
                    f'"{self.name}" has a limited capacity by expert_capacity, and its experts cannot be computed each '
                    f"by itself, since {error}. Leave expert_capacity out, or let forward(self, tokens, numbers, "
                    "weights) return the weighted sum of what each chosen expert makes of each token."
                ) from error
            self.found.refused[self.name] = str(error)
            return self.inner(*args, **kwargs)
        params = [param for param in _torch.own_tensors(self.module)[0].values() if param is not None]
        number = self.found.number(self.name, program)
        return torch.ops.shardlib.experts(
            tokens, numbers, weights, params, number, program.dtype, self.axis, float(self.capacity)
        )

    def _one_expert(self, tokens: torch.Tensor, weights: torch.Tensor) -> OneExpert:
        known = _recorded.setdefault(self.module, {})
        key = int(tokens.shape[1]), tokens.dtype, weights.dtype, self.module.training
        if key not in known:
            undo = replace_forward(self.module, self.inner)
            try:
                known[key] = one_expert_of(self.module, self.experts, tokens, weights)
            finally:
                undo()
        return known[key]


def _three(given: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, numbers of experts and weights, if that is what a forward is given."""
    if len(given) == 3 and all(isinstance(x, torch.Tensor) for x in given):
        tokens, numbers, weights = given
        fits = tokens.ndim == numbers.ndim == 2 and numbers.shape == weights.shape and len(tokens) == len(numbers)
        whole = not numbers.is_floating_point() and not numbers.is_complex() and numbers.dtype != torch.bool
        if fits and whole and tokens.is_floating_point() and weights.is_floating_point():
            return tokens, numbers, weights
    shown = [f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__ for x in given]
    raise NotSeparableError(
        f"it is called with {', '.join(shown)}, in place of tokens (token, embed), the integer numbers of their "
        "experts (token, choice), and the weights of these (token, choice)"
    )
