"""`Trainer`: epochs, evaluation and hooks around an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardlib._progress import Progress
from shardlib.errors import InputError, PlanError
from shardlib.trainer._data import begins_at, length_of, repeated_at_end
from shardlib.trainer._engine import Engine
from shardlib.trainer._logger import DistributedLogger
from shardlib.trainer._schedule import BaseSchedule
from shardlib.trainer._timer import MultiTimer
from shardlib.trainer.hooks._base import BaseHook

__all__ = ["Trainer"]


class Trainer:
    """Trains an engine for epochs, evaluates it, and calls hooks on the way.

    Args:
        engine: the engine of `initialize`.
        timer: measures epochs ("Train-epoch", "Test-epoch") and steps ("Train-step", "Test-step"); by default its
            own.
        logger: logs on rank 0 when an epoch begins; None by default.
        schedule: replaces the engine's.

    Attributes:
        cur_epoch, cur_step: epochs and batches that were trained on; in hooks, the numbers of the current ones, from 0.
        max_epochs, max_steps, steps_per_epoch: the limits of `fit`.
        steps_of_epoch: batches of this epoch that were trained on.
        states: the state of hooks: `states["metrics"]["train"]["Loss"].get_accumulated_value()`.

    >>> import torch
    >>> from shardlib.trainer import hooks, initialize
    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> engine, *_ = initialize(model, optimizer, torch.nn.CrossEntropyLoss(), verbose=False)
    >>> trainer = Trainer(engine)
    >>> data = [(torch.eye(2), torch.arange(2))] * 4
    >>> trainer.fit(data, epochs=3, hooks=[hooks.LossHook()])
    >>> trainer.cur_epoch, trainer.cur_step
    (3, 12)
    >>> trainer.states["metrics"]["train"]["Loss"].get_accumulated_value() < 1
    True
    """

    def __init__(
        self,
        engine: Engine,
        timer: MultiTimer | None = None,
        logger: DistributedLogger | None = None,
        schedule: BaseSchedule | None = None,
    ) -> None:
        if not isinstance(engine, Engine):
            raise PlanError(f"Trainer was given a {type(engine).__name__}; give the engine that initialize returns.")
        self.engine, self.logger = engine, logger
        self.timer = timer if timer is not None else MultiTimer()
        if schedule is not None:
            engine.schedule = schedule
        self.hooks: list[BaseHook] = []
        self.cur_epoch, self.cur_step, self.steps_of_epoch = 0, 0, 0
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.steps_per_epoch = 0
        self.train_dataloader: Any = None
        self._begin_at = 0
        self._reset_states()

    @property
    def schedule(self) -> BaseSchedule:
        """The schedule that the engine applies to one batch."""
        return self.engine.schedule

    def _reset_states(self) -> None:
        self.states: dict[str, Any] = {"metrics": {"train": {}, "test": {}}, "step_metrics": {}}

    def begin_at(self, epoch: int, step: int, of_epoch: int = 0) -> None:
        """Continue from a position: epochs and batches trained on, and batches of the current epoch."""
        self.cur_epoch, self.cur_step, self._begin_at = epoch, step, of_epoch

    # --- training -----------------------------------------------------------------------------------------------------

    def fit(
        self,
        train_dataloader: Any,
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Any = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Train for epochs, from `cur_epoch` on.

        Args:
            train_dataloader: batches `(data, label)`, or batches that the schedule converts to such pairs; with a
                length. If its sampler has `set_epoch`, that is called.
            epochs: the number of epochs in all.
            max_steps: the number of batches in all, after which training ends.
            test_dataloader: batches to evaluate after an epoch.
            test_interval: the number of epochs between evaluations, after the one of the first epoch.
            hooks: the hooks to call.
            display_progress: show a bar on rank 0, in a terminal.
            return_output_label: pass outputs and labels to hooks; else None.

        Raises:
            PlanError: invalid hooks or numbers.
            InputError: invalid batches.
        """
        _check("epochs", epochs, 0)
        _check("test_interval", test_interval, 1)
        if max_steps is not None:
            _check("max_steps", max_steps, 0)
        self.max_epochs, self.max_steps = epochs, max_steps
        self.train_dataloader, self.steps_per_epoch = train_dataloader, length_of(train_dataloader)
        self._attach(hooks)
        self._call("before_train")
        for epoch in range(self.cur_epoch, epochs):
            if self._has_enough():
                break
            self._train_epoch(display_progress, return_output_label)
            if test_dataloader is not None and epoch % test_interval == 0:
                self._test_epoch(test_dataloader, display_progress, return_output_label)
            self.cur_epoch += 1
        self._call("after_train")

    def _has_enough(self) -> bool:
        return self.max_steps is not None and self.cur_step >= self.max_steps

    def _train_epoch(self, shown: bool, return_output_label: bool) -> None:
        self.engine.train()
        batches = self._batches_of_epoch()
        title = f"Epoch {self.cur_epoch + 1} / Train"
        self._call("before_train_epoch")
        self.timer.start("Train-epoch")
        with _progress(title, self.steps_per_epoch, self.steps_of_epoch, shown=shown) as progress:
            while self.steps_of_epoch < self.steps_per_epoch and not self._has_enough():
                self._call("before_train_iter")
                self.timer.start("Train-step")
                self.engine.zero_grad()
                with _ends_early(title, self.steps_of_epoch, self.steps_per_epoch):
                    output, label, loss = self.engine.execute_schedule(
                        batches, forward_only=False, return_loss=True, return_output_label=return_output_label
                    )
                self.engine.step()
                self.timer.stop("Train-step", keep_in_history=True)
                self._call("after_train_iter", output, label, loss)
                self.cur_step += 1
                self.steps_of_epoch += 1
                progress.advance(numbers=self.states["step_metrics"])
        self.timer.stop("Train-epoch", keep_in_history=True)
        self._call("after_train_epoch")
        self.timer.reset("Train-step")

    def _batches_of_epoch(self) -> Iterator[Any]:
        """Iterate over the batches of the epoch, from its position."""
        loader = self.train_dataloader
        _set_epoch(loader, self.cur_epoch)
        self.steps_of_epoch, self._begin_at = self._begin_at, 0
        left_out = begins_at(loader)
        batches = iter(loader)
        for _ in range(self.steps_of_epoch if not left_out else 0):
            next(batches)
        return batches

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        test_dataloader: Any,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> None:
        """Evaluate once; the results of hooks are in `states`.

        Examples that a sampler repeats, so that ranks have equally many, count once.

        Args:
            test_dataloader: batches, as for `fit`.
            hooks: the hooks to call.
            display_progress: see `fit`.
            return_output_label: see `fit`.
        """
        self._attach(hooks)
        self._test_epoch(test_dataloader, display_progress, return_output_label)

    def _test_epoch(self, loader: Any, shown: bool, return_output_label: bool) -> None:
        steps, repeated = length_of(loader), repeated_at_end(loader)
        title = f"Epoch {self.cur_epoch + 1} / Test"
        with self._evaluating():
            batches = iter(loader)
            self._call("before_test")
            self._call("before_test_epoch")
            self.timer.start("Test-epoch")
            with _progress(title, steps, shown=shown) as progress:
                for step in range(steps):
                    self._call("before_test_iter")
                    self.timer.start("Test-step")
                    self.schedule.repeated = repeated if step == steps - 1 else 0
                    with _ends_early(title, step, steps):
                        output, label, loss = self.engine.execute_schedule(
                            batches, forward_only=True, return_loss=True, return_output_label=return_output_label
                        )
                    self.timer.stop("Test-step", keep_in_history=True)
                    self._call("after_test_iter", output, label, loss)
                    progress.advance(numbers=self.states["step_metrics"])
            self.timer.stop("Test-epoch", keep_in_history=True)
            self._call("after_test_epoch")
            self._call("after_test")
            self.timer.reset("Test-step")

    def predict(self, data: Any) -> Any:
        """Return the model's output for one batch of data, without labels."""
        with self._evaluating():
            output, _, _ = self.engine.execute_schedule(
                iter([(data, None)]), forward_only=True, return_loss=False, return_output_label=True
            )
        return output

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.engine.training
        self.engine.eval()
        try:
            yield
        finally:
            self.schedule.repeated = 0
            self.engine.train(training)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        given = list(hooks or ())
        for hook in given:
            if not isinstance(hook, BaseHook):
                what = hook.__name__ + ", a class" if isinstance(hook, type) else f"a {type(hook).__name__}"
                raise PlanError(f"hooks has {what}; give instances of subclasses of BaseHook, such as LossHook().")
        self.hooks = sorted(given, key=lambda hook: hook.priority)
        self._reset_states()
        if self.logger is not None and self.hooks:
            named = ", ".join(f"{type(hook).__name__} ({hook.priority})" for hook in self.hooks)
            self.logger.info(f"hooks in the order of their calls: {named}", ranks=[0])
        for hook in self.hooks:
            hook.after_hook_is_attached(self)

    def _call(self, point: str, *of_batch: Any) -> None:
        for hook in self.hooks:
            getattr(hook, point)(self, *of_batch)


def _progress(title: str, steps: int, done: int = 0, *, shown: bool) -> Progress:
    return Progress(title, unit="steps", total=steps, done=done, after=0.0 if shown else math.inf)


def _set_epoch(loader: Any, epoch: int) -> None:
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)


@contextmanager
def _ends_early(title: str, done: int, steps: int) -> Iterator[None]:
    try:
        yield
    except StopIteration:
        raise InputError(
            f"{title}: the dataloader has given {done} batches, and its length is {steps}. Give it the length "
            "that it has."
        ) from None


def _check(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name}={value!r} was given; give an integer from {least} up.")
