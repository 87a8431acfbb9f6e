"""A loop of the older kind on any ranks by any config, and what one device makes of the whole batches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.testing.models import Tokens
from shardlib.trainer import ParallelMode, gpc, initialize
from tests.at_scale import plans_at_scale
from tests.booster.training import ROWS, STEPS, VOCAB, adamw, gpt
from tests.engine.whole import whole

# Sums reordered by another mesh differ by roundings; `shardlib.testing.equivalence.measure` says how far.
TOLERANCE = 1e-10


@dataclass
class Trained:
    """Mean losses of steps over data ranks and passes, learning rates, weights at the end."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def error(self, exact: Trained) -> float:
        return max(abs(a - b) / b for a, b in zip(self.losses, exact.losses, strict=True))


def criterion(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), label.flatten())


def batch(number: int) -> torch.Tensor:
    """The global batch of one pass."""
    return Tokens(ROWS, 5, VOCAB)(number)


def mine(number: int) -> torch.Tensor:
    """This data rank's part of it."""
    count, index = gpc.get_world_size(ParallelMode.DATA), gpc.get_local_rank(ParallelMode.DATA)
    return batch(number).chunk(count)[index]


@plans_at_scale()
def by_engine(config: dict[str, Any], dtype: torch.dtype = torch.float64, *, by_grad: bool = False) -> Trained:
    """The loop of ColossalAI's users, who step after every batch, whatever `gradient_accumulation` is."""
    model = gpt(dtype)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    engine, _, _, scheduler = initialize(
        model, optimizer, criterion, lr_scheduler=scheduler, config=config, verbose=False
    )
    engine.train()
    passes, result, total = config.get("gradient_accumulation", 1), Trained(), 0.0
    for i in range(STEPS * passes):
        x = mine(i)
        engine.zero_grad()
        output = engine(x)
        loss = engine.criterion(output, x)
        if by_grad:
            cut = output.detach().requires_grad_()
            engine.criterion(cut, x).backward()
            engine.backward_by_grad(output, cut.grad)
        else:
            engine.backward(loss)
        engine.step()
        scheduler.step()
        total += loss.item() / passes
        if (i + 1) % passes == 0:
            mean = torch.tensor(total, dtype=torch.float64)
            dist.all_reduce(mean)
            result.losses.append(mean.item() / dist.get_world_size())
            result.rates.append(scheduler.get_last_lr()[0])
            total = 0.0
    result.weights = {name: whole(value).clone() for name, value in sl.full_state_dict(model).items()}
    return result


@functools.cache
def plainly(passes: int = 1, clip: float | None = None, factor: float = 1.0) -> Trained:
    """Plain torch in float64 on one device, with all examples of a step in one batch.

    `factor` is what gradients are multiplied with before they are clipped.
    """
    model = gpt(torch.float64)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    result = Trained()
    for step in range(STEPS):
        x = torch.cat([batch(step * passes + i) for i in range(passes)])
        optimizer.zero_grad()
        loss = criterion(model(x), x)
        loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(factor)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        result.losses.append(loss.item())
        result.rates.append(scheduler.get_last_lr()[0])
    result.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


def assert_equal(run: Trained, alone: Trained) -> None:
    assert run.error(alone) < TOLERANCE
    assert run.rates == alone.rates
    assert set(run.weights) == set(alone.weights)  # names are the module's own
    for name, value in alone.weights.items():
        torch.testing.assert_close(run.weights[name], value, rtol=TOLERANCE, atol=TOLERANCE)
