"""The base of hooks: the points at which a trainer calls them."""

from __future__ import annotations

from typing import Any

from shardlib.errors import PlanError

__all__ = ["BaseHook", "positive"]


class BaseHook:
    """The base of hooks that a `Trainer` calls, with itself. Override the points that you need; hooks of lower priority
    run first, equal ones in order.

    >>> class Greet(BaseHook):
    ...     def before_train(self, trainer):
    ...         print("training begins")
    >>> Greet(priority=5).priority
    5
    """

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Any) -> None:
        """Run when the hook is attached, before training; initialize what it will change in `trainer.states`."""

    def before_train(self, trainer: Any) -> None:
        """Run when `fit` begins."""

    def after_train(self, trainer: Any) -> None:
        """Run when `fit` ends."""

    def before_train_epoch(self, trainer: Any) -> None:
        """Run when an epoch begins."""

    def after_train_epoch(self, trainer: Any) -> None:
        """Run when an epoch ends; `trainer.cur_epoch` is still its number, from 0."""

    def before_train_iter(self, trainer: Any) -> None:
        """Run before a batch."""

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Run after a batch; `trainer.cur_step` is still its number, from 0."""

    def before_test(self, trainer: Any) -> None:
        """Run when an evaluation begins."""

    def after_test(self, trainer: Any) -> None:
        """Run when an evaluation ends."""

    def before_test_epoch(self, trainer: Any) -> None:
        """Run before an evaluation's pass over the data."""

    def after_test_epoch(self, trainer: Any) -> None:
        """Run after an evaluation's pass over the data."""

    def before_test_iter(self, trainer: Any) -> None:
        """Run before a batch of an evaluation."""

    def after_test_iter(self, trainer: Any, output: Any, label: Any, loss: Any) -> None:
        """Run after a batch of an evaluation."""


def positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name}={value!r} was given; give an integer from 1 up.")
    return value
