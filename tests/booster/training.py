"""A loop in ColossalAI's style on a small model, on any ranks and by any plugin, and the same loop in plain torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.booster import Booster
from shardlib.testing.models import Tokens, Transformer, perturb, rules_for
from tests.at_scale import plans_at_scale
from tests.engine.mixture import Mixture
from tests.engine.whole import whole

STEPS, ROWS, VOCAB = 4, 8, 16


def gpt(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return perturb(Transformer(vocab=VOCAB, heads=4, head=8, layers=2, tied=True), seed).to(dtype)


def rules() -> Any:
    return rules_for(gpt())


def mixture(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The same with experts in the place of MLPs."""
    model = gpt(seed=seed)
    for block in model.blocks:
        block.mlp = Mixture(embed=32)
    return model.to(dtype)


EXPERTS = sl.Rules({"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}, unmatched="replicate")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, each with options of its own, and a state from steps that were made before."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    # eps keeps AdamW from dividing noise by itself where a gradient is zero in exact arithmetic.
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


@dataclass
class Trained:
    """Mean losses over data ranks, learning rates, what was skipped, and weights at the end."""

    losses: list[float] = field(default_factory=list)
    rates: list[tuple[float, ...]] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def error(self, exact: Trained) -> float:
        """How far losses are from exact ones, relatively, at the worst step."""
        return max(abs(a - b) / b for a, b in zip(self.losses, exact.losses, strict=True))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


class Run:
    """Training by a plugin on this rank; everything is built as for one device, then boosted."""

    def __init__(
        self, plugin: Any = None, dtype: torch.dtype = torch.float32, seed: int = 0, make: Any = gpt, **options: Any
    ) -> None:
        self.booster = Booster(plugin=plugin, **options)
        model = make(dtype, seed)
        optimizer = adamw(model)
        warm_up(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        with plans_at_scale():
            boosted = self.booster.boost(model, optimizer, lr_scheduler=scheduler)
        self.model, self.optimizer, _, _, self.scheduler = boosted
        shape = sl.get_plan(self.model).mesh
        self.place = shape.data_place(shape.coordinate(dist.get_rank() if dist.is_initialized() else 0))

    def train(self, first: int = 0, *, steps: int = STEPS, clip: float | None = None, accumulate: int = 1) -> Trained:
        result = Trained()
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            total = 0.0
            for i in range(accumulate):
                mine = Tokens(ROWS, 5, VOCAB)(step * accumulate + i).chunk(self.place[1])[self.place[0]]
                if i < accumulate - 1:
                    with self.booster.no_sync(self.model, self.optimizer):
                        loss = loss_of(self.model, mine) / accumulate
                        self.booster.backward(loss, self.optimizer)
                else:
                    loss = loss_of(self.model, mine) / accumulate
                    self.booster.backward(loss, self.optimizer)
                total += loss.item()
            if clip is not None:
                self.optimizer.clip_grad_by_norm(clip)
            self.optimizer.step()
            self.scheduler.step()
            mean = torch.tensor(total, dtype=torch.float64)
            dist.all_reduce(mean)
            result.losses.append(mean.item() / dist.get_world_size())
            result.rates.append(tuple(group["lr"] for group in self.optimizer.param_groups))
            result.skipped.append(self.optimizer.step_was_skipped)
        result.weights = {name: whole(value).clone() for name, value in sl.full_state_dict(self.model).items()}
        return result


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One plain step, so that there is state to be carried over."""
    loss_of(model, Tokens(ROWS, 5, VOCAB)(99)).backward()
    optimizer.step()
    optimizer.zero_grad()


@functools.cache
def plainly(
    dtype: torch.dtype, *, steps: int = STEPS, clip: float | None = None, accumulate: int = 1, make: Any = gpt
) -> Trained:
    """The same in plain torch, on one device."""
    model = make(dtype)
    optimizer = adamw(model)
    warm_up(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    result = Trained()
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for i in range(accumulate):
            loss = loss_of(model, Tokens(ROWS, 5, VOCAB)(step * accumulate + i)) / accumulate
            loss.backward()
            total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        result.losses.append(total)
        result.rates.append(tuple(group["lr"] for group in optimizer.param_groups))
    result.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result
