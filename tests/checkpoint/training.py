"""Training that stops, is saved, and goes on somewhere else; runs on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib import checkpoint
from shardlib.engine.data.params import local_of
from shardlib.engine.sharded import param_state_of
from shardlib.testing.equivalence.measure import distance, scale_of, size
from shardlib.testing.strategies import Case

# Sums reordered by another mesh differ by roundings; `shardlib.testing.equivalence.measure` says how far.
# eps=1e-4 keeps AdamW from dividing noise by itself where a gradient is zero in exact arithmetic.
TOLERANCE = 1e-10


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


Build = Callable[[], nn.Module]
State = dict[str, torch.Tensor]


class Run:
    """A case on this rank: model, optimizer, scheduler, and what they have come to."""

    def __init__(self, case: Case, seed: int = 0, make_optimizer: Callable[..., Any] = adamw) -> None:
        self.case = case
        torch.manual_seed(seed)
        model = case.model().double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of axes that the drawn rules leave idle
            self.model = sl.shard_model(
                model, str(case.mesh), case.rules, transforms=case.transforms, rng=case.rng, compile=None
            )
        self.optimizer = make_optimizer(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, steps: Sequence[int]) -> Run:
        for step in steps:
            self.optimizer.zero_grad()
            batch = self.case.batch(step)
            batch = batch.double() if batch.is_floating_point() else batch
            shape = sl.get_plan(self.model).mesh
            index, count = shape.data_place(shape.coordinate(dist.get_rank()))
            spread(self.model(batch.chunk(count)[index])).backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def save(self, path: str, **options: Any) -> Run:
        checkpoint.save(path, self.model, self.optimizer, lr_scheduler=self.scheduler, **options).wait()
        return self

    def load(self, path: str, **options: Any) -> Run:
        checkpoint.load(path, self.model, self.optimizer, lr_scheduler=self.scheduler, **options)
        return self

    def state(self) -> State:
        """Everything that training has changed, whole."""
        found = {f"model {name}": value for name, value in sl.full_state_dict(self.model).items()}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"optimizer {name} {key}"] = whole(param, value.detach())
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=torch.float64)
        return {name: value.detach().cpu().clone() for name, value in found.items()}


def whole(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """State of all ranks. The engine gathers what it has cut: `full_tensor` is wrong for a fused dim over two axes."""
    held = param_state_of(param)
    if held is not None and held.is_local_shard(value):
        return held.full_tensor(local_of(value)).clone()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def spread(output: torch.Tensor) -> torch.Tensor:
    """A mean over the batch whose gradient differs from element to element."""
    weight = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weight + output.sin()).mean()


def differences(got: State, want: State) -> dict[str, float]:
    """What differs by more than rounding."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    found = {name: distance(got[name], want[name], scale_of(size(want[name]), 1.0)) for name in want}
    return {name: off for name, off in found.items() if not off <= TOLERANCE}


def interrupted(case: Case, path: str, **options: Any) -> tuple[State, State] | None:
    """Two steps, a checkpoint, two steps more: the state when it was saved and at the end, on rank 0."""
    run = Run(case).train([0, 1]).save(path, **options)
    at_save = run.state()
    at_end = run.train([2, 3]).state()
    return (at_save, at_end) if dist.get_rank() == 0 else None


def resumed(case: Case, path: str, **options: Any) -> tuple[State, State] | None:
    """From other weights and another random state, the checkpoint, then the two steps that were left."""
    run = Run(case, seed=99)
    torch.manual_seed(7)
    run.load(path, **options)
    at_load = run.state()
    at_end = run.train([2, 3]).state()
    return (at_load, at_end) if dist.get_rank() == 0 else None
