"""Hooks that report what others have measured: beside the progress bar, in a log, to TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardlib._measure import peak_bytes, process_peak_bytes, summary_writer
from shardlib.trainer._context import ParallelMode, global_context
from shardlib.trainer._logger import DistributedLogger
from shardlib.trainer._timer import MultiTimer
from shardlib.trainer.hooks._base import BaseHook, positive

if TYPE_CHECKING:
    from shardlib.trainer._trainer import Trainer

__all__ = [
    "LogMemoryByEpochHook",
    "LogMetricByEpochHook",
    "LogMetricByStepHook",
    "LogTimingByEpochHook",
    "TensorboardHook",
]


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
        self.logger, self.interval = logger, positive("interval", interval)

    def _log(self, trainer: Trainer, where: str, text: str) -> None:
        if text and (trainer.cur_epoch + 1) % self.interval == 0:
            self.logger.info(f"[Epoch {trainer.cur_epoch + 1} / {where}]: {text}", ranks=[0])


class LogMetricByEpochHook(_ByEpoch):
    """Logs the metrics of an epoch and of an evaluation.

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
    """Logs the times of epochs and steps.

    Args:
        timer: the trainer's.
        logger: such as `get_dist_logger()`.
        interval: in epochs.
        priority: see `BaseHook`.
        log_eval: log evaluations too.
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
        parts = []
        for name, timer in self.timer:
            if name.startswith(kind) and timer.has_history:
                parts.append(
                    f"{name}: last = {timer.get_elapsed_time():.5g} s, mean = {timer.get_history_mean():.5g} s"
                )
        return ", ".join(parts)


class LogMemoryByEpochHook(_ByEpoch):
    """Logs the peak of the accelerator's memory since the last time; not on a CPU.

    Args:
        logger: such as `get_dist_logger()`.
        interval: in epochs.
        priority: see `BaseHook`.
        log_eval: log evaluations too.
        report_cpu: log the peak of the process's CPU memory too.
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
        parts = []
        if torch.accelerator.is_available():
            parts.append(f"{peak_bytes() / 2**20:.1f} MB allocated on the device")
            torch.accelerator.reset_peak_memory_stats()
        if self.report_cpu:
            parts.append(f"{process_peak_bytes() / 2**20:.1f} MB of the process")
        return ", ".join(parts)


class TensorboardHook(BaseHook):
    """Writes the metrics of steps and epochs for TensorBoard.

    Args:
        log_dir: a folder; each rank that writes has `rank_0` and so on in it.
        ranks: the ranks that write; the first one by default.
        parallel_mode: the mode in which ranks are numbered; by default all ranks.
        priority: see `BaseHook`.

    Raises:
        LaunchError: the package tensorboard is not installed.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode | str = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        writes = global_context.get_local_rank(parallel_mode) in ((0,) if ranks is None else ranks)
        folder = Path(log_dir) / f"rank_{global_context.get_global_rank()}"
        self.writer = summary_writer("TensorboardHook", folder if writes else None)

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
