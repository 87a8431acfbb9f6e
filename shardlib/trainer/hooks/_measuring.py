"""Hooks that measure, and the one that lets a scheduler step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardlib.errors import PlanError
from shardlib.trainer._metrics import AccuracyMetric, LearningRateMetric, LossMetric, Metric, ThroughputMetric
from shardlib.trainer.hooks._base import BaseHook

if TYPE_CHECKING:
    from shardlib.trainer._trainer import Trainer

__all__ = ["AccuracyHook", "LRSchedulerHook", "LossHook", "ThroughputHook"]


def _show(trainer: Trainer, where: str, name: str, metric: Metric) -> None:
    trainer.states["metrics"][where][name] = metric


class LossHook(BaseHook):
    """Keeps the mean loss of training and of evaluation, as "Loss".

    The criterion's loss is taken as the mean over the examples of a batch, or as a pair (sum, count).
    """

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self.train_loss, self.test_loss = LossMetric(trainer.engine), LossMetric(trainer.engine)
        _show(trainer, "train", "Loss", self.train_loss)
        _show(trainer, "test", "Loss", self.test_loss)

    def before_train_epoch(self, trainer: Trainer) -> None:
        self.train_loss.reset()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.train_loss.update(loss, trainer.engine.schedule.batch_size)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self.train_loss.get_accumulated_value()

    def before_test_epoch(self, trainer: Trainer) -> None:
        self.test_loss.reset()

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self.test_loss.update(loss, trainer.engine.schedule.batch_size)

    def after_test_epoch(self, trainer: Trainer) -> None:
        self.test_loss.get_accumulated_value()


class AccuracyHook(BaseHook):
    """Keeps the fraction of evaluated examples that are right, as "Accuracy".

    Args:
        accuracy_func: a function (output, label) -> the number of right examples, such as `Accuracy()`, or a pair
            (right, all).
        priority: see `BaseHook`.
    """

    def __init__(self, accuracy_func: Callable[[Any, Any], Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.accuracy_func = accuracy_func

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self.metric = AccuracyMetric(trainer.engine, self.accuracy_func)
        _show(trainer, "test", "Accuracy", self.metric)

    def before_test_epoch(self, trainer: Trainer) -> None:
        self.metric.reset()

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        schedule = trainer.engine.schedule
        self.metric.update(output, label, schedule.batch_size if schedule.has_output else 0)

    def after_test_epoch(self, trainer: Trainer) -> None:
        self.metric.get_accumulated_value()


class ThroughputHook(BaseHook):
    """Keeps the examples per second of training and evaluation, as "Throughput".

    Args:
        ignored_steps: the number of first steps of an epoch to ignore, which are slower.
        priority: see `BaseHook`.
        tflop_per_step: trillions of operations of a step, to show operations per second.
        use_local: count this rank's examples only.
    """

    def __init__(
        self, ignored_steps: int = 0, priority: int = 10, tflop_per_step: float = 0.0, use_local: bool = False
    ) -> None:
        super().__init__(priority)
        self.ignored_steps, self.tflop_per_step, self.use_local = ignored_steps, tflop_per_step, use_local
        self._seen = 0

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        if not trainer.timer.is_on():
            raise PlanError("ThroughputHook needs times, and the trainer's timer is off; give Trainer a MultiTimer().")
        self.train, self.test = (
            ThroughputMetric(trainer.engine, self.tflop_per_step, self.use_local) for _ in range(2)
        )
        _show(trainer, "train", "Throughput", self.train)
        _show(trainer, "test", "Throughput", self.test)

    def before_train_epoch(self, trainer: Trainer) -> None:
        self.train.reset()
        self._seen = 0

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._take(trainer, self.train, "Train-step")

    def after_train_epoch(self, trainer: Trainer) -> None:
        self.train.get_accumulated_value()

    def before_test_epoch(self, trainer: Trainer) -> None:
        self.test.reset()
        self._seen = 0

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._take(trainer, self.test, "Test-step")

    def after_test_epoch(self, trainer: Trainer) -> None:
        self.test.get_accumulated_value()

    def _take(self, trainer: Trainer, metric: ThroughputMetric, item: str) -> None:
        self._seen += 1
        if self._seen > self.ignored_steps:
            metric.update(trainer.engine.schedule.batch_size, trainer.timer.get_timer(item).get_elapsed_time())


class LRSchedulerHook(BaseHook):
    """Steps a scheduler after each epoch, or after each step that the optimizer takes.

    Args:
        lr_scheduler: a scheduler of the optimizer that was passed to `initialize`, or of the engine's.
        by_epoch: whether its steps are epochs.
        store_lr_in_state: keep the rate of the first group, as "LR".
        priority: see `BaseHook`.
    """

    def __init__(self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1) -> None:
        super().__init__(priority)
        self.lr_scheduler, self.by_epoch, self.store_lr_in_state = lr_scheduler, by_epoch, store_lr_in_state

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        self.metric = LearningRateMetric(self.by_epoch, self.lr_scheduler)
        if self.store_lr_in_state:
            _show(trainer, "train", "LR", self.metric)

    def after_train_epoch(self, trainer: Trainer) -> None:
        if self.by_epoch:
            self._step(trainer)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        if not self.by_epoch and not trainer.engine.optimizer.step_was_skipped:
            self._step(trainer)

    def _step(self, trainer: Trainer) -> None:
        """Step the scheduler even where the last optimizer step was skipped: only schedulers by step skip along with
        it."""
        optimizer = trainer.engine.optimizer
        skipped, optimizer.step_was_skipped = optimizer.step_was_skipped, False
        try:
            self.lr_scheduler.step()
        finally:
            optimizer.step_was_skipped = skipped
