"""One step of a pipeline on one rank: its actions in order, and its state between them.

A rank whose action raises continues with the order of actions without computing, and sends zeros of the agreed shapes.
No other rank therefore waits in vain, and all ranks learn of the failure at the end of the step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardlib._plan.schedules import Action
from shardlib.engine import _torch
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.pipeline.batch import Call
from shardlib.engine.pipeline.route import StageBoundary, has_values, without_fakes
from shardlib.engine.pipeline.transport import P2PMessage, Transport, sent_by
from shardlib.engine.sharded import Sharded
from shardlib.errors import InputError, LostRankError, PlanError

__all__ = ["Failure", "Losses", "Microbatch", "Run"]

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


@dataclass(frozen=True)
class Failure:
    """The error that an action raised, and when."""

    action: Action
    error: Exception
    when: float

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


@dataclass
class Losses:
    """The losses of a step on this rank.

    Attributes:
        values: a value for each microbatch: the mean over its rows, or the sum over its counted items.
        weights: the number of rows or the count of each microbatch.
        counted: whether the criterion returned counts; None before the first loss.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    counted: bool | None = None

    def sums(self) -> list[float]:
        """Return the sum of losses over all rows or counted items, and their number."""
        values = torch.stack(self.values).double().tolist()
        shares = [1.0] * len(values) if self.counted else self.weights
        return [sum(v * share for v, share in zip(values, shares, strict=True)), float(sum(self.weights))]


class Run:
    """Runs the actions of a rank.

    `refused` is the error that kept the step from beginning: an invalid input, or an action that a rank could not do.

    Args:
        model: the model, cut into stages; or a full model as the only stage.
        record: its record.
        transport: the messages; None if there is one stage.
        microbatches: what the batch was cut into.
        criterion: (output, batch) -> loss.
        begin: waits until all ranks are known to run the same step; returns the factor of the mean loss of one row
            before backward, and that of a sum of counted losses. A rank whose first forward needs no other rank
            computes it before that, and sends nothing before.
        train: whether to run backward.
        keep_outputs: whether to keep the outputs of the last stage.
        on_failure: called for the first failure of this rank; raises if other ranks cannot continue without it.
    """

    def __init__(
        self,
        model: nn.Module,
        record: Sharded,
        transport: Transport | None,
        microbatches: Sequence[Microbatch],
        criterion: Criterion | None,
        *,
        begin: Callable[[], tuple[float, float]],
        train: bool,
        keep_outputs: bool,
        on_failure: Callable[[Failure], None],
    ) -> None:
        self.model, self.pipeline, self.reducer, self.transport = model, record.pipeline, record.reducer, transport
        self.microbatches, self.criterion, self._begin = microbatches, criterion, begin
        self.step_context = record.step_context
        self.factor = 1.0, 1.0
        self.begun = False
        self.refused: Exception | None = None
        self.train, self.keep_outputs = train, keep_outputs
        self.last = len(microbatches[0].boundaries) - 1
        self.losses = Losses()
        self.outputs: dict[int, Any] = {}
        self.executed: list[Action] = []
        self.failure: Failure | None = None
        self._on_failure = on_failure
        self._saved: dict[tuple[int, int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}
        self._pending_weight_grads: dict[tuple[int, int], Callable[[], None]] = {}
        self._received: set[P2PMessage] = set()
        self._sent: set[P2PMessage] = set()

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Run all actions, also after a failure.

        Raises:
            LostRankError: another rank is lost.
            StageError: only this rank has failed, and others wait for it inside of their modules.
        """
        for number, action in enumerate(actions):
            if number or not self.step_context.computes_early:
                self._meet()
            if self.transport is not None and self.begun:
                for ahead in actions[number : number + self.transport.channels.ahead]:
                    if (message := self._needed(ahead)) is not None:
                        self.transport.expect(message)
            if self.failure is None:
                try:
                    with self.step_context.watched(action):
                        self._forward(action) if action.kind == "F" else self._backward(action)
                    self.executed.append(action)
                except LostRankError:
                    raise
                except Exception as error:
                    if error is self.refused:
                        raise
                    self.failure = Failure(action, error, time.time())
                    self._saved.clear()
                    self._pending_weight_grads.clear()
                    self._on_failure(self.failure)
            if self.failure is not None:
                self._pass_on(action)
        self._finish()

    def _meet(self) -> None:
        if self.begun:
            return
        try:
            self.factor = self._begin()
        except Exception as error:
            self.refused = error
            raise
        self.begun = True

    @naming_lost_ranks("backward")
    def _finish(self) -> None:
        if self.transport is not None:
            self.transport.finish()

    # --- forward ------------------------------------------------------------------------------------------------------

    @naming_lost_ranks("forward")
    def _forward(self, action: Action) -> None:
        _, stage, m = action
        microbatch, received = self.microbatches[m], self._take(self._needed(action))
        with nullcontext() if self.train else torch.no_grad():
            for tensor in received if self.train else ():
                tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            args, kwargs = microbatch.call
            if self.pipeline is None:
                output = self.model(*args, **kwargs)
            else:
                output = self.pipeline.route.run(self.model, stage, microbatch.key, args, kwargs, received)
            made = [self._loss(output, microbatch)] if stage == self.last else self._agreed(output, stage, m)
        if stage == self.last and self.keep_outputs:
            self.outputs[m] = without_fakes(_torch.pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        if self.train:
            self._saved[stage, m] = received, made
        if stage < self.last:
            self._send(P2PMessage("forward", stage + 1, m), [tensor.detach() for tensor in made])

    def _agreed(self, output: Sequence[torch.Tensor], stage: int, m: int) -> list[torch.Tensor]:
        """Return the tensors to send, in the shapes and dtypes that the next stage expects."""
        boundary = self.microbatches[m].boundaries[stage + 1]
        assert boundary is not None and self.pipeline is not None
        made, splits = [], self.train and self.pipeline.stages.splits_backward
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
        self.losses.weights.append(given[1] if pair else microbatch.rows)
        return loss

    # --- backward -----------------------------------------------------------------------------------------------------

    @naming_lost_ranks("backward")
    def _backward(self, action: Action) -> None:
        kind, stage, m = action
        if kind == "W":
            self._pending_weight_grads.pop((stage, m), lambda: None)()
            return
        received, made = self._saved.pop((stage, m))
        gradients = self._take(self._needed(action)) if stage < self.last else [self._initial_grad(made[0], m)]
        boundary = self.microbatches[m].boundaries[stage + 1] if stage < self.last else None
        if boundary is not None:
            made = [tensor for tensor, message in zip(made, boundary.messages, strict=True) if message.has_gradient]
        pairs = [(tensor, grad) for tensor, grad in zip(made, gradients, strict=True) if tensor.requires_grad]
        outputs, given = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
        inputs = [tensor for tensor in received if tensor.requires_grad]
        if not pairs:
            found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        elif kind == "I" and not inputs:
            self._pending_weight_grads[stage, m] = functools.partial(torch.autograd.backward, outputs, given)
            return
        elif kind == "I":
            found, rest = _torch.backward_of_inputs(outputs, given, inputs, self.reducer.leaves())
            self._pending_weight_grads[stage, m] = functools.partial(self._backward_of_weights, rest)
        else:
            torch.autograd.backward(outputs, given)
            found = [tensor.grad for tensor in inputs]
        if stage:
            input_grads = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True)]
            self._send(P2PMessage("backward", stage - 1, m), input_grads)

    def _initial_grad(self, loss: torch.Tensor, m: int) -> torch.Tensor:
        """Return the gradient that backward of a microbatch starts from."""
        mean, counted = self.factor
        return torch.full_like(loss, counted if self.losses.counted else mean * self.microbatches[m].rows)

    def _backward_of_weights(self, rest: Any) -> None:
        with self.reducer.room_for_gradients():
            _torch.backward_of_weights(self.reducer.leaves(), rest)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _needed(self, action: Action) -> P2PMessage | None:
        kind, stage, m = action
        if kind == "F":
            return P2PMessage("forward", stage, m) if stage else None
        return P2PMessage("backward", stage, m) if kind in "BI" and stage < self.last else None

    def _take(self, message: P2PMessage | None) -> Sequence[torch.Tensor]:
        if message is None or self.transport is None:
            return []
        tensors = self.transport.receive(message)
        self._received.add(message)
        return tensors

    def _send(self, message: P2PMessage, tensors: Sequence[torch.Tensor]) -> None:
        assert self.transport is not None
        self._meet()
        self._sent.add(message)
        self.transport.send(message, tensors)

    @naming_lost_ranks("forward")
    def _pass_on(self, action: Action) -> None:
        """Receive and send the messages of an action without computing."""
        if self.transport is None:
            return
        needed, due = self._needed(action), sent_by(action, self.last)
        if needed is not None and needed not in self._received:
            self._take(needed)
        if due is not None and due not in self._sent:
            metas = self.transport.timetable.metas[due]
            self._send(due, [torch.zeros(s, dtype=d, device=self.transport.device) for s, d in metas])


def _loss_of_output(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
