"""Embeddings whose vocabulary is split: the numbers of one device, and no gradient of the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


class Scores(nn.Module):
    """Embeds and predicts `vocab` tokens; the vocabulary is split in both."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), targets.flatten())


SPLIT = {"embed": "vocab@tp embed", "head": "vocab@tp embed"}


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


@pytest.mark.parametrize("vocab", [VOCAB - 1, 5])
def test_a_vocabulary_that_is_split_unevenly_trains_as_on_one_device(vocab: int):
    """Train with an empty shard too: of five rows, the last of four ranks has none."""
    given = [(_ids(step) % vocab, _ids(step + 1) % vocab) for step in range(4)]
    assert_equivalent(lambda: Scores(vocab), lambda step: given[step], "tp=4", SPLIT)


def _out_of_range(vocab: int) -> None:
    model = sl.shard_model(Scores(vocab), "tp=2", SPLIT)
    for wrong in (vocab, -1):
        for place in range(2):
            given = [torch.zeros(2, 3, dtype=torch.int64) for _ in range(2)]
            given[place][0, 0] = wrong
            with pytest.raises(IndexError, match=r"out of (range|bounds)"):
                model(*given)
    model(torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), -100))


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 1])
def test_an_index_that_no_rank_has_is_refused_as_on_one_device(ranks, vocab: int):
    ranks(2).run(_out_of_range, vocab)


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
