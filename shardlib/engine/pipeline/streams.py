"""Random streams of a pipeline step.

Between steps, the stages of one data rank have the same states of torch's default generators. So what draws there, such
as a loader that shuffles, draws the same on all of them. In a step, each call of a module of the stages has a stream of
its own, and so has the code between two calls, which every stage runs. A stream follows from the states before the
step, the microbatch and the number of the call. So masks of stages differ, do not depend on the schedule, and what
forward draws between modules is the same on all stages, whatever modules these have called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardlib.engine import _torch

__all__ = ["Streams"]


class Streams:
    """The random streams of this rank in one step.

    Args:
        device: the device of the model, whose generator has streams too.

    Attributes:
        drew: whether anything has drawn in this step on this rank.
    """

    @_torch.no_modes()  # a recording counts the memory of a model, and not of these states
    def __init__(self, device: torch.device) -> None:
        self._accelerator: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._before = self._begun = self._states()
        self._key = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in self._before)).digest()
        self.drew = False

    @_torch.no_modes()
    def begin(self, *place: Any) -> None:
        """Begin the stream of a place in the step: a microbatch, a number of a call, and the like."""
        self.end()
        _torch.seed_all(self._number(*place))
        if not self.drew:
            self._begun = self._states()

    @_torch.no_modes()
    def end(self) -> None:
        """Note whether the last stream was drawn from."""
        self.drew = self.drew or any(map(_differ, self._begun, self._states()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for the actions of the step. It restores the states before the step."""
        try:
            yield
        finally:
            self.end()
            self.restore()

    def advance(self) -> None:
        """Continue with other states than before the step, in which some rank has drawn. All ranks call it then."""
        _torch.seed_all(self._number("next"))

    def _number(self, *place: Any) -> int:
        return int.from_bytes(hashlib.blake2b(repr(place).encode(), key=self._key, digest_size=8).digest()[:7])

    def _states(self) -> list[torch.Tensor]:
        accelerator = [] if self._accelerator is None else [self._accelerator.get_rng_state()]
        return [torch.get_rng_state(), *accelerator]

    def restore(self) -> None:
        """Restore the states before the step."""
        torch.set_rng_state(self._before[0])
        for state in self._before[1:]:
            self._accelerator.set_rng_state(state)


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one, other)
