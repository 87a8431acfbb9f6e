"""One step of a pipeline on one rank: its actions in order, and what it keeps between them.

A rank whose action raises goes on in the order without computing, and sends zeros of the shapes that were agreed on: so
no other rank waits in vain, and all of them learn of it at the end of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardlib._plan.schedules import Action
from shardlib.engine import _torch
from shardlib.engine.gradients import GradientReducer
from shardlib.engine.lost import naming_lost_ranks
from shardlib.engine.pipeline.batch import Call
from shardlib.engine.pipeline.route import Gate, Route, has_values, without_fakes
from shardlib.engine.pipeline.transport import Parcel, Transport
from shardlib.errors import InputError, LostRankError, PlanError

__all__ = ["Failure", "Losses", "Part", "Run"]

Criterion = Callable[[Any, Any], Any]

_AHEAD = 4  # actions whose receives are posted: senders wait for that, and it costs a rank least while it waits itself


@dataclass(frozen=True)
class Part:
    """A microbatch: how the model is called with it, what the criterion is given, how many rows it has."""

    call: Call
    batch: Any
    rows: int
    key: Any


@dataclass(frozen=True)
class Failure:
    """What an action raised, and when."""

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
        values: of microbatches: means over rows, or sums of what was counted.
        weights: rows, or counts.
        counted: whether the criterion said how many; None before the first.
    """

    values: list[torch.Tensor] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    counted: bool | None = None

    def sums(self) -> list[float]:
        """Of losses over all rows or all that was counted, and of how many these are."""
        values = torch.stack(self.values).double().tolist()
        shares = [1.0] * len(values) if self.counted else self.weights
        return [sum(v * share for v, share in zip(values, shares, strict=True)), float(sum(self.weights))]


class Run:
    """Carries out a rank's actions.

    `refused` is why it has not begun: what ranks were given, or could not do.

    Args:
        model: cut, with a route; or a whole one, of which there is one stage.
        route: of the model; None where it is whole.
        transport: None where there is one stage.
        parts: the microbatches.
        gates: of each microbatch.
        criterion: (output, batch) -> loss.
        reducer: of the gradients.
        begin: waits until all ranks are known to do the same, and gives what the mean loss of one row is multiplied
            with before backward, and what a sum of counted ones is.
        early: this rank may compute its first forward before that; nothing is sent before it.
        train: whether there is a backward.
        keep_outputs: of the last stage.
        watched: each action runs inside of what this gives for it.
        on_failure: is told of this rank's first failure, and raises where others cannot go on without it.
    """

    def __init__(
        self,
        model: nn.Module,
        route: Route | None,
        transport: Transport | None,
        parts: Sequence[Part],
        gates: Sequence[Sequence[Gate | None]],
        criterion: Criterion | None,
        reducer: GradientReducer,
        *,
        begin: Callable[[], tuple[float, float]],
        early: bool = False,
        train: bool = True,
        keep_outputs: bool = False,
        watched: Callable[[Action], AbstractContextManager[Any]] | None = None,
        on_failure: Callable[[Failure], None] = lambda _failure: None,
    ) -> None:
        self.model, self.route, self.transport, self.parts, self.gates = model, route, transport, parts, gates
        self.criterion, self.reducer, self._begin, self.early = criterion, reducer, begin, early
        self.factor = 1.0, 1.0
        self.begun = False
        self.refused: Exception | None = None
        self.train, self.keep_outputs = train, keep_outputs
        self.last = len(gates[0]) - 1
        self.losses = Losses()
        self.outputs: dict[int, Any] = {}
        self.executed: list[Action] = []
        self.failure: Failure | None = None
        self._watched, self._on_failure = watched or (lambda _action: nullcontext()), on_failure
        self._held: dict[tuple[int, int], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = {}
        self._halves: dict[tuple[int, int], Any] = {}
        self._taken: set[Parcel] = set()
        self._gone: set[Parcel] = set()

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Run them all, whatever happens.

        Raises:
            LostRankError: another rank is gone.
            StageError: this rank alone has failed, and others wait for it inside of their modules.
        """
        for number, action in enumerate(actions):
            if number or not self.early:
                self._meet()
            for ahead in actions[number : number + _AHEAD]:
                if self.transport is not None and self.begun and (parcel := self._needed(ahead)) is not None:
                    self.transport.expect(parcel)
            if self.failure is None:
                try:
                    with self._watched(action):
                        self._forward(action) if action.kind == "F" else self._backward(action)
                    self.executed.append(action)
                except LostRankError:
                    raise
                except Exception as error:
                    if error is self.refused:
                        raise
                    self.failure = Failure(action, error, time.time())
                    self._held.clear()
                    self._halves.clear()
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
        part, received = self.parts[m], self._take(self._needed(action))
        with nullcontext() if self.train else torch.no_grad():
            for tensor in received if self.train else ():
                tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
            args, kwargs = part.call
            if self.route is None:
                output = self.model(*args, **kwargs)
            else:
                output = self.route.run(self.model, stage, part.key, args, kwargs, received)
            made = [self._loss(output, part)] if stage == self.last else self._agreed(output, stage, m)
        if stage == self.last and self.keep_outputs:
            self.outputs[m] = without_fakes(_torch.pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output))
        if self.train:
            self._held[stage, m] = received, made
        if stage < self.last:
            self._send(Parcel("forward", stage + 1, m), [tensor.detach() for tensor in made])

    def _agreed(self, output: Sequence[torch.Tensor], stage: int, m: int) -> list[torch.Tensor]:
        """What is sent, in the shapes and dtypes that the next stage waits for."""
        gate = self.gates[m][stage + 1]
        assert gate is not None
        made = []
        for tensor, message in zip(output, gate.messages, strict=True):
            if tuple(tensor.shape) != message.shape:
                raise PlanError(
                    f'Stage {stage} has made a tensor of shape {tuple(tensor.shape)} for "{gate.module}", where '
                    f"inputs of these shapes let expect {message.shape}: a module gives other shapes for other "
                    "values. Pad them."
                )
            tensor = tensor.to(message.dtype)
            made.append(tensor.clone() if self._splits else tensor)  # of a view, the half backward cannot let go
        return made

    @property
    def _splits(self) -> bool:
        return self.train and self.route is not None and self.route.splits_backward

    def _loss(self, output: Any, part: Part) -> torch.Tensor:
        """What backward starts from on the last stage; nothing of the kind where there is no criterion and no loss."""
        given = self.criterion(output, part.batch) if self.criterion is not None else _own_loss(output)
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
        self.losses.weights.append(given[1] if pair else part.rows)
        return loss

    # --- backward -----------------------------------------------------------------------------------------------------

    @naming_lost_ranks("backward")
    def _backward(self, action: Action) -> None:
        kind, stage, m = action
        if kind == "W":
            self._backward_of_weights(stage, m)
            return
        received, made = self._held.pop((stage, m))
        gradients = self._take(self._needed(action)) if stage < self.last else [self._of_loss(made[0], m)]
        gates = self.gates[m][stage + 1] if stage < self.last else None
        if gates is not None:
            made = [tensor for tensor, message in zip(made, gates.messages, strict=True) if message.has_gradient]
        pairs = [(tensor, grad) for tensor, grad in zip(made, gradients, strict=True) if tensor.requires_grad]
        outputs, given = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
        inputs = [tensor for tensor in received if tensor.requires_grad]
        if kind == "I" and not inputs:
            self._halves[stage, m] = outputs, given, None
            return
        if not pairs:
            found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        elif kind == "I":
            found, rest = _torch.backward_of_inputs(outputs, given, inputs, self.reducer.leaves())
            self._halves[stage, m] = None, None, rest
        else:
            torch.autograd.backward(outputs, given)
            found = [tensor.grad for tensor in inputs]
        if stage:
            whole = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True)]
            self._send(Parcel("backward", stage - 1, m), whole)

    def _of_loss(self, loss: torch.Tensor, m: int) -> torch.Tensor:
        """What backward of a microbatch starts from."""
        mean, counted = self.factor
        return torch.full_like(loss, counted if self.losses.counted else mean * self.parts[m].rows)

    def _backward_of_weights(self, stage: int, m: int) -> None:
        outputs, given, rest = self._halves.pop((stage, m), (None, None, None))
        if rest is not None:
            with self.reducer.room_for_gradients():
                _torch.backward_of_weights(self.reducer.leaves(), rest)
        elif outputs:
            torch.autograd.backward(outputs, given)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _needed(self, action: Action) -> Parcel | None:
        kind, stage, m = action
        if kind == "F":
            return Parcel("forward", stage, m) if stage else None
        return Parcel("backward", stage, m) if kind in "BI" and stage < self.last else None

    def _take(self, parcel: Parcel | None) -> Sequence[torch.Tensor]:
        if parcel is None or self.transport is None:
            return []
        tensors = self.transport.receive(parcel)
        self._taken.add(parcel)
        return tensors

    def _send(self, parcel: Parcel, tensors: Sequence[torch.Tensor]) -> None:
        assert self.transport is not None
        self._meet()
        self._gone.add(parcel)
        self.transport.send(parcel, tensors)

    @naming_lost_ranks("forward")
    def _pass_on(self, action: Action) -> None:
        """Take what comes and send what is waited for, computing nothing."""
        if self.transport is None:
            return
        needed, due = self._needed(action), self._due(action)
        if needed is not None and needed not in self._taken:
            self._take(needed)
        if due is not None and due not in self._gone:
            self._send(
                due, [torch.zeros(s, dtype=d, device=self.transport.device) for s, d in self.transport.metas(due)]
            )

    def _due(self, action: Action) -> Parcel | None:
        kind, stage, m = action
        if kind == "F":
            return Parcel("forward", stage + 1, m) if stage < self.last else None
        return Parcel("backward", stage - 1, m) if kind in "BI" and stage else None


def _own_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
