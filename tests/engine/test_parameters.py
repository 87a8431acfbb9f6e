"""A parameter that somebody replaced, and optimizers of other parameters. tests/contract has what else people do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import ShardingError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))))


def _model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_parameter_in_the_place_of_a_stored_shard_stays_there(ranks):
    def message() -> str:
        model = sl.shard_model(_model(), "dp=2", {"**": None}, transforms=(sl.zero(3),))
        replaced = model.last.weight = nn.Parameter(torch.zeros(4, 8, dtype=torch.float64), requires_grad=False)
        with pytest.raises(ShardingError) as raised:
            model(_batch())
        assert model.last.weight is replaced
        return str(raised.value)

    for text in ranks(2).run(message):
        assert "is stored in shards, and another tensor stands in its place" in text


def test_an_optimizer_of_other_parameters_is_left_alone(ranks):
    def counts() -> list[int]:
        model = sl.shard_model(_model(), "dp=2", {"**": None}, transforms=(sl.zero(2),))
        other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        for p in other.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        before = dict(other.param_groups[0]), other.state
        other.step()
        assert other.param_groups[0] == before[0] and other.state is before[1] and model is not None
        return [len(other._optimizer_step_pre_hooks), len(other._optimizer_step_post_hooks)]

    assert ranks(2).run(counts) == [[0, 0]] * 2
