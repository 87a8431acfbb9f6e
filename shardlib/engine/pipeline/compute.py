"""Forward and backward of a rank's stages on the microbatches of one step, and the state between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardlib._plan.schedules import Action
from shardlib.engine import _torch
from shardlib.engine.data.wrapper import as_count
from shardlib.engine.pipeline.batch import Call
from shardlib.engine.pipeline.route import StageBoundary, has_values, without_fakes
from shardlib.engine.pipeline.streams import Streams
from shardlib.engine.sharded import Sharded
from shardlib.errors import InputError, PlanError

__all__ = ["Computation", "Criterion", "Losses", "Microbatch"]

Criterion = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Microbatch:
    """A microbatch: the arguments of the model's call, the criterion's batch, the number of rows, its key, and where
    the stages begin for it."""

    call: Call
    batch: Any
    rows: int
    key: Any
    boundaries: Sequence[StageBoundary | None]

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.boundaries) - 1


@dataclass
class Losses:
    """The losses of a step on this rank.

    Attributes:
        values: a value for each microbatch: the mean over its rows, or the sum over its counted items.
        weights: the number of rows or the count of each microbatch.
        counted: whether the criterion returned counts; None before the first loss.
        have_graph: whether backward can begin from any of them.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    counted: bool | None = None
    have_graph: bool = False

    def sums(self) -> list[float]:
        """Return the sum of losses over all rows or counted items, and their number."""
        values = torch.stack(self.values).double().tolist()
        shares = [1.0] * len(values) if self.counted else self.weights
        return [sum(v * share for v, share in zip(values, shares, strict=True)), float(sum(self.weights))]


@dataclass(eq=False)
class Computation:
    """The computation of this rank in one step.

    Attributes:
        model: the model, cut into stages; or a full model as the only stage.
        record: its record.
        microbatches: what the batch was cut into.
        criterion: (output, batch) -> loss.
        factors: returns the factor of the mean loss of one row before backward, and that of a sum of counted losses.
        train: whether to run backward.
        keep_outputs: whether to keep the outputs of the last stage.
        streams: the random streams; None where actions draw from those of the user.
        losses: the losses of the microbatches, on the last stage.
        outputs: the outputs of the model by microbatch, on the last stage.
    """

    model: nn.Module
    record: Sharded
    microbatches: Sequence[Microbatch]
    criterion: Criterion | None
    factors: Callable[[], tuple[float, float]]
    train: bool
    keep_outputs: bool
    streams: Streams | None = None
    losses: Losses = field(default_factory=Losses)
    outputs: dict[int, Any] = field(default_factory=dict)
    _saved: dict[tuple[int, int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = field(default_factory=dict)
    _pending_weight_grads: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)

    def run(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Carry out an action on the tensors of the message that it needs; return those of the message to send."""
        if self.streams is not None:
            self.streams.begin(*action)
        return self._forward(action, received) if action.kind == "F" else self._backward(action, received)

    def drop(self) -> None:
        """Drop what backward would need."""
        self._saved.clear()
        self._pending_weight_grads.clear()

    # --- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _, stage, m = action
        microbatch, (args, kwargs) = self.microbatches[m], self.microbatches[m].call
        with nullcontext() if self.train else torch.no_grad():
            for tensor in received if self.train else ():
                tensor.requires_grad_(_differentiable(tensor))
            if self.record.pipeline is None:
                output = self.model(*args, **kwargs)
            else:
                output = self.record.pipeline.route.run(
                    self.model,
                    stage,
                    microbatch.key,
                    args,
                    kwargs,
                    received,
                    None if self.streams is None else functools.partial(self.streams.begin, m),
                )
            made = [self._loss(output, microbatch)] if stage == microbatch.last else self._agreed(output, stage, m)
        if stage == microbatch.last and self.keep_outputs:
            self.outputs[m] = without_fakes(_torch.pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        if self.train:
            self._saved[stage, m] = received, made
        return [tensor.detach() for tensor in made]

    def _agreed(self, output: Sequence[torch.Tensor], stage: int, m: int) -> list[torch.Tensor]:
        """Return the tensors to send, in the shapes and dtypes that the next stage expects."""
        boundary = self.microbatches[m].boundaries[stage + 1]
        assert boundary is not None and self.record.pipeline is not None
        made, splits = [], self.train and self.record.pipeline.stages.splits_backward
        for tensor, message in zip(output, boundary.messages, strict=True):
            if tuple(tensor.shape) != message.shape:
                raise PlanError(
                    f'Stage {stage} has made a tensor of shape {tuple(tensor.shape)} for "{boundary.module}", where '
                    f"inputs of these shapes let expect {message.shape}: a module gives other shapes for other "
                    "values. Pad them."
                )
            tensor = tensor.to(message.dtype)
            # Cloned since a split backward could not free the graph of a view.
            made.append(tensor.clone() if splits else tensor)
        return made

    def _loss(self, output: Any, microbatch: Microbatch) -> torch.Tensor:
        """Return the loss that backward starts from on the last stage; a zero in evaluation without a loss."""
        given = self.criterion(output, microbatch.batch) if self.criterion is not None else _loss_of_output(output)
        if given is None and not self.train:
            return torch.zeros(())
        pair = isinstance(given, tuple | list) and len(given) == 2
        loss = given[0] if pair else given
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError(
                f"The loss of a microbatch is {shown}; let criterion(output, batch) return a scalar tensor, the mean "
                "over the rows, or a pair (sum, count)."
            )
        if not has_values(loss):
            raise PlanError(
                "The loss is computed from a tensor of an earlier stage, which the last one does not have. Compute it "
                "from what the last stage's modules make, or from the batch."
            )
        if self.losses.counted not in (None, pair):
            raise InputError(
                "Some microbatches' losses came with a count and some without. Return (sum, count) of all, or of none."
            )
        self.losses.counted = pair
        self.losses.values.append(loss.detach().reshape(()))
        self.losses.weights.append(as_count(given[1], "The criterion returned") if pair else microbatch.rows)
        self.losses.have_graph |= loss.requires_grad
        if self.train and len(self.losses.values) == len(self.microbatches):
            self._refuse_without_graph()
        return loss

    def _refuse_without_graph(self) -> None:
        """Refuse losses that no backward can begin from, but for those of a batch in which nothing counts."""
        if self.record.has_values and not self.losses.have_graph and any(self.losses.weights):
            raise InputError(
                "The losses of all microbatches have no graph of autograd, and train nothing: the criterion detaches "
                "the output, runs under no_grad, or takes something like argmax. Return a loss that depends on the "
                "output; for a metric alone, give forward_only=True."
            )

    # --- backward -----------------------------------------------------------------------------------------------------

    def _backward(self, action: Action, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        kind, stage, m = action
        if kind == "W":
            self._pending_weight_grads.pop((stage, m), lambda: None)()
            return []
        inputs, outputs = self._saved.pop((stage, m))
        if stage == self.microbatches[m].last:
            received = [self._initial_grad(outputs[0], m)]
        else:
            outputs = [tensor for tensor in outputs if _differentiable(tensor)]
        pairs = [(tensor, grad) for tensor, grad in zip(outputs, received, strict=True) if tensor.requires_grad]
        roots, grads = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
        inputs = [tensor for tensor in inputs if tensor.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if kind == "I" and pairs and inputs:
            found, rest = _torch.backward_of_inputs(roots, grads, inputs, self.record.reducer.leaves())
            self._pending_weight_grads[stage, m] = functools.partial(self._backward_of_weights, rest)
        elif kind == "I" and pairs:
            self._pending_weight_grads[stage, m] = functools.partial(torch.autograd.backward, roots, grads)
        elif pairs:
            torch.autograd.backward(roots, grads)
            found = [tensor.grad for tensor in inputs]
        return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True)]

    def _initial_grad(self, loss: torch.Tensor, m: int) -> torch.Tensor:
        """Return the gradient that backward of a microbatch starts from."""
        mean, counted = self.factors()
        return torch.full_like(loss, counted if self.losses.counted else mean * self.microbatches[m].rows)

    def _backward_of_weights(self, rest: Any) -> None:
        with self.record.reducer.room_for_gradients():
            _torch.backward_of_weights(self.record.reducer.leaves(), rest)


def _differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _loss_of_output(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
