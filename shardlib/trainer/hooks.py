"""Hooks of a `Trainer`: what is done around epochs and steps, those of low priority first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardlib.booster._plugins import _of_job
from shardlib.checkpoint import Checkpoints
from shardlib.errors import CheckpointError, LaunchError, PlanError
from shardlib.trainer._data import begins_at
from shardlib.trainer._logger import DistributedLogger
from shardlib.trainer._metrics import AccuracyMetric, LearningRateMetric, LossMetric, Metric, ThroughputMetric
from shardlib.trainer._timer import MultiTimer

if TYPE_CHECKING:
    from shardlib.trainer._trainer import Trainer

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
]


class BaseHook:
    """What a trainer calls. Override the points that you need; hooks of lower priority come first, equal ones in order.

    >>> class Greet(BaseHook):
    ...     def before_train(self, trainer):
    ...         print("training begins")
    >>> Greet(priority=5).priority
    5
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """The trainer has it, and nothing has begun; what it will change in `trainer.states` is put there."""

    def before_train(self, trainer: Trainer) -> None:
        """`fit` begins."""

    def after_train(self, trainer: Trainer) -> None:
        """`fit` ends."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """An epoch begins."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """An epoch ends; `trainer.cur_epoch` is still its number, from 0."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """A batch comes."""

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """A batch has been trained on; `trainer.cur_step` is still its number, from 0."""

    def before_test(self, trainer: Trainer) -> None:
        """An evaluation begins."""

    def after_test(self, trainer: Trainer) -> None:
        """It ends."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """It goes through the data, once."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """It has."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """A batch comes."""

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        """A batch has been evaluated."""


def _show(trainer: Trainer, where: str, name: str, metric: Metric) -> None:
    trainer.states["metrics"][where][name] = metric


# --- metrics ---


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
    """Keeps which part of the evaluated examples is right, as "Accuracy".

    Args:
        accuracy_func: of output and label: how many are right, such as `Accuracy()`; or a pair, how many of how many.
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
        self.metric.update(output, label, trainer.engine.schedule.batch_size)

    def after_test_epoch(self, trainer: Trainer) -> None:
        self.metric.get_accumulated_value()


class ThroughputHook(BaseHook):
    """Keeps how many examples a second are trained on and evaluated, as "Throughput".

    Args:
        ignored_steps: the first ones of an epoch, which are slower.
        priority: see `BaseHook`.
        tflop_per_step: trillions of operations of a step, to show how many a second that is.
        use_local: of this rank, and not of all.
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
    """Lets a scheduler step: after each epoch, or after each step that the optimizer takes.

    Args:
        lr_scheduler: built on the optimizer that `initialize` was given, or on the engine's.
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
        """Also where the last step of an epoch was none: that a scheduler takes only steps that are taken is for those
        whose steps they are."""
        optimizer = trainer.engine.optimizer
        skipped, optimizer.step_was_skipped = optimizer.step_was_skipped, False
        try:
            self.lr_scheduler.step()
        finally:
            optimizer.step_was_skipped = skipped


# --- logs ---


def _values(trainer: Trainer, where: str, *, step: bool) -> Iterator[tuple[str, str]]:
    for name, metric in trainer.states["metrics"][where].items():
        if not step:
            yield name, metric.describe(metric.get_accumulated_value())
        elif not metric.epoch_only:
            yield name, metric.describe(metric.get_last_step_value())


class LogMetricByStepHook(BaseHook):
    """Shows each step's numbers beside the progress bar, by `trainer.states["step_metrics"]`."""

    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        trainer.states["step_metrics"] = dict(_values(trainer, "train", step=True))

    def after_test_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        trainer.states["step_metrics"] = dict(_values(trainer, "test", step=True))


class _ByEpoch(BaseHook):
    """Logs on rank 0 after every so many epochs."""

    def __init__(self, logger: DistributedLogger, interval: int, priority: int) -> None:
        super().__init__(priority)
        self.logger, self.interval = logger, _positive("interval", interval)

    def _log(self, trainer: Trainer, where: str, text: str) -> None:
        if text and (trainer.cur_epoch + 1) % self.interval == 0:
            self.logger.info(f"[Epoch {trainer.cur_epoch + 1} / {where}]: {text}", ranks=[0])


class LogMetricByEpochHook(_ByEpoch):
    """Logs the numbers of an epoch and of an evaluation.

    Args:
        logger: such as `get_dist_logger()`.
        interval: in epochs.
        priority: see `BaseHook`.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(logger, interval, priority)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Train", self._text(trainer, "train"))

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Test", self._text(trainer, "test"))

    def _text(self, trainer: Trainer, where: str) -> str:
        return ", ".join(f"{name} = {value}" for name, value in _values(trainer, where, step=False))


class LogTimingByEpochHook(_ByEpoch):
    """Logs how long epochs and steps take.

    Args:
        timer: the trainer's.
        logger: such as `get_dist_logger()`.
        interval: in epochs.
        priority: see `BaseHook`.
        log_eval: of evaluations too.
    """

    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
    ) -> None:
        super().__init__(logger, interval, priority)
        self.timer, self.log_eval = timer, log_eval

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Train", self._text("Train"))

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self.log_eval:
            self._log(trainer, "Test", self._text("Test"))

    def _text(self, kind: str) -> str:
        said = []
        for name, timer in self.timer:
            if name.startswith(kind) and timer.has_history:
                said.append(f"{name}: last = {timer.get_elapsed_time():.5g} s, mean = {timer.get_history_mean():.5g} s")
        return ", ".join(said)


class LogMemoryByEpochHook(_ByEpoch):
    """Logs how much memory of the accelerator was used at most since the last time; on a CPU nothing is known.

    Args:
        logger: such as `get_dist_logger()`.
        interval: in epochs.
        priority: see `BaseHook`.
        log_eval: of evaluations too.
        report_cpu: the most that the process has had of a CPU's memory, from its beginning.
    """

    def __init__(
        self,
        logger: DistributedLogger,
        interval: int = 1,
        priority: int = 10,
        log_eval: bool = True,
        report_cpu: bool = False,
    ) -> None:
        super().__init__(logger, interval, priority)
        self.log_eval, self.report_cpu = log_eval, report_cpu

    def before_train(self, trainer: Trainer) -> None:
        self._log(trainer, "Before training", self._text())

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._log(trainer, "Train", self._text())

    def after_test_epoch(self, trainer: Trainer) -> None:
        if self.log_eval:
            self._log(trainer, "Test", self._text())

    def _text(self) -> str:
        said = []
        if torch.accelerator.is_available():
            said.append(f"{torch.accelerator.max_memory_allocated() / 2**20:.1f} MB allocated on the device")
            torch.accelerator.reset_peak_memory_stats()
        if self.report_cpu:
            said.append(f"{_resident_peak() / 2**20:.1f} MB of the process")
        return ", ".join(said)


def _resident_peak() -> float:
    """Bytes; Linux counts in kilobytes, macOS in bytes."""
    import resource  # not on Windows
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class TensorboardHook(BaseHook):
    """Writes the numbers of steps and epochs for TensorBoard.

    Args:
        log_dir: a folder; each rank that writes has `rank_0` and so on in it.
        ranks: which ranks write; rank 0 alone by default.
        priority: see `BaseHook`.

    Raises:
        LaunchError: the package tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str], ranks: Sequence[int] | None = None, priority: int = 10) -> None:
        super().__init__(priority)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise LaunchError(
                "TensorboardHook needs the package tensorboard, which is not installed: pip install tensorboard."
            ) from error
        rank = _of_job("RANK", 0)
        writes = rank in ((0,) if ranks is None else ranks)
        self.writer = SummaryWriter(str(Path(log_dir) / f"rank_{rank}")) if writes else None

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        self._write(trainer, "train", trainer.cur_step, step=True)

    def after_train_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, "train", trainer.cur_epoch, step=False)

    def after_test_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, "test", trainer.cur_epoch, step=False)

    def after_train(self, trainer: Trainer) -> None:
        if self.writer is not None:
            self.writer.flush()

    def after_test(self, trainer: Trainer) -> None:
        if self.writer is not None:
            self.writer.flush()

    def _write(self, trainer: Trainer, where: str, number: int, *, step: bool) -> None:
        for name, metric in trainer.states["metrics"][where].items():
            if step and metric.epoch_only:
                continue
            value = metric.get_last_step_value() if step else metric.get_accumulated_value()  # on all ranks: collective
            if self.writer is not None:
                self.writer.add_scalar(f"{name}/{where}/{'step' if step else 'epoch'}", value, number)


# --- checkpoints ---


class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer, scheduler, position in the data and random states, as `shardlib.Checkpoints` in a folder.

    In the midst of a step that accumulation makes of several batches nothing is saved: its end is waited for.

    Args:
        interval: in epochs, or in batches.
        checkpoint_dir: the folder.
        model: by default the engine's.
        save_by_iter: count batches.
        priority: see `BaseHook`; later than what changes with the step.
        resume: begin where the newest checkpoint in the folder ends, if there is one: on any number of ranks, with any
            config.

    Raises:
        CheckpointError: no folder, or an interval that is none.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
        *,
        resume: bool = False,
    ) -> None:
        super().__init__(priority)
        if checkpoint_dir is None:
            raise CheckpointError("SaveCheckpointHook was given no checkpoint_dir; give a folder that all ranks see.")
        self.interval, self.save_by_iter, self.resume = _positive("interval", interval), save_by_iter, resume
        self.checkpoints, self.model = Checkpoints(checkpoint_dir), model
        self._due = False

    def before_train(self, trainer: Trainer) -> None:
        if self.resume and self.checkpoints.latest() is not None:
            self._go_on(trainer)

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: Any) -> None:
        done = trainer.cur_step + 1
        self._due = self._due or (self.save_by_iter and done % self.interval == 0)
        of_epoch = trainer.steps_of_epoch + 1
        # At the end of an epoch what is done once an epoch is still to come.
        if self._due and of_epoch < trainer.steps_per_epoch and not trainer.engine.is_between_passes():
            self._save(trainer, done, of_epoch)

    def after_train_epoch(self, trainer: Trainer) -> None:
        due = self._due or (not self.save_by_iter and (trainer.cur_epoch + 1) % self.interval == 0)
        if due and not trainer.engine.is_between_passes():
            self._save(trainer, trainer.cur_step, trainer.steps_of_epoch)

    def _save(self, trainer: Trainer, step: int, of_epoch: int) -> None:
        self._due = False
        ended = of_epoch >= trainer.steps_per_epoch
        begun = {"epoch": trainer.cur_epoch + ended, "step": step, "of_epoch": 0 if ended else of_epoch}
        loader = trainer.train_dataloader
        has_position = not ended and hasattr(loader, "state_dict")
        self.checkpoints.save(
            step,
            *self._trained(trainer),
            lr_scheduler=_scheduler_of(trainer),
            dataloader=loader if has_position else None,
            extra={**begun, "has_position": has_position},
        )

    def _go_on(self, trainer: Trainer) -> None:
        loaded = self.checkpoints.load(*self._trained(trainer), lr_scheduler=_scheduler_of(trainer), cast=True)
        begun, loader = loaded.extra, trainer.train_dataloader
        of_epoch = int(begun["of_epoch"])
        if begun["has_position"] and hasattr(loader, "load_state_dict"):
            self.checkpoints.load(dataloader=loader, random=False)
            of_epoch = begins_at(loader) or of_epoch
        trainer.begin_at(int(begun["epoch"]), int(begun["step"]), of_epoch)

    def _trained(self, trainer: Trainer) -> tuple[nn.Module, Any]:
        model = trainer.engine.model if self.model is None else self.model
        if model is not trainer.engine.model:
            raise PlanError("SaveCheckpointHook was given another model than the engine's; leave model out.")
        return model, trainer.engine.optimizer


def _scheduler_of(trainer: Trainer) -> Any:
    """The one that a hook drives, else the one that `initialize` was given."""
    driven = [hook.lr_scheduler for hook in trainer.hooks if isinstance(hook, LRSchedulerHook)]
    return driven[0] if driven else trainer.engine.lr_scheduler


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value!r} was given; give a whole number from 1 up.")
    return value
