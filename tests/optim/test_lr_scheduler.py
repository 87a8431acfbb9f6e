"""Schedulers follow their formulas, are torch's where torch says the same, and go on exactly from any step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as of_torch

from shardlib.errors import InputError
from shardlib.optim import lr_scheduler as ours

LR = 0.3


def new(momentum: float = 0.9) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 2 * LR}], lr=LR, momentum=momentum)


def rates(scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr()[1] == scheduler.optimizer.param_groups[1]["lr"]
        scheduler.optimizer.step()
        scheduler.step()
    return found


def half_cosine(t: float) -> float:
    return (1 + math.cos(math.pi * t)) / 2


def warm(t: int, w: int, after: Callable[[int], float]) -> float:
    return (t + 1) / w if t < w else after(t - w)


T, W = 10, 3
FORMULAS: dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]] = {
    "linear": (lambda o: ours.LinearWarmupLR(o, T, W), lambda t: (t + 1) / (W + 1) if t < W else (T - t) / (T - W)),
    "linear, cold": (lambda o: ours.LinearWarmupLR(o, T), lambda t: (T - t) / T),
    "cosine": (lambda o: ours.CosineAnnealingLR(o, T), lambda t: half_cosine(t / T)),
    "cosine, warm": (
        lambda o: ours.CosineAnnealingWarmupLR(o, T, W, eta_min=0.1 * LR),
        lambda t: warm(t, W, lambda s: 0.1 + 0.9 * half_cosine(s / (T - W))),
    ),
    "flat": (lambda o: ours.FlatAnnealingLR(o, T, 0.5), lambda t: 1.0 if t <= 5 else half_cosine((t - 5) / 5)),
    "flat, warm": (
        lambda o: ours.FlatAnnealingWarmupLR(o, T, W, 0.6, eta_min=0.1 * LR),
        lambda t: warm(t, W, lambda s: 1.0 if s <= 4 else 0.1 + 0.9 * half_cosine((s - 4) / 3)),
    ),
    "flat to the end": (lambda o: ours.FlatAnnealingLR(o, T, 1.0), lambda t: 1.0),
    "steps": (lambda o: ours.MultiStepLR(o, T, [2, 6], 0.5), lambda t: 0.5 ** ((t >= 2) + (t >= 6))),
    "steps, warm": (
        lambda o: ours.MultiStepWarmupLR(o, T, W, [1, 5, 8], 0.5),
        lambda t: (t + 1) / W if t < W else 0.5 ** ((t >= 5) + (t >= 8)),
    ),
    "polynomial": (
        lambda o: ours.PolynomialLR(o, T, end_lr=0.1 * LR, power=2.0),
        lambda t: 0.1 + 0.9 * (1 - t / T) ** 2,
    ),
    "polynomial, warm": (
        lambda o: ours.PolynomialWarmupLR(o, T, W, end_lr=0.1 * LR),
        lambda t: warm(t, W, lambda s: 0.1 + 0.9 * (1 - s / (T - W))),
    ),
    "lambda": (lambda o: ours.LambdaLR(o, T, lambda t: 1 / (t + 1)), lambda t: 1 / (t + 1)),
    "multiplied": (lambda o: ours.MultiplicativeLR(o, T, lambda t: 0.5), lambda t: 0.5**t),
    "step": (lambda o: ours.StepLR(o, T, 4, 0.5), lambda t: 0.5 ** (t // 4)),
    "exponential": (lambda o: ours.ExponentialLR(o, T, 0.9), lambda t: 0.9**t),
    "constant": (lambda o: ours.ConstantLR(o, T, 0.5, 4), lambda t: 0.5 if t < 4 else 1.0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_rates_are_those_of_the_formula(name):
    make, formula = FORMULAS[name]
    assert rates(make(new()), T) == pytest.approx([LR * formula(t) for t in range(T)], rel=1e-12)


def test_a_cycle_rises_to_the_rate_of_each_group():
    optimizer, other = new(), new()
    mine = rates(ours.OneCycleLR(optimizer, 8, pct_start=0.25, div_factor=5.0), 7)
    assert mine == rates(of_torch.OneCycleLR(other, [LR, 2 * LR], total_steps=8, pct_start=0.25, div_factor=5.0), 7)
    assert max(mine) == LR and mine[0] == pytest.approx(LR / 5)


def test_a_warm_cosine_is_that_of_torch_put_together():
    optimizer = new()
    parts = [of_torch.LinearLR(optimizer, 1 / W, 1.0, W - 1), of_torch.CosineAnnealingLR(optimizer, T - W)]
    together = of_torch.SequentialLR(optimizer, parts, [W])
    assert rates(ours.CosineAnnealingWarmupLR(new(), T, W), T) == pytest.approx(rates(together, T), rel=1e-12)


def test_the_last_rate_stays():
    assert rates(ours.LinearWarmupLR(new(), 4, 1), 8)[4:] == [0.0] * 4
    assert rates(ours.PolynomialWarmupLR(new(), 4, 1, end_lr=0.01), 8)[4:] == pytest.approx([0.01] * 4)


@pytest.mark.parametrize(
    ("name", "options", "at_the_end"),
    [
        ("LinearWarmupLR", {}, 50 / 51),
        ("CosineAnnealingWarmupLR", {}, 1.0),
        ("FlatAnnealingWarmupLR", {}, 1.0),
        ("MultiStepWarmupLR", {"milestones": [60]}, 1.0),
        ("PolynomialWarmupLR", {}, 1.0),
    ],
)
@pytest.mark.parametrize("total", [2, 50])
def test_a_warm_up_longer_than_training_warns_and_goes_on(
    name: str, options: dict[str, Any], at_the_end: float, total: int
):
    """ColossalAI's tutorial gives epochs as total_steps, and there the rate rises in every step."""
    with pytest.warns(
        UserWarning, match=rf"{name} was given total_steps={total} and warmup_steps=50: .* not epochs"
    ) as said:
        scheduler = getattr(ours, name)(new(), total_steps=total, warmup_steps=50, **options)
    assert said[0].filename == __file__
    found = rates(scheduler, 55)
    assert found[:50] == pytest.approx([LR * at_the_end * (t + 1) / 50 for t in range(50)], rel=1e-12)
    assert found[50:] == [LR] * 5


# What ColossalAI's classes take, some of it without any effect there.
_TAKEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "no milestones": (lambda o: ours.MultiStepLR(o, 4), lambda o: ours.LambdaLR(o, 4, lambda t: 1.0), "never drops"),
    "empty milestones": (
        lambda o: ours.MultiStepLR(o, 4, milestones=[]),
        lambda o: ours.LambdaLR(o, 4, lambda t: 1.0),
        "never drops",
    ),
    "steps of an epoch": (
        lambda o: ours.MultiStepLR(o, 4, [2], num_steps_per_epoch=7),
        lambda o: ours.MultiStepLR(o, 4, [2]),
        "milestones are steps, not epochs",
    ),
    "steps of an epoch, warm": (
        lambda o: ours.MultiStepWarmupLR(o, 4, 1, [2], num_steps_per_epoch=7),
        lambda o: ours.MultiStepWarmupLR(o, 4, 1, [2]),
        "milestones are steps, not epochs",
    ),
    "a cycle that speaks": (
        lambda o: ours.OneCycleLR(o, 8, verbose=False),
        lambda o: ours.OneCycleLR(o, 8),
        "ignores verbose=",
    ),
}


@pytest.mark.parametrize("name", _TAKEN)
def test_an_argument_without_an_effect_warns_and_has_none(name: str):
    make, same, words = _TAKEN[name]
    with pytest.warns(UserWarning, match=words) as said:
        scheduler = make(new())
    assert said[0].filename == __file__
    assert rates(scheduler, 4) == rates(same(new()), 4)


@pytest.mark.parametrize("number", [np.int64, float, np.float32])
def test_whole_numbers_are_steps_whatever_their_type(number: Callable[[int], Any]):
    for name in ("LinearWarmupLR", "CosineAnnealingWarmupLR"):
        make = getattr(ours, name)
        assert rates(make(new(), number(T), number(W)), T) == rates(make(new(), T, W), T)
    assert rates(ours.OneCycleLR(new(), number(T)), T - 1) == rates(ours.OneCycleLR(new(), T), T - 1)


def test_a_cycle_takes_options_in_their_order():
    by_place = ours.OneCycleLR(new(), 8, 0.25, "linear", False, 0.8, 0.9, 5.0, 50.0)
    by_name = ours.OneCycleLR(
        new(), 8, pct_start=0.25, anneal_strategy="linear", cycle_momentum=False, div_factor=5.0, final_div_factor=50.0
    )
    assert rates(by_place, 7) == rates(by_name, 7)


MAKERS: dict[str, Callable[[Any, int, int], Any]] = {
    "LinearWarmupLR": lambda o, t, w: ours.LinearWarmupLR(o, t, w),
    "CosineAnnealingLR": lambda o, t, w: ours.CosineAnnealingLR(o, t, eta_min=0.01),
    "CosineAnnealingWarmupLR": lambda o, t, w: ours.CosineAnnealingWarmupLR(o, t, w, eta_min=0.01),
    "FlatAnnealingLR": lambda o, t, w: ours.FlatAnnealingLR(o, t, 0.4),
    "FlatAnnealingWarmupLR": lambda o, t, w: ours.FlatAnnealingWarmupLR(o, t, w),
    "MultiStepLR": lambda o, t, w: ours.MultiStepLR(o, t, [w, t // 2]),
    "MultiStepWarmupLR": lambda o, t, w: ours.MultiStepWarmupLR(o, t, w, [t // 2]),
    "PolynomialLR": lambda o, t, w: ours.PolynomialLR(o, t, power=1.5),
    "PolynomialWarmupLR": lambda o, t, w: ours.PolynomialWarmupLR(o, t, w),
    "OneCycleLR": lambda o, t, w: ours.OneCycleLR(o, t + 30),
    "LambdaLR": lambda o, t, w: ours.LambdaLR(o, t, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o, t, w: ours.MultiplicativeLR(o, t, lambda step: 0.9),
    "StepLR": lambda o, t, w: ours.StepLR(o, t, 3),
    "ExponentialLR": lambda o, t, w: ours.ExponentialLR(o, t, 0.9),
    "ConstantLR": lambda o, t, w: ours.ConstantLR(o, t, 0.5, w),
}


def test_every_scheduler_is_gone_on_with():
    assert set(MAKERS) == set(ours.__all__)


@given(
    name=st.sampled_from(sorted(MAKERS)),
    total=st.integers(2, 12),
    warmup=st.integers(0, 11),
    at=st.integers(0, 14),
    by_state=st.booleans(),
)
def test_a_schedule_goes_on_from_any_step_with_the_same_bits(name, total, warmup, at, by_state):
    def make(optimizer: Any) -> Any:
        return MAKERS[name](optimizer, total, warmup % total)

    straight = rates(make(new()), at + 5)
    begun = make(new())
    rates(begun, at)
    optimizer, saved = new(), copy.deepcopy(begun.state_dict())
    if by_state or name not in CLOSED:
        again = make(optimizer)
        optimizer.load_state_dict(begun.optimizer.state_dict())
        again.load_state_dict(saved)
    else:
        optimizer.load_state_dict(copy.deepcopy(begun.optimizer.state_dict()))
        again = _from_epoch(name, optimizer, total, warmup % total, at)
    assert rates(again, 5) == straight[at:]


CLOSED = ("LinearWarmupLR", "CosineAnnealingWarmupLR", "PolynomialWarmupLR", "FlatAnnealingWarmupLR")


def _from_epoch(name: str, optimizer: Any, total: int, warmup: int, at: int) -> Any:
    """A scheduler makes the step to its first rate when it is made: `last_epoch` is the one before."""
    options = {"eta_min": 0.01} if name.startswith("Cosine") else {}
    return getattr(ours, name)(optimizer, total, warmup, last_epoch=at - 1, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ours.LinearWarmupLR(new(), 5, -1), ["total_steps=5", "warmup_steps=-1"]),
        (lambda: ours.CosineAnnealingLR(new(), 0), ["total_steps=0"]),
        (lambda: ours.CosineAnnealingWarmupLR(new(), 10.5), ["10.5", "integers"]),
        (lambda: ours.CosineAnnealingWarmupLR(new(), True), ["True", "integers"]),
        (lambda: ours.OneCycleLR(new(), float("nan")), ["nan", "integers"]),
        (lambda: ours.MultiStepWarmupLR(new(), 5), ["milestones=None", "[30, 60]"]),
        (lambda: ours.FlatAnnealingLR(new(), 5, 1.5), ["pct_start=1.5"]),
        (lambda: ours.PolynomialLR(new(), 5, end_lr=-1.0), ["end_lr=-1.0"]),
        (lambda: ours.LambdaLR(new(), 5), ["no lr_lambda"]),
    ],
)
def test_steps_that_make_no_schedule_are_refused(make, words):
    with pytest.raises(InputError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
