"""Learning rate schedulers with ColossalAI's names and arguments, most of them torch's own.

They take an optimizer, the optimizer of `Booster.boost`, or an `OptimizerWrapper`. Those with a warm-up are functions
of the initial learning rate and the number of steps only: t below counts steps from 0, w is `warmup_steps`, T is
`total_steps`. After T the rate is constant; a longer warm-up runs to its end, with a warning. So they continue from a
state dict, or from `last_epoch`, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal

import torch
from torch.optim import lr_scheduler as of_torch

from shardlib.errors import InputError, warn

__all__ = [
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]

Optimizer = torch.optim.Optimizer
Lambda = Callable[[int], float] | Sequence[Callable[[int], float]]


class _Warmed(of_torch.LRScheduler):
    """A rate that is a function of the initial rate and of the number of steps.

    It rises as `base (t + 1) / w` while t < w; then a schedule follows, whose steps are counted from there.
    """

    _top = 0  # the first rate is reached so many steps after the last one of the warm-up

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int, last_epoch: int) -> None:
        self.total_steps, self.warmup_steps = _whole_steps(type(self).__name__, total_steps, warmup_steps)
        if self.warmup_steps >= self.total_steps:
            self._warn()
        super().__init__(optimizer, last_epoch)

    def _warn(self) -> None:
        reached = f"{self.total_steps}/{self.warmup_steps + self._top}"
        warn(
            f"{type(self).__name__} was given total_steps={self.total_steps} and warmup_steps={self.warmup_steps}: "
            f"training ends before the warm-up does. The rate rises to {reached} of the optimizer's and never falls. "
            "Steps are those of the optimizer, not epochs: give total_steps=epochs * len(dataloader), or a shorter "
            "warm-up.",
        )

    def get_lr(self) -> list[Any]:
        at = min(self.last_epoch, max(self.total_steps, self.warmup_steps))
        return [self._rate(base, at) for base in self.base_lrs]

    def _rate(self, base: Any, step: int) -> Any:
        if step < self.warmup_steps:
            return base * ((step + 1) / (self.warmup_steps + self._top))
        left = self.total_steps - self.warmup_steps
        return self._after(base, step - self.warmup_steps, left) if left > 0 else base

    def _after(self, base: Any, step: int, steps: int) -> Any:
        raise NotImplementedError


class LinearWarmupLR(_Warmed):
    """Linear warm-up, then linear decay to 0: `base (t + 1) / (w + 1)` while t < w, then `base (T - t) / (T - w)`.

    Warns if the warm-up takes all steps or more: the rate then only rises, to `base` at w.

    Args:
        optimizer: the optimizer whose rate is changed.
        total_steps: T, when it is 0.
        warmup_steps: w.
        last_epoch: the step to go on from; -1 begins.

    Raises:
        InputError: steps that are not integers, or none at all.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(LinearWarmupLR(optimizer, total_steps=4, warmup_steps=1), 5)
    [0.5, 1.0, 0.667, 0.333, 0.0]
    """

    _top = 1

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after(self, base: Any, step: int, steps: int) -> Any:
        return base * ((steps - step) / steps)


class CosineAnnealingLR(of_torch.CosineAnnealingLR):
    """torch's, over `total_steps`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(CosineAnnealingLR(optimizer, total_steps=4), 5)
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1) -> None:
        total_steps, _ = _whole_steps("CosineAnnealingLR", total_steps)
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(_Warmed):
    """Warm-up, then a half cosine down to `eta_min`, over the steps that are left.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(CosineAnnealingWarmupLR(optimizer, total_steps=6, warmup_steps=2), 7)
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after(self, base: Any, step: int, steps: int) -> Any:
        return _cosine(base, self.eta_min, step, steps)


class FlatAnnealingWarmupLR(_Warmed):
    """Warm-up, the full rate for `pct_start` of the steps that are left, then a half cosine down to `eta_min`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(FlatAnnealingWarmupLR(optimizer, total_steps=5, warmup_steps=1, pct_start=0.5), 6)
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        if not 0.0 <= pct_start <= 1.0:
            raise InputError(f"{type(self).__name__} was given pct_start={pct_start!r}; give a fraction from 0 to 1.")
        self.pct_start, self.eta_min = pct_start, eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after(self, base: Any, step: int, steps: int) -> Any:
        flat = int(steps * self.pct_start)
        return base if step <= flat else _cosine(base, self.eta_min, step - flat, steps - flat)


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """The full rate for `pct_start` of the steps, then a half cosine down to 0.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(FlatAnnealingLR(optimizer, total_steps=4, pct_start=0.5), 5)
    [1.0, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, last_epoch=last_epoch)


class MultiStepLR(of_torch.MultiStepLR):
    """torch's; `total_steps` says how long training is, on which this schedule does not depend.

    Warns if there are no milestones: the rate then stays.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(MultiStepLR(optimizer, total_steps=4, milestones=[1, 3]), 4)
    [1.0, 0.1, 0.1, 0.01]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        *,
        num_steps_per_epoch: int = -1,
    ) -> None:
        _warn_of_epochs("MultiStepLR", num_steps_per_epoch)
        if not milestones:
            warn(
                f"MultiStepLR was given milestones={milestones!r}: the rate never drops. Give the steps at which it "
                "does, as in [30, 60].",
            )
        super().__init__(optimizer, sorted(map(int, milestones or ())), gamma=gamma, last_epoch=last_epoch)


class MultiStepWarmupLR(_Warmed):
    """Warm-up, then times `gamma` at each milestone; milestones before the end of the warm-up do not count.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(MultiStepWarmupLR(optimizer, total_steps=5, warmup_steps=2, milestones=[1, 3]), 5)
    [0.5, 1.0, 1.0, 0.1, 0.1]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        *,
        num_steps_per_epoch: int = -1,
    ) -> None:
        _warn_of_epochs("MultiStepWarmupLR", num_steps_per_epoch)
        self.milestones, self.gamma = _milestones("MultiStepWarmupLR", milestones), gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after(self, base: Any, step: int, steps: int) -> Any:
        passed = sum(self.warmup_steps <= at <= step + self.warmup_steps for at in self.milestones)
        return base * self.gamma**passed


class PolynomialWarmupLR(_Warmed):
    """Warm-up, then `(base - end_lr) (1 - t / T)**power + end_lr` over the steps that are left.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(PolynomialWarmupLR(optimizer, total_steps=3, warmup_steps=1, end_lr=0.5), 4)
    [1.0, 1.0, 0.75, 0.5]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        if end_lr < 0:
            raise InputError(f"{type(self).__name__} was given end_lr={end_lr!r}; give a rate from 0 up.")
        self.end_lr, self.power = end_lr, power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after(self, base: Any, step: int, steps: int) -> Any:
        return (base - self.end_lr) * (1 - step / steps) ** self.power + self.end_lr


class PolynomialLR(PolynomialWarmupLR):
    """`(base - end_lr) (1 - t / T)**power + end_lr`.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(PolynomialLR(optimizer, total_steps=2, end_lr=0.5), 3)
    [1.0, 0.75, 0.5]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr=end_lr, power=power, last_epoch=last_epoch)


class OneCycleLR(of_torch.OneCycleLR):
    """torch's; the largest rate of each group is the one that the optimizer was built with.

    Args:
        optimizer: the optimizer whose rate and momentum are changed.
        total_steps: the number of steps of the cycle.
        pct_start: as torch's, like all that follow.
        anneal_strategy: see there.
        cycle_momentum: see there.
        base_momentum: see there.
        max_momentum: see there.
        div_factor: see there.
        final_div_factor: see there.
        last_epoch: see there.
        **options: further options of torch's, such as `three_phase`; `verbose`, which it no longer has, warns.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    >>> _rates(OneCycleLR(optimizer, total_steps=5, pct_start=0.4), 5)
    [0.04, 1.0, 0.75, 0.25, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        last_epoch: int = -1,
        **options: Any,
    ) -> None:
        total_steps, _ = _whole_steps("OneCycleLR", total_steps)
        if options.pop("verbose", None) is not None:
            warn("OneCycleLR ignores verbose=: print get_last_lr() instead.")
        # A cycle that is gone on with has left its largest rate in the groups, beside the present one.
        largest = [group.get("max_lr", group["lr"]) for group in optimizer.param_groups]
        super().__init__(
            optimizer,
            largest,
            total_steps=total_steps,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
            **options,
        )


class LambdaLR(of_torch.LambdaLR):
    """torch's; `total_steps` says how long training is, on which this schedule does not depend.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(LambdaLR(optimizer, total_steps=3, lr_lambda=lambda step: 1 / (1 + step)), 3)
    [1.0, 0.5, 0.333]
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Lambda | None = None, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _function("LambdaLR", lr_lambda), last_epoch=last_epoch)


class MultiplicativeLR(of_torch.MultiplicativeLR):
    """torch's; `total_steps` says how long training is, on which this schedule does not depend.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(MultiplicativeLR(optimizer, total_steps=3, lr_lambda=lambda step: 0.5), 3)
    [1.0, 0.5, 0.25]
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, lr_lambda: Lambda | None = None, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, _function("MultiplicativeLR", lr_lambda), last_epoch=last_epoch)


class StepLR(of_torch.StepLR):
    """torch's; `total_steps` says how long training is, on which this schedule does not depend.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(StepLR(optimizer, total_steps=4, step_size=2), 4)
    [1.0, 1.0, 0.1, 0.1]
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma=gamma, last_epoch=last_epoch)


class ExponentialLR(of_torch.ExponentialLR):
    """torch's; `total_steps` says how long training is, on which this schedule does not depend.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(ExponentialLR(optimizer, total_steps=3, gamma=0.5), 3)
    [1.0, 0.5, 0.25]
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch=last_epoch)


class ConstantLR(of_torch.ConstantLR):
    """torch's; `total_steps` says how long training is, on which this schedule does not depend.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> _rates(ConstantLR(optimizer, total_steps=4, factor=0.5, total_iters=2), 4)
    [0.5, 0.5, 1.0, 1.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        factor: float = 1.0 / 3,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, factor, total_iters, last_epoch=last_epoch)


def _cosine(base: Any, least: float, step: int, steps: int) -> Any:
    """Return the rate on a half cosine between two rates (Loshchilov & Hutter 2016,
    https://arxiv.org/abs/1608.03983)."""
    return least + (base - least) * ((1 + math.cos(math.pi * step / steps)) / 2)


def _whole_steps(who: str, total: Any, warmup: Any = 0) -> tuple[int, int]:
    """Return the numbers of steps as `int`; numpy's integers, and floats such as 10.0, are whole numbers too."""
    total_steps, warmup_steps = _whole(total), _whole(warmup)
    if total_steps is None or warmup_steps is None or total_steps < 1 or warmup_steps < 0:
        raise InputError(
            f"{who} was given total_steps={total!r} and warmup_steps={warmup!r}; give integers: total steps from 1 up"
            ", those of the warm-up from 0 up."
        )
    return total_steps, warmup_steps


def _whole(number: Any) -> int | None:
    is_whole = isinstance(number, Real) and not isinstance(number, bool) and math.isfinite(number)
    return int(number) if is_whole and number == int(number) else None


def _warn_of_epochs(who: str, num_steps_per_epoch: int) -> None:
    if num_steps_per_epoch != -1:
        warn(f"{who} ignores num_steps_per_epoch=: milestones are steps, not epochs.")


def _milestones(who: str, given: Sequence[int] | None) -> list[int]:
    if not given:
        raise InputError(
            f"{who} was given milestones={given!r}; give the steps at which the rate drops, as in [30, 60]."
        )
    return sorted(int(at) for at in given)


def _function(who: str, given: Lambda | None) -> Any:
    if given is None:
        raise InputError(f"{who} was given no lr_lambda; give a function of the step, or one for each param group.")
    return given


def _rates(scheduler: of_torch.LRScheduler, steps: int) -> list[float]:
    """Return the first rates, for the examples of this page."""
    found = []
    for _ in range(steps):
        found.append(round(float(scheduler.get_last_lr()[0]), 3))
        scheduler.optimizer.step()
        scheduler.step()
    return found
