"""Gradient handlers: the user's own code between the last backward pass of a step and its clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from shardlib.booster import BoostedOptimizer
from shardlib.engine import GradientBucket, register_gradient_reduction
from shardlib.errors import PlanError, nearest
from shardlib.trainer._registry import Registry

__all__ = [
    "GRADIENT_HANDLER",
    "BaseGradientHandler",
    "build_gradient_handlers",
    "check_gradient_handlers",
    "register_gradient_handler",
]

C = TypeVar("C", bound=type)

GRADIENT_HANDLER = Registry("gradient handler")
"""Gradient handlers by name; `GRADIENT_HANDLER.register_module` is ColossalAI's spelling of the decorator below."""

# What ColossalAI's own handlers do, the engine has done when gradients are handled.
_DONE_ANYWAY: Mapping[str, str] = MappingProxyType(
    {
        "DataParallelGradientHandler": "gradients are averaged over data axes while backward runs",
        "ZeROGradientHandler": "zero= reduce-scatters gradients",
        "SequenceParallelGradientHandler": "gradients are summed over model axes where they are partial",
        "MoeGradientHandler": "each gradient is reduced over the axes that do not shard its parameter",
        "PipelineSharedModuleGradientHandler": "tied parameters have one gradient",
    }
)


class BaseGradientHandler:
    """The base of handlers that change gradients before they are clipped, once in each step that is taken.

    `param.grad` is the gradient of the step: that of the mean loss over all data ranks and all accumulated passes,
    without a loss scale. It is a plain tensor, equal on all ranks; where the plan shards it (tensor parallel, any stage
    of `zero`), it is a sharded DTensor. A handler may change it in place, or replace it by a tensor of the same layout.
    It must do the same on all ranks that hold the same element. Averaging over data ranks again changes nothing for
    plain tensors, and would mix different elements of shards.

    Args:
        model: the engine's model.
        optimizer: the engine's optimizer.

    >>> class Signs(BaseGradientHandler):
    ...     def handle_gradient(self):
    ...         for param in self._model.parameters():
    ...             if param.grad is not None:
    ...                 param.grad.sign_()
    """

    def __init__(self, model: nn.Module, optimizer: BoostedOptimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def handle_gradient(self) -> None:
        """Change the gradients. All ranks call it, at the same step. A handler with a `reduce` need not have it."""
        if not self.reduces():
            raise NotImplementedError(f"{type(self).__name__} has neither handle_gradient nor reduce.")

    def reduce(self, bucket: GradientBucket) -> Any:
        """Replace the all-reduce over data ranks in a subclass; see `register_gradient_reduction`. Runs for each bucket
        during backward."""
        raise NotImplementedError

    @classmethod
    def reduces(cls) -> bool:
        """Return whether the class has a `reduce` of its own."""
        return cls.reduce is not BaseGradientHandler.reduce


def register_gradient_handler(name: str | None = None) -> Callable[[C], C]:
    """Decorate a class so that a config may name it, as in `gradient_handler=[dict(type="Signs")]`.

    Args:
        name: the name in a config; by default that of the class.

    >>> @register_gradient_handler("halves")
    ... class Halves(BaseGradientHandler):
    ...     def handle_gradient(self):
    ...         for param in self._model.parameters():
    ...             param.grad.mul_(0.5)
    """
    return GRADIENT_HANDLER.register_module(name=name)


def check_gradient_handlers(described: Any) -> tuple[Mapping[str, Any], ...]:
    """Check the `gradient_handler` of a config, before anything is built.

    Raises:
        PlanError: not a list of dicts with a `type` each, or a type that is not registered.
    """
    if not isinstance(described, list | tuple) or not all(
        isinstance(one, Mapping) and "type" in one for one in described
    ):
        raise PlanError(
            f"The config says gradient_handler={described!r}; give a list with a dict for each, such as "
            '[dict(type="MyGradientHandler")].'
        )
    for one in described:
        kind = one["type"]
        if not GRADIENT_HANDLER.has(kind) and kind not in _DONE_ANYWAY:
            raise PlanError(
                f'The config names a gradient handler "{kind}", which is not registered. Put '
                "@GRADIENT_HANDLER.register_module over its class, in a module that is imported before initialize."
                f"{nearest(str(kind), _DONE_ANYWAY)}"
            )
    return tuple(described)


def build_gradient_handlers(
    described: Iterable[Mapping[str, Any]], model: nn.Module, optimizer: BoostedOptimizer
) -> list[BaseGradientHandler]:
    """Build the handlers that a config names, except for those of ColossalAI whose work is done anyway.

    Raises:
        PlanError: one has unknown options, or is not a handler; two reduce gradients.
    """
    built = []
    for one in described:
        options = {key: value for key, value in one.items() if key != "type"}
        if GRADIENT_HANDLER.has(one["type"]):
            built.append(GRADIENT_HANDLER.get_module(one["type"])(model, optimizer, **options))
    _let_reduce(model, [handler for handler in built if handler.reduces()])
    return built


def _let_reduce(model: nn.Module, handlers: list[BaseGradientHandler]) -> None:
    """Let the handler with a `reduce` of its own reduce the model's gradients.

    Raises:
        PlanError: two handlers have a `reduce`, or gradients are sharded.
    """
    if len(handlers) > 1:
        names = " and ".join(type(handler).__name__ for handler in handlers)
        raise PlanError(f"The config names {names}, which both reduce gradients; name one of them.")
    for handler in handlers:
        register_gradient_reduction(model, handler.reduce)
