"""A run of a case: a model that trains, on one device or on this rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import Plan
from shardlib.engine import _torch, clip_grad_norm_, get_grad_norm, get_plan, no_sync, pipeline_step
from shardlib.engine._torch import pytree
from shardlib.engine.feature.exact import exact_random
from shardlib.engine.sharded import is_sharded, record_of
from shardlib.errors import InputError, ShardlibError
from shardlib.testing.equivalence.case import Case, default_loss, rows_of
from shardlib.testing.equivalence.trace import Trace, clean, tracing

__all__ = ["Run", "Trained", "cast", "elsewhere", "is_pipeline", "named_tensors"]


def named_tensors(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Return parameters and buffers by their first name in the single device's model."""
    first = {}
    if is_pipeline(model):
        first = {name: row.name for row in get_plan(model).rows for name in row.tied}
    return (
        {first.get(clean(name), clean(name)): p for name, p in model.named_parameters()},
        {first.get(clean(name), clean(name)): b for name, b in model.named_buffers()},
    )


class Trained(Protocol):
    """A model that is trained, on either engine: what a comparison asks of it."""

    model: nn.Module
    output: Any

    @property
    def plan(self) -> Plan | None: ...

    def begin(self, step: int) -> None: ...

    def forward_backward(self, step: int, micro: int) -> torch.Tensor: ...

    def clip(self) -> torch.Tensor | None: ...

    def step(self) -> None: ...

    def tensors(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]: ...

    def gradients(self) -> dict[str, torch.Tensor | None]: ...

    def state(self) -> dict[str, torch.Tensor]: ...

    def tracing(self) -> AbstractContextManager[Trace]: ...


@dataclass(eq=False)
class Run:
    """One model that is trained.

    Attributes:
        rows: (index, count) of the rows that this run sees of a global batch.
        made: its optimizer, where it is not the case's.
        shares: the number of data ranks whose losses add up to that of all rows; 1 where their mean is it.
        batch: the global batch that it was given last.
        output: the result of the last forward.
    """

    case: Case
    model: nn.Module
    rows: tuple[int, int] = (0, 1)
    sharded: bool = False
    made: torch.optim.Optimizer | None = None
    shares: int = 1
    batch: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        self.optimizer = self.made or self.case.train(self.model.parameters())
        self.model.register_forward_hook(self._keep)

    @property
    def plan(self) -> Plan | None:
        """The plan that the model is sharded by; None without one."""
        return get_plan(self.model) if is_sharded(self.model) else None

    @property
    def averages(self) -> bool:
        """Whether its plan makes a mean of the gradients of all passes, of their undivided losses."""
        return self.plan is not None and self.plan.step.accumulate > 1

    def tracing(self) -> AbstractContextManager[Trace]:
        """Trace the values and gradients that enter and leave every module, of the code inside the block."""
        return tracing(self.model)

    def _keep(self, _model: nn.Module, _args: Any, output: Any) -> None:
        if self.sharded and is_pipeline(self.model):
            return
        # Without its graph, whose hooks lead to the model: Python's collector would not see that circle.
        self.output = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)

    def begin(self, step: int) -> None:
        self.optimizer.zero_grad()
        if self.case.before_step is not None:
            self.case.before_step(self.model, step)

    def forward_backward(self, step: int, micro: int) -> torch.Tensor:
        """Run one backward pass, accumulated; return the loss over this run's rows, divided by the number of passes.

        Losses that add up to that of all rows are multiplied by their number, so that the mean of them is it.
        """
        case = self.case
        index = step * case.accumulate + micro
        self.batch = _checked(case.batch(index), index)
        batch = self._part_of(self.batch)
        _torch.seed_all(case.seed + index)
        before = torch.get_rng_state()
        if self.sharded and is_pipeline(self.model):
            with self._noted(step):
                return self._through_stages(batch, micro)
        with self._randomness(), self._reducing(micro), self._noted(step):
            whole = _scalar((case.loss or default_loss)(self.model, batch))
            share = whole / case.accumulate
            self._refuse_streams_of_its_own(before)
            self._check_gradients(share)
            self._backward(whole if self.averages else share, micro)
        return share.detach() * self.shares

    def _backward(self, loss: torch.Tensor, _micro: int) -> None:
        loss.backward()

    def loss_of(self, batch: Any) -> torch.Tensor:
        """Run the forward alone; return the loss over this run's rows of a global batch, as `forward_backward` does."""
        self.batch = batch
        return _scalar((self.case.loss or default_loss)(self.model, self._part_of(batch))) * self.shares

    def _part_of(self, batch: Any) -> Any:
        """Return this run's rows of a global batch, in the dtype of its parameters."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), self.case.dtype)
        batch = cast(batch, dtype, next((p.device for p in self.model.parameters()), None))
        return (self.case.split or rows_of)(batch, *self.rows) if self.rows[1] > 1 else batch

    def _through_stages(self, batch: Any, micro: int) -> torch.Tensor:
        """Run a pipeline's backward pass; its microbatches are the plan's, or one for each of its ranks."""
        case, plan = self.case, get_plan(self.model)
        found = case.loss or default_loss

        def criterion(output: Any, part: Any) -> torch.Tensor:
            return _scalar(found(_Returning(output), part)) / (1 if self.averages else case.accumulate)

        count = None if plan.step.microbatches else plan.mesh.only(plan.mesh.pipeline_axes).world_size
        with self._reducing(micro):
            done = pipeline_step(self.model, batch, criterion, microbatches=count, return_outputs=True)
        self.output = done.outputs
        assert done.loss is not None
        return done.loss / (case.accumulate if self.averages else 1)

    def _check_gradients(self, loss: torch.Tensor) -> None:
        if not self.sharded and not loss.requires_grad:
            why = (
                "no parameter of the model requires a gradient"
                if not any(p.requires_grad for p in self.model.parameters())
                else "the loss is an integer"
                if not loss.is_floating_point()
                else "it does not depend on the model's output, or was detached from it"
            )
            raise InputError(
                f"The loss has no gradient on the single device: {why}. Give "
                "something that trains, and a loss= that is computed from what the model returns."
            )
        if not self.sharded and self.case.dtype is torch.float64 and not torch.isfinite(loss):
            raise InputError(
                f"The loss is {loss.item()} on the single device, with which nothing can be compared. Give "
                "a model, batches and a loss= that are finite."
            )

    @contextmanager
    def _noted(self, step: int) -> Iterator[None]:
        """Add the run and the step to an exception of the user's code."""
        try:
            yield
        except Exception as error:
            if self.sharded:
                error.add_note(f"In the sharded run, step {step}; the single device's step went through.")
            elif not isinstance(error, ShardlibError):
                error.add_note(
                    f"On the single device, step {step}: the model fails on this batch and loss before "
                    "anything is sharded. Make it run without shardlib first."
                )
            raise

    def _randomness(self) -> AbstractContextManager[Any]:
        return exact_random() if self.case.rng == "exact" and not self.sharded else nullcontext()

    def _reducing(self, micro: int) -> AbstractContextManager[None]:
        waits = self.sharded and self.case.no_sync and micro < self.case.accumulate - 1
        return no_sync(self.model) if waits else nullcontext()

    def _refuse_streams_of_its_own(self, before: torch.Tensor) -> None:
        if self.case.rng == "fast" and self.rows[1] > 1 and not torch.equal(before, torch.get_rng_state()):
            raise InputError(
                'The model draws random numbers in its forward, and with rng="fast" each data rank draws its own: no '
                'single device draws the same. Prove it with rng="exact" (the default), on a mesh without data axes, '
                "or with the dropout probabilities at zero."
            )

    def clip(self) -> torch.Tensor | None:
        """Compute the norm of all gradients, and clip them to the case's norm if it has one."""
        params = [p for p in self.model.parameters() if p.grad is not None]
        by_hand = self.case.shard is not None
        if not params or (self.case.clip is None and by_hand):
            return None
        if callable(self.case.clip):
            norm = self.case.clip(self.model)
        elif self.case.clip is None:
            grads = [p.grad for p in params if p.grad is not None]
            if self.sharded:  # torch's own would take an all-reduce for each DTensor
                dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads))
                norm = get_grad_norm(self.model).to(dtype)
            else:
                norm = nn.utils.get_total_norm(grads)
        elif self.sharded and is_pipeline(self.model):  # torch's own would count one stage
            norm = clip_grad_norm_(self.model, self.case.clip)
        else:
            norm = nn.utils.clip_grad_norm_(params, self.case.clip)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self) -> None:
        self.optimizer.step()

    def tensors(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return parameters and buffers by name."""
        return named_tensors(self.model)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: p.grad for name, p in named_tensors(self.model)[0].items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors, by "parameter: key"."""
        return {
            f"{name}: {key}": value
            for name, p in named_tensors(self.model)[0].items()
            for key, value in self.optimizer.state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }


class _Returning(nn.Module):
    """Stands for a model whose output is there already."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return self.output


def is_pipeline(model: nn.Module) -> bool:
    """Return whether a model is divided into stages, of which this rank has some."""
    return is_sharded(model) and record_of(model).pipeline is not None


def elsewhere(model: nn.Module) -> set[str]:
    """Return the names of tensors that are on other stages only."""
    pipeline = record_of(model).pipeline if is_sharded(model) else None
    return set() if pipeline is None else pipeline.stages.foreign


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        raise InputError(
            f"The loss is {tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}; loss= has to "
            "return a scalar tensor: a mean over the rows of the batch."
        )
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _checked(batch: Any, index: int) -> Any:
    if batch is None:
        raise InputError(
            f"batch({index}) returned nothing. It has to return the batch: a tensor, a tuple of positional "
            "arguments, a mapping of keyword arguments, or (tuple, mapping)."
        )
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(batch)):
        raise InputError(f"batch({index}) returned a tensor on meta, which has no values. Make it on the CPU.")
    return batch


def cast(batch: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

    return pytree.tree_map_only(torch.Tensor, on_device, batch)
