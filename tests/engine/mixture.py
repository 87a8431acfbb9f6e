"""A small model with a mixture of experts, which knows nothing of ranks. Importable on ranks of the pool."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

__all__ = ["CHOICES", "EMBED", "EXPERTS", "Batched", "Experts", "Mixture", "Model", "limit_capacity"]

EMBED, FF, EXPERTS, CHOICES = 6, 10, 5, 2


class Experts(nn.Module):
    """All experts of a layer, called as those of transformers are."""

    def __init__(self, embed: int = EMBED, experts: int = EXPERTS) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, FF, embed) / 3)
        self.down = nn.Parameter(torch.randn(experts, embed, FF) / 3)

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        assert self.num_experts == len(self.up)
        for expert in range(self.num_experts):
            row, choice = (numbers == expert).nonzero(as_tuple=True)
            made = (tokens[row] @ self.up[expert].t()).tanh() @ self.down[expert].t()
            result = result.index_add(0, row, (made * weights[row, choice, None]).to(result.dtype))
        return result


class Batched(Experts):
    """The same without a look at values, so that it runs dry."""

    def forward(self, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.einsum("te,tkfe->tkf", tokens, self.up[numbers]).tanh()
        return torch.einsum("tkf,tkef,tk->te", made, self.down[numbers], weights)


def limit_capacity(module: Experts, factor: float) -> None:
    """What `expert_capacity` does, one choice after another."""
    inner = module.forward

    def forward(tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        room = [math.ceil(factor * numbers.numel() / EXPERTS)] * EXPERTS
        kept = torch.ones_like(weights)
        for choice in range(numbers.shape[1]):
            for token in range(len(numbers)):
                expert = int(numbers[token, choice])
                kept[token, choice] = room[expert] > 0
                room[expert] -= 1
        return inner(tokens, numbers, weights * kept)

    module.forward = forward  # type: ignore[method-assign]


class Mixture(nn.Module):
    """A router and its experts. `favourites`: experts that every token chooses, whatever it is."""

    def __init__(self, embed: int = EMBED, favourites: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.router, self.favourites = nn.Linear(embed, EXPERTS), favourites
        self.experts = Experts(embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        if self.favourites:
            chosen = torch.tensor(self.favourites).expand(len(tokens), -1)
            weights = scores.gather(1, chosen)
        else:
            weights, chosen = scores.topk(CHOICES, dim=-1)
        return self.experts(tokens, chosen, weights).view(x.shape)


class Model(nn.Module):
    """Two mixtures, each behind a norm and beside the way around it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, EMBED), nn.Linear(EMBED, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(EMBED), Mixture(**options)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)
