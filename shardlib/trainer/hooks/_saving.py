"""The hook that saves, and lets training go on from what was saved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from shardlib.checkpoint import Checkpoints
from shardlib.errors import CheckpointError, PlanError
from shardlib.trainer._data import begins_at
from shardlib.trainer.hooks._base import BaseHook, positive
from shardlib.trainer.hooks._measuring import LRSchedulerHook

if TYPE_CHECKING:
    from shardlib.trainer._trainer import Trainer

__all__ = ["SaveCheckpointHook"]


class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer, scheduler, position in the data and random states, as `shardlib.Checkpoints` in a folder.

    Under accumulation the hook saves only at the end of a step.

    Args:
        interval: the number of epochs, or of batches, between checkpoints.
        checkpoint_dir: the folder.
        model: by default the engine's.
        save_by_iter: count batches instead of epochs.
        priority: see `BaseHook`; after the hooks that change state with the step.
        resume: a trainer that has not trained yet continues from the newest checkpoint in the folder, if there is one:
            on any number of ranks, with any config.

    Raises:
        CheckpointError: the path is not a folder.
        PlanError: an invalid interval.
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
        self.interval, self.save_by_iter, self.resume = positive("interval", interval), save_by_iter, resume
        self.checkpoints, self.model = Checkpoints(checkpoint_dir), model
        self._due = False

    def before_train(self, trainer: Trainer) -> None:
        if self.resume and trainer.cur_step == 0:
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
        options: dict[str, Any] = {"lr_scheduler": _scheduler_of(trainer), "cast": True}
        loaded = self.checkpoints.load(*self._trained(trainer), missing_ok=True, **options)
        if loaded is None:
            return
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
    """Return the scheduler that a hook drives, else the one that was passed to `initialize`."""
    driven = [hook.lr_scheduler for hook in trainer.hooks if isinstance(hook, LRSchedulerHook)]
    return driven[0] if driven else trainer.engine.lr_scheduler
