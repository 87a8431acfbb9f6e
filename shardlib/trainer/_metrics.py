"""Training metrics, the same on every rank and equal to one device's: sums over the examples of all data ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardlib.errors import InputError
from shardlib.trainer._engine import Engine

__all__ = ["Accuracy", "AccuracyMetric", "LearningRateMetric", "LossMetric", "Metric", "ThroughputMetric"]


class Metric:
    """A number of each step and of each epoch. Your own is a subclass that hooks update.

    Attributes:
        epoch_only: whether a single step has none.

    >>> class Skipped(Metric):
    ...     "How many steps were none."
    ...     def reset(self): self.count = 0
    ...     def get_accumulated_value(self): return self.count
    >>> Skipped().describe(3.0)
    '3'
    """

    epoch_only = False

    def reset(self) -> None:
        """Reset the metric at the start of an epoch."""
        raise NotImplementedError

    def get_last_step_value(self) -> float:
        """Return the value of the last step. Collective: all ranks call it."""
        raise NotImplementedError

    def get_accumulated_value(self) -> float:
        """Return the value of all steps since `reset`. Collective, except at the end of an epoch, when it is known."""
        raise NotImplementedError

    def describe(self, value: float) -> str:
        """Format a value."""
        return f"{value:.5g}"


class _Ratio(Metric):
    """A ratio of sums, in which all examples have equal weight.

    Sums are over all ranks: model axes count all examples equally often, and a stage without outputs adds none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.reset()

    def reset(self) -> None:
        self._last = self._all = torch.zeros(2, dtype=torch.float64)
        self._known: float | None = None

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._engine.everyone

    def _add(self, above: Any, below: Any) -> None:
        device = self._engine.device
        self._last = torch.stack(
            [torch.as_tensor(part, dtype=torch.float64, device=device).detach() for part in (above, below)]
        )
        self._all, self._known = self._all.to(device) + self._last, None

    def get_last_step_value(self) -> float:
        return self._over_ranks(self._last)

    def get_accumulated_value(self) -> float:
        if self._known is None:
            self._known = self._over_ranks(self._all)
        return self._known

    def _over_ranks(self, pair: torch.Tensor) -> float:
        total, group = pair.to(self._engine.device, copy=True), self._group
        if group is not None:
            dist.all_reduce(total, group=group)
        above, below = total.tolist()
        return above / below if below else float("nan")


class LossMetric(_Ratio):
    """The mean loss over examples; of losses that come as (sum, count), over what they count.

    >>> from shardlib.trainer import initialize
    >>> model = torch.nn.Linear(1, 1)
    >>> engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    >>> loss = LossMetric(engine)
    >>> loss.update(torch.tensor(1.0), 3)
    >>> loss.update(torch.tensor(2.0), 1)
    >>> loss.get_last_step_value(), loss.get_accumulated_value()
    (2.0, 1.25)
    """

    def update(self, loss: Any, batch_size: int) -> None:
        """Add a step's loss: a mean over a number of examples, or a pair (sum, count)."""
        if isinstance(loss, tuple | list):
            self._add(*loss)
        elif loss is not None and batch_size:
            # Not times zero where there are none: the mean over nothing is not a number.
            self._add(loss.detach().double() * batch_size, batch_size)
        else:
            self._add(0.0, 0)


class AccuracyMetric(_Ratio):
    """The fraction of all examples whose prediction is right.

    Args:
        engine: the engine, over whose data ranks examples are counted.
        accuracy_func: a function (output, label) -> the number of right examples, or a pair (right, all).

    >>> from shardlib.trainer import initialize
    >>> model = torch.nn.Linear(2, 2)
    >>> engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    >>> accuracy = AccuracyMetric(engine, Accuracy())
    >>> accuracy.update(torch.eye(2), torch.tensor([0, 0]), batch_size=2)
    >>> accuracy.get_accumulated_value()
    0.5
    """

    epoch_only = True

    def __init__(self, engine: Engine, accuracy_func: Callable[[Any, Any], Any]) -> None:
        super().__init__(engine)
        self.accuracy_func = accuracy_func

    def update(self, output: Any, label: Any, batch_size: int) -> None:
        """Add a step.

        Raises:
            InputError: the function's result is not a number of examples.
        """
        result = self.accuracy_func(output, label) if batch_size else 0
        right, count = map(float, result if isinstance(result, tuple | list) else (result, batch_size))
        if not right.is_integer() or not 0 <= right <= count:
            raise InputError(
                f"accuracy_func says {right:g} of {count:g} examples; it must return the number of right examples, not "
                "their fraction: (output.argmax(-1) == label).sum(), or with their number where that is not the "
                "batch's, as a pair."
            )
        self._add(right, count)


class LearningRateMetric(Metric):
    """The learning rate of the first group, as it is.

    Args:
        epoch_only: whether the rate changes with epochs only.
        lr_scheduler: the scheduler of the rate.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    >>> LearningRateMetric(True, torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)).get_accumulated_value()
    0.25
    """

    def __init__(self, epoch_only: bool, lr_scheduler: Any) -> None:
        self.epoch_only, self.lr_scheduler = epoch_only, lr_scheduler

    def reset(self) -> None:
        """Keep the value."""

    def get_last_step_value(self) -> float:
        return float(self.lr_scheduler.get_last_lr()[0])

    def get_accumulated_value(self) -> float:
        return self.get_last_step_value()


class ThroughputMetric(_Ratio):
    """Examples a second: of all data ranks together, or of this one.

    Args:
        engine: the engine.
        tflop_per_step: trillions of operations of a step on one rank, to show operations per second.
        use_local: count this rank's examples only.

    >>> from shardlib.trainer import initialize
    >>> model = torch.nn.Linear(2, 2)
    >>> engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    >>> throughput = ThroughputMetric(engine, tflop_per_step=3.0)
    >>> throughput.update(64, 0.5)
    >>> throughput.describe(throughput.get_last_step_value())
    '128 samples/s, 6 TFLOPS'
    """

    def __init__(self, engine: Engine, tflop_per_step: float = 0.0, use_local: bool = False) -> None:
        self.tflop_per_step, self.use_local = tflop_per_step, use_local
        self._steps = 0
        super().__init__(engine)

    def reset(self) -> None:
        super().reset()
        self._steps = 0

    def update(self, num_samples: int, seconds: float) -> None:
        """Add a step."""
        self._steps += 1
        self._add(num_samples, seconds)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return None if self.use_local else self._engine.data_group

    def _over_ranks(self, pair: torch.Tensor) -> float:
        ranks = 1 if self._group is None else dist.get_world_size(self._group)
        return super()._over_ranks(pair) * ranks  # seconds are those of all ranks, on end

    def describe(self, value: float) -> str:
        flops = ""
        if self.tflop_per_step and self._steps:
            flops = f", {self.tflop_per_step * self._steps / self._all[1].item():.5g} TFLOPS"
        return f"{value:.5g} samples/s{flops}"


class Accuracy:
    """The number of examples of a batch whose largest output is right, for `AccuracyHook(Accuracy())`.

    >>> Accuracy()(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(1)
    """

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.argmax(-1) == label).sum()
