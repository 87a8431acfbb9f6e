"""The optimizer that was built before boosting, rebound to the sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardlib._plan import Row, rows_by_name
from shardlib.engine import OptimizerWrapper, get_plan
from shardlib.engine.apply import names_here
from shardlib.errors import InputError, ShardingError

__all__ = ["BoostedOptimizer", "Carried"]


class BoostedOptimizer(OptimizerWrapper):
    """The optimizer that `Booster.boost` returns: an `OptimizerWrapper` with ColossalAI's names.

    Args:
        inner, model: as for `OptimizerWrapper`.
        max_norm: the norm that `step` clips gradients to; 0 is no clipping.
        norm_type: the order of that norm.

    Attributes:
        handlers: called without arguments in each step that is taken, before gradients are clipped: they see what the
            step is about to use, reduced and unscaled.

    >>> import shardlib as sl
    >>> model = sl.shard_model(nn.Linear(4, 2), "dp=1", {"**": None})
    >>> optimizer = BoostedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
    >>> optimizer.backward(model(torch.ones(3, 4)).sum())
    >>> optimizer.clip_grad_by_norm(10.0) > 0
    tensor(True)
    >>> optimizer.step()
    >>> type(optimizer.unwrap()).__name__
    'SGD'
    """

    def __init__(
        self, inner: torch.optim.Optimizer, model: nn.Module, *, max_norm: float = 0.0, norm_type: float = 2.0
    ) -> None:
        super().__init__(inner, model)
        self.max_norm, self.norm_type = max_norm, norm_type
        self.handlers: list[Callable[[], None]] = []
        self._scaled_losses = False
        self._norm: tuple[float, torch.Tensor] | None = None  # its order, and the norm before clipping

    def __repr__(self) -> str:
        return f"BoostedOptimizer({self.inner!r})"

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The optimizer inside, as `unwrap()`."""
        return self.inner

    def backward(self, loss: Any, *args: Any, weight: Any = None, **options: Any) -> None:
        """Run backward: of a mean loss, or of a loss with its count, as `OptimizerWrapper.backward` says."""
        if args or options:
            raise ShardingError(
                f"backward() was given {len(args) + len(options)} arguments in addition to the loss"
                f"{': ' + ', '.join(options) if options else ''}; it takes a loss, and weight=. To keep the graph, add "
                "the losses up and call it once."
            )
        super().backward(loss, weight=weight)
        self._scaled_losses = True

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale gradients so that their norm, over all elements of all parameters, is at most `max_norm`.

        Returns the norm before.
        """
        norm = self.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        self._norm = (float(norm_type), norm)
        return norm

    def get_grad_norm(self, norm_type: float | None = None) -> float | None:
        """Return the norm of gradients before they were last clipped, by `max_norm` or `clip_grad_by_norm`.

        It was computed then, so that any rank may ask alone. It is that of unscaled gradients, where ColossalAI returns
        the scaled ones'. None before the first clipping, as with ColossalAI's plugins other than `LowLevelZeroPlugin`:
        without one no norm is computed. `max_norm=float("inf")` of a plugin computes it in each step and clips nothing;
        `shardlib.booster.get_grad_norm(model)` computes it once, on all ranks together.

        Args:
            norm_type: the order of the norm, as it was for clipping; None is that one.

        Raises:
            InputError: gradients were clipped by another norm.
        """
        if self._norm is None:
            return None
        order, norm = self._norm
        if norm_type not in (None, order):
            raise InputError(
                f"get_grad_norm(norm_type={norm_type}) was asked for, and gradients were clipped by the norm of order "
                f"{order}. Ask for that one, or call shardlib.booster.get_grad_norm(model, {norm_type}) on all ranks."
            )
        return norm.item()

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamp every element of every gradient to [-clip_value, clip_value]."""
        self.clip_grad_value_(clip_value)

    def backward_by_another(self) -> float:
        """Return the factor of the loss scale for a pipeline, which runs backward itself."""
        self._scaled_losses = True
        return super().backward_by_another()

    def _step(self) -> None:
        if self.scaler is not None and not self._scaled_losses:
            raise ShardingError(
                "step() was called without a backward pass through the booster, and the loss is scaled: gradients of "
                "loss.backward() would be divided by a scale that they never had. Call booster.backward(loss, "
                "optimizer)."
            )
        self._handle()
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm, self.norm_type)
        super()._step()

    def _handle(self) -> None:
        if not self.handlers:
            return
        self._finish_gradients()
        if self.scaler is None or not self.scaler.overflowed:
            for handle in self.handlers:
                handle()

    def _reset_step(self) -> None:
        super()._reset_step()
        self._scaled_losses = False


@dataclass(frozen=True)
class Carried:
    """An optimizer and what it knew of a model's parameters before they were sharded.

    Attributes:
        optimizer: the optimizer.
        groups: the names of parameters of each group.
        state: by name.
    """

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[str, ...], ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, optimizer: Any, model: nn.Module) -> Carried:
        """Record an optimizer's groups and state, before anything is changed.

        Raises:
            ShardingError: it is not an optimizer, or has parameters that are not the model's.
        """
        if isinstance(optimizer, OptimizerWrapper) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ShardingError(
                f"boost was given a {type(optimizer).__name__} as optimizer; give a torch optimizer built from "
                "model.parameters(), one for each boost."
            )
        names = {id(param): name for name, param in model.named_parameters()}
        strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
        if strangers:
            raise ShardingError(
                f"{len(strangers)} of the optimizer's parameters do not belong to the model (the first has shape "
                f"{tuple(strangers[0].shape)}). Boost the model and the optimizer built from its parameters together."
            )
        groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
        return cls(optimizer, groups, {names[id(p)]: value for p, value in optimizer.state.items()})

    def onto(
        self, model: nn.Module, make: Callable[[torch.optim.Optimizer, nn.Module], BoostedOptimizer]
    ) -> BoostedOptimizer:
        """Create the same optimizer for the parameters that now have these names.

        The object stays the same, with its class, options and hooks, as do objects that refer to its groups.
        """
        params, here = dict(model.named_parameters()), names_here(model)
        groups = tuple(tuple(here[name] for name in names if name in here) for names in self.groups)
        for group, names in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [params[name] for name in names]
        self.optimizer.state.clear()
        made = make(self.optimizer, model)
        if self.state:
            rows = rows_by_name(get_plan(model).rows)
            state = {here[name]: _in_dtype_of(rows[name], own) for name, own in self.state.items() if name in here}
            made.load_state_dict({"state": state, "param_groups": _described(self.optimizer, groups)})
        return made


def _in_dtype_of(row: Row, state: dict[str, Any]) -> dict[str, Any]:
    """Convert the state of a parameter to the dtype of the plan."""
    dtype = row.state.dtype if row.state is not None else None

    def one(value: Any) -> Any:
        kept = isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == row.global_shape
        return value.to(dtype) if kept and dtype is not None else value

    return {key: one(value) for key, value in state.items()}


def _described(optimizer: torch.optim.Optimizer, groups: tuple[tuple[str, ...], ...]) -> list[dict[str, Any]]:
    return [{**group, "params": list(names)} for group, names in zip(optimizer.param_groups, groups, strict=True)]
