"""Units alternate between two buffers, in whatever order the model runs them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import ShardingError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Numbers


class Shuffled(nn.Module):
    """Layers run in another order than they are registered in; some twice, one as a branch beside others."""

    def __init__(self, order: tuple[int, ...], reads_outside: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.order, self.reads_outside = order, reads_outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = x = self.norm(self.first(x))
        for index in self.order:
            x = x + self.blocks[index](x)
        x = self.norm(x + self.blocks[self.order[0]](begin))
        return self.last(nn.functional.linear(x, self.first.weight) if self.reads_outside else x)


ROWS = Numbers((8, 6))


@pytest.mark.covering
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 2), (3, 1, 0, 2, 3), (2, 2, 0, 0)], ids=str)
@pytest.mark.parametrize("transform", [sl.zero(3), sl.fsdp()], ids=repr)
@pytest.mark.parametrize("bucket_mb", [1e-4, 5e-4, 25], ids=["apart", "in pairs", "as one"])
def test_units_run_in_any_order(transform, order: tuple[int, ...], bucket_mb: float):
    """Also several times, and where units that follow each other take the same buffer."""
    model = functools.partial(Shuffled, order)
    assert_equivalent(
        model, ROWS, mesh="dp=2", rules={"**": None}, transforms=(transform,), steps=2, bucket_mb=bucket_mb
    )


def test_a_layer_that_is_kept_may_be_read_by_others_after_it():
    model = functools.partial(Shuffled, (0, 1), True)
    assert_equivalent(model, ROWS, mesh="dp=2", rules={"**": None}, transforms=(sl.fsdp(),), steps=2)


def test_a_resharded_one_may_not_be(ranks):
    def said() -> str:
        model = sl.shard_model(Shuffled((0, 1), True), "dp=2", {"**": None}, transforms=(sl.zero(3),))
        with pytest.raises(ShardingError) as raised:
            model(ROWS(0).float())
        return str(raised.value)

    assert all(
        text.startswith('"first.weight" is stored in shards and was read while its own module was not running')
        for text in ranks(2).run(said)
    )


class Turned(nn.Module):
    """Takes a tensor that is a property of another layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(6, 6), nn.Linear(6, 6), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.weight.shape == (6, 6) and self.first.weight.device.type == "cpu"
        return self.last(self.first(x)) @ getattr(self.first.weight, self.how)


def test_nor_may_a_property_of_it_that_is_a_tensor(ranks):
    def said() -> list[str]:
        model = sl.shard_model(Turned(), "dp=2", {"**": None}, transforms=(sl.zero(3),), bucket_mb=1e-4)
        texts = []
        for model.how in ("T", "mT", "data"):
            with pytest.raises(
                ShardingError, match=rf'"first.weight" is stored in shards .*, by {model.how}\.'
            ) as raised:
                model(ROWS(0).float())
            texts.append(str(raised.value))
        return texts

    assert all(len(texts) == 3 for texts in ranks(2).run(said))
