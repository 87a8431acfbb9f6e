"""`Engine`: a boosted model with its optimizer and criterion, under the calls of older training loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardlib.booster import BoostedOptimizer
from shardlib.engine.data.gradients import GradientReducer
from shardlib.engine.sharded import record_of
from shardlib.errors import InputError, PlanError
from shardlib.trainer._handlers import BaseGradientHandler
from shardlib.trainer._ophooks import BaseOpHook, install
from shardlib.trainer._schedule import BaseSchedule, NonPipelineSchedule, PipelineSchedule

__all__ = ["Engine"]


class Engine:
    """The engine that `initialize` returns: a model to call, and the means to train it.

    A training loop calls `zero_grad`, `engine(x)`, `criterion`, `backward` and `step`. With `gradient_accumulation=n`
    in the config, every n-th `step` updates the parameters; the others, and `zero_grad` after them, do nothing. The
    gradient of the step is that of the mean over all n losses.

    Args:
        model: the boosted model; its `state_dict` has its own names.
        optimizer: its `BoostedOptimizer`.
        criterion: any callable that returns a loss: a mean over the examples of a batch, or `(sum, count)`.
        gradient_handlers: called before gradients are clipped, at each step that is taken.
        schedule: the treatment of one batch.
        lr_scheduler: the optimizer's scheduler, if there is one.

    >>> from shardlib.trainer import initialize
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> engine, *_ = initialize(model, optimizer, nn.MSELoss(), verbose=False)
    >>> engine.zero_grad()
    >>> loss = engine.criterion(engine(torch.ones(3, 4)), torch.zeros(3, 2))
    >>> engine.backward(loss)
    >>> engine.step()
    >>> sorted(engine.model.state_dict())
    ['bias', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: BoostedOptimizer,
        criterion: Any = None,
        gradient_handlers: Sequence[BaseGradientHandler] = (),
        *,
        schedule: BaseSchedule | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        if not isinstance(optimizer, BoostedOptimizer):
            raise PlanError(
                f"Engine was given a {type(optimizer).__name__} as optimizer; initialize(model, optimizer, criterion) "
                "makes an engine of plain ones."
            )
        record_of(model)  # raises where it is not sharded
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.schedule = schedule if schedule is not None else NonPipelineSchedule()
        self.lr_scheduler = lr_scheduler
        self.gradient_handlers = list(gradient_handlers)
        self.optimizer.handlers.extend(handler.handle_gradient for handler in self.gradient_handlers)
        self.ophooks: dict[BaseOpHook, list[RemovableHandle]] = {}

    @property
    def _reducer(self) -> GradientReducer:
        return record_of(self.model).reducer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward.

        Raises:
            PlanError: a model in stages, which runs global batches.
        """
        if isinstance(self.schedule, PipelineSchedule):
            raise PlanError(
                "The model is split into pipeline stages, none of which runs alone. Call "
                "engine.execute_schedule(data_iter), with forward_only=True to evaluate, or let a Trainer do it."
            )
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Engine({type(self.model).__name__}, {self.optimizer!r})"

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._reducer.executor.device

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that have examples of their own; None where there is one."""
        return self._reducer.data_group()

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """All ranks that train the model; None where it is one."""
        return self._reducer.group_of_all()

    def is_between_passes(self) -> bool:
        """Return whether further backward passes belong to the current step."""
        return self._reducer.is_between_passes()

    def train(self, mode: bool = True) -> None:
        """Put the model into training mode."""
        self.model.train(mode)

    def eval(self) -> None:
        """Put the model into evaluation mode."""
        self.model.eval()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients at the beginning of a step; does nothing between its passes."""
        self.optimizer.zero_grad(set_to_none)

    def backward(self, loss: Any, weight: Any = None) -> None:
        """Run backward of a mean loss, of a pair (sum, count), or of a mean with its weight."""
        self.optimizer.backward(loss, weight=weight)

    def backward_by_grad(self, tensor: Any, grad: Any) -> None:
        """Run backward of one or several tensors from given gradients: those of this rank's mean loss.

        Raises:
            InputError: gradients of other shapes.
        """
        tensors = tensor if isinstance(tensor, tuple | list) else (tensor,)
        grads = grad if isinstance(grad, tuple | list) else (grad,)
        shapes = [[tuple(t.shape) for t in given] for given in (tensors, grads)]
        if shapes[0] != shapes[1]:
            raise InputError(f"backward_by_grad was given tensors of shapes {shapes[0]} and gradients of {shapes[1]}.")
        # The gradient of sum(t * g) is g. So the loss scale and the mean over passes are where they always are.
        self.backward(sum((t * g.detach()).sum() for t, g in zip(tensors, grads, strict=True)))

    def step(self) -> None:
        """Handle and clip gradients, and update the parameters; under accumulation every n-th time."""
        self.optimizer.step()
        for hook in self.ophooks:
            hook.post_iter()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, Any]:
        """Run the next batch through the schedule.

        Args:
            data_iter: an iterator over batches.
            forward_only: run no backward, and record no graph.
            return_loss: compute the loss.
            return_output_label: return output and label too, else None in their places.

        Returns:
            Output, label, and this rank's loss.
        """
        return self.schedule.forward_backward_step(
            self,
            data_iter,
            forward_only=forward_only,
            return_loss=return_loss,
            return_output_label=return_output_label,
        )

    def add_hook(self, hook: BaseOpHook) -> None:
        """Call a hook around forward and backward of every module that has parameters of its own.

        Raises:
            PlanError: a mesh with model axes, whose blocks are compiled: compiled code would not call the hook.
        """
        if not isinstance(hook, BaseOpHook):
            raise PlanError(f"add_hook was given a {type(hook).__name__}; give a subclass of BaseOpHook.")
        plan = record_of(self.model).plan
        if any(plan.mesh[axis] > 1 for axis in plan.mesh.model_axes):
            raise PlanError(
                f'add_hook: blocks on mesh "{plan.mesh}" are compiled, and would not call it. Register torch\'s own '
                "module hooks before initialize."
            )
        if hook not in self.ophooks:
            self.ophooks[hook] = install(hook, self.model)

    def remove_hook(self, hook: BaseOpHook) -> None:
        """Remove a hook that was passed to `add_hook`."""
        for handle in self.ophooks.pop(hook, ()):
            handle.remove()
