"""Which modules are computed as linear layers: those of a registered class, whose forward nobody has replaced."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.engine.model import linear
from tests.engine.whole import whole


class _Scaled(nn.Linear):
    """A linear layer's dims, and a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Named(nn.Linear):
    """A linear layer by another name."""


class _Transposed(nn.Module):
    """A class of a user, which tells what it is."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(ins, outs)), nn.Parameter(torch.randn(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class _Bare(nn.Module):
    """One that has no attribute for a bias."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outs, ins))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.named, self.own, self.turned = _Scaled(6, 8), _Named(8, 6), nn.Linear(6, 8), _Transposed(8, 6)
        self.own.forward = lambda x: F.linear(x, self.own.weight).sin()  # type: ignore[method-assign]
        self.bare = _Bare(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bare(self.turned(self.own(self.named(self.scaled(x).tanh()))))


def _step() -> tuple[int, int]:
    sl.rules.register_dims(_Transposed, weight="in out", bias="out", output="out", contracted=("in",), linear=True)
    sl.rules.register_dims(_Bare, weight="out in", output="out", contracted=("in",), linear=True)
    torch.manual_seed(0)
    reference = _Net().double()
    model = _Net().double()
    model.load_state_dict(reference.state_dict())
    rules = {"scaled": "colwise", "named": "rowwise", "own": "colwise", "turned": "rowwise", "bare": "colwise"}
    model = sl.shard_model(model, "tp=2", rules, compile=None)
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    with mock.patch.object(linear, "_apply", wraps=linear._apply) as applied:
        found = model(x)
    wanted = reference(x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for output in (found, wanted):
        output.square().mean().backward()
    for have, want in zip(model.parameters(), reference.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(whole(have.grad), want.grad, rtol=1e-10, atol=1e-12)
    return applied.call_count, sum(p.grad is None for p in model.parameters())


def test_a_forward_of_its_own_is_called_and_a_registered_one_is_computed_locally(ranks):
    """Three layers are linear: the one that inherits its forward, and the two that are registered."""
    assert ranks(2).run(_step) == [(3, 1)] * 2


def _many_dims() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x = torch.randn(1, 2, 1, 1, 1, 2, 1, 3, 4, dtype=torch.float64)
    wanted = model(x)
    found = sl.shard_model(model, "tp=2", {"0": "colwise", "2": "rowwise"}, compile=None)(x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_activations_of_nine_dims(ranks):
    ranks(2).run(_many_dims)
