"""What all hooks are: the points at which a trainer calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardlib.errors import PlanError

if TYPE_CHECKING:
    from shardlib.trainer._trainer import Trainer

__all__ = ["BaseHook", "positive"]


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


def positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value!r} was given; give a whole number from 1 up.")
    return value
