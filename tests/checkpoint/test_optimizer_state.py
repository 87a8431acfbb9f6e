"""State of optimizers in shapes that could be a shard's, and are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import shardlib as sl


@sl.register_optimizer(needs="shard")
class Counting(torch.optim.Optimizer):
    """Momentum whose weight depends on a count of steps, which is a tensor of one element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = torch.zeros(1), torch.zeros_like(p)
                state["step"] += 1
                state["momentum"].lerp_(p.grad, float(1 / state["step"]))
                p.add_(state["momentum"], alpha=-group["lr"])


def _trained(model: nn.Module, optimizer: Any, steps: range) -> nn.Module:
    for step in steps:
        optimizer.zero_grad()
        model(torch.full((2, 5), float(step)).double()).square().mean().backward()
        optimizer.step()
    return model


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()  # of the bias, rank 1 of 2 has one element


def _across(folder: str, shapes: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Three steps on one mesh, and three more on another."""
    for n, transforms in enumerate(shapes):
        model = sl.shard_model(_model(), "dp=2", {"**": None}, transforms=_transforms(transforms), compile=None)
        optimizer = Counting(model.parameters())
        if n:
            sl.load(f"{folder}/saved", model, optimizer)
        _trained(model, optimizer, range(3 * n, 3 * n + 3))
        assert all(tuple(state["step"].shape) == (1,) for state in optimizer.state.values())
        assert all(state["momentum"].shape == param.shape for param, state in optimizer.state.items())
        sl.save(f"{folder}/saved", model, optimizer)
    alone = _model()
    optimizer = Counting(alone.parameters())
    sl.load(f"{folder}/saved", alone, optimizer)
    assert all(torch.equal(state["step"], torch.tensor([6.0])) for state in optimizer.state.values())
    return sl.full_state_dict(model)


def _transforms(name: str) -> Any:
    return {"zero(1)": sl.zero(1), "zero(3)": sl.zero(3), "replicate": ()}[name]


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _made_and_restored() -> list[bool]:
    found = []
    for transforms in (sl.zero(1), sl.zero(2), sl.zero(3)):
        model = sl.shard_model(_model(), "dp=2", {"**": None}, transforms=transforms, compile=None)
        optimizer, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
        get_optimizer_state_dict(model, optimizer)  # steps with gradients of zero, and a learning rate of zero
        found += [torch.equal(value, _model().state_dict()[name]) for name, value in sl.full_state_dict(model).items()]
        _trained(model, optimizer, range(2))
        set_optimizer_state_dict(model, other, get_optimizer_state_dict(model, optimizer))
        found += [
            torch.equal(_local(value), _local(again))
            for p in model.parameters()
            for value, again in zip(optimizer.state[p].values(), other.state[p].values(), strict=True)
        ]
    return found


def test_torchs_state_dict_of_a_new_optimizer(ranks):
    for found in ranks(2).run(_made_and_restored):
        assert found == [True] * 3 * (2 + 2 * 3)


@pytest.mark.parametrize("shapes", [("zero(1)", "zero(3)"), ("zero(3)", "zero(1)"), ("replicate", "zero(3)")])
def test_a_count_of_steps_of_one_element_is_no_shard(ranks, tmp_path: Path, shapes: tuple[str, str]):
    want = _trained(alone := _model(), Counting(alone.parameters()), range(6)).state_dict()
    for found in ranks(2).run(_across, str(tmp_path), shapes):
        assert all((found[name] - value).abs().max() < 1e-10 for name, value in want.items())
