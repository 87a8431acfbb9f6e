"""Experts of a model of one's own, spread over ranks that carry different tokens."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.engine.recording import record_collectives
from shardlib.testing import equivalent
from tests.engine.same_numbers import whole

_EMBED, _FF, _EXPERTS, _CHOICES, _ROWS, _SEQ = 6, 10, 5, 2, 8, 3
RULES = sl.Rules({"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}, unmatched="replicate")

SPLIT = sl.Rules(
    {
        "experts.up": "expert@ep ff@tp embed",
        "experts.down": "expert@ep embed ff@tp",
        "experts.output": "replicate",
    },
    unmatched="replicate",
)


class Experts(nn.Module):
    """All experts of a layer, called as those of transformers are."""

    def __init__(self, experts: int = _EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, _FF, _EMBED) / 3)
        self.down = nn.Parameter(torch.randn(experts, _EMBED, _FF) / 3)

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, choice = (numbers == expert).nonzero(as_tuple=True)
            made = (tokens[row] @ self.up[expert].t()).tanh() @ self.down[expert].t()
            result = result.index_add(0, row, made * weights[row, choice, None])
        return result


class Layer(nn.Module):
    """`favourites`: experts that every token chooses, whatever it is."""

    def __init__(self, favourites: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.router, self.favourites = nn.Linear(_EMBED, _EXPERTS), favourites
        self.norm, self.experts = nn.LayerNorm(_EMBED), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        if self.favourites:
            chosen = torch.tensor(self.favourites).expand(len(tokens), -1)
            weights = scores.gather(1, chosen)
        else:
            weights, chosen = scores.topk(_CHOICES, dim=-1)
        return x + self.experts(tokens, chosen, weights).view(x.shape)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, _EMBED), nn.Linear(_EMBED, 3)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(_ROWS, _SEQ, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _small_batch(step: int) -> torch.Tensor:
    return batch(step)[:2, :1]


Options = dict[str, Any]
CASES: dict[str, tuple[Callable[[], nn.Module], str, Options]] = {
    "unevenly": (Model, "ep=2", {}),
    "one expert a rank, and two": (Model, "ep=4", {}),
    "in parts": (Model, "dp=2,ep=2", {"transforms": [sl.zero(1), sl.zero(3, only="router")]}),
    "several passes": (Model, "dp=2,ep=2", {"accumulate": 2, "no_sync": True}),
    "several passes that all reduce": (Model, "ep=2", {"accumulate": 2}),
    "passes of a plan": (Model, "ep=2", {"transforms": [sl.accumulate(2)], "accumulate": 2}),
    "a rank that nobody asks": (functools.partial(Model, favourites=(4, 3)), "ep=2", {}),
    "ranks that nobody asks": (functools.partial(Model, favourites=(0, 1)), "dp=2,ep=2", {"transforms": [sl.zero(2)]}),
    "fewer tokens than choices": (Model, "ep=2", {"batch": _small_batch}),
    "once more in backward": (Model, "ep=2", {"transforms": [sl.checkpoint_activations("layers.*")]}),
    "each split over tp": (Model, "ep=2,tp=2", {"rules": SPLIT}),
}


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_numbers_of_one_device(case: str):
    model, mesh, options = CASES[case]
    options = {"batch": batch, "rules": RULES, **options}
    report = equivalent(model, mesh=mesh, clip=0.3, steps=2, **options)
    assert report, str(report)
