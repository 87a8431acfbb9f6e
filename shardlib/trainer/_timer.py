"""Timers by name."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from shardlib.errors import InputError, nearest

__all__ = ["MultiTimer", "Timer"]


class Timer:
    """Measures seconds from `start` to `stop`, when the device has done its work.

    >>> timer = Timer()
    >>> timer.start()
    >>> timer.stop(keep_in_history=True) >= 0, timer.has_history
    (True, True)
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def current_time(self) -> float:
        """Now, in seconds, when the device has done its work."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()

    @property
    def has_history(self) -> bool:
        """Whether any measurement was kept."""
        return bool(self._history)

    def start(self) -> None:
        """Start the measurement."""
        self._began = self.current_time

    def stop(self, keep_in_history: bool = False) -> float:
        """Stop, and keep the measurement if asked to; return it."""
        if self._began is None:
            raise InputError("A timer was stopped that was not started. Call start() first.")
        self._elapsed, self._began = self.current_time - self._began, None
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_elapsed_time(self) -> float:
        """Return the last measurement."""
        return self._elapsed

    def get_history_sum(self) -> float:
        """Return the sum of all kept measurements."""
        return sum(self._history)

    def get_history_mean(self) -> float:
        """Return the mean of all kept measurements.

        Raises:
            InputError: none was kept.
        """
        if not self._history:
            raise InputError("A timer without history has no mean. Stop it with keep_in_history=True.")
        return sum(self._history) / len(self._history)

    def reset(self) -> None:
        """Forget all."""
        self._began, self._elapsed = None, 0.0
        self._history.clear()


class MultiTimer:
    """Timers by name, each created at its first start.

    Args:
        on: whether to measure.

    >>> timer = MultiTimer()
    >>> timer.start("step")
    >>> timer.stop("step", keep_in_history=True) >= 0
    True
    >>> [name for name, _ in timer]
    ['step']
    """

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Start a timer."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float:
        """Stop a timer; return the seconds, 0 where nothing is measured."""
        return self.get_timer(name).stop(keep_in_history) if self._on else 0.0

    def get_timer(self, name: str) -> Timer:
        """Return the timer of a name.

        Raises:
            InputError: none was started under it.
        """
        if name not in self._timers:
            there = ", ".join(f'"{known}"' for known in self._timers) or "none"
            raise InputError(f'There is no timer "{name}"; there are {there}.{nearest(name, self._timers)}')
        return self._timers[name]

    def has(self, name: str) -> bool:
        """Return whether there is a timer of this name."""
        return name in self._timers

    def reset(self, name: str | None = None) -> None:
        """Reset one timer, or all."""
        for known, timer in self._timers.items():
            if name in (None, known):
                timer.reset()

    def is_on(self) -> bool:
        """Return whether timers measure."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Measure from now on, or no more."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        return iter(self._timers.items())
