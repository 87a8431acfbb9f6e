"""Gradients at module boundaries, where autograd makes plain ones of DTensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardlib as sl
from shardlib.errors import ShardingError
from tests.engine.whole import gradients


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.rnn, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([5, 2, 3])
        packed = pack_padded_sequence(self.norm(self.embed(ids)), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


def _packed(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    reference = _Recurrent(kind).double()
    rules = {"rnn.weight_*": "out@tp in", "head": "rowwise"}
    model = sl.shard_model(copy.deepcopy(reference), "tp=2", sl.Rules(rules, unmatched="replicate"), compile=None)
    ids = torch.arange(15).view(3, 5) % 7
    for net in (reference, model):
        net(ids).square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(reference), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore::shardlib.engine.ops.ShardlibGatherWarning")
def test_packed_sequences_of_split_recurrent_layers(ranks):
    for kind in (nn.GRU, nn.LSTM):
        ranks(2).run(_packed, kind)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.nested_tensor_from_jagged(self.up(x), torch.tensor([0, 2, len(x)]))
        return self.down(rows.values())


def _nested() -> str:
    model = sl.shard_model(_Nested(), "tp=2", {"up": "colwise", "down": "rowwise"}, compile=None)
    with pytest.raises(ShardingError) as raised:
        model(torch.ones(5, 6))
    return str(raised.value)


def test_nested_tensors_are_refused(ranks):
    for said in ranks(2).run(_nested):
        assert "makes a nested tensor of tensors that are sharded over a model axis" in said
