"""Embeddings whose vocabulary is split: the numbers of one device, and no gradient of the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib.testing import assert_equivalent

VOCAB, WIDTH = 512, 16


class Tokens(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def _ids(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": VOCAB - 1}], ids=str)
@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        ("tp=2", {}),
        ("dp=2,tp=2", {"transforms": sl.zero(3)}),
        ("tp=2,sp=2", {"activations": {"^head.output": "batch seq@sp out", "^embed.input": "batch seq@sp"}}),
    ],
    ids=str,
)
def test_a_split_vocabulary_trains_as_on_one_device(mesh: str, given: dict[str, Any], options: dict[str, Any]):
    given = {**given}
    rules = sl.Rules({"embed": "vocab@tp embed"}, activations=given.pop("activations", {}), unmatched="replicate")
    assert_equivalent(lambda: Tokens(**options), lambda step: _ids(step), mesh, rules, **given)


class _Largest(TorchDispatchMode):
    """Notes the number of elements of the largest plain tensor that an op is given or returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in (*args, out) if type(one) is torch.Tensor)])
        return out


def _largest() -> int:
    model = sl.shard_model(Tokens(), "tp=2", {"embed": "vocab@tp embed", "head": None}, compile=None)
    loss = model(_ids(0)).square().mean()
    with _Largest() as seen:
        loss.backward()
    return seen.numel


def test_a_rank_makes_the_gradient_of_its_own_rows(ranks):
    assert ranks(2).run(_largest) == [VOCAB * WIDTH // 2] * 2
