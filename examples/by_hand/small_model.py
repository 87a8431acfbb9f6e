"""A small causal transformer for one device. Views leave the number of local heads open, as sharding by hand needs."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.head = embed // heads
        self.q, self.k, self.v = (nn.Linear(embed, embed) for _ in range(3))
        self.proj = nn.Linear(embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, embed: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(embed), Attention(embed, heads)
        self.norm2, self.mlp = nn.LayerNorm(embed), MLP(embed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab: int = 32, embed: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, embed)
        self.blocks = nn.ModuleList(Block(embed, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(embed), nn.Linear(embed, vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step: int) -> torch.Tensor:
    """Ids of a global batch, `(8, 9)`: eight inputs and the next token of each."""
    return torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
