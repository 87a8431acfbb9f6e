"""A model that shardlib has no layout file for, written for one device: a classifier of short texts, byte by byte.

README.md takes it through the command line: `shardlib init examples/my_model.py:build -o mine.toml`, and so on. Put a
function like `build` beside your own model, and the same lines work for it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(embed, 3 * embed)
        self.proj = nn.Linear(embed, embed)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, embed = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, embed))


class Block(nn.Module):
    def __init__(self, embed: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(embed), Attention(embed, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(embed), nn.Linear(embed, 4 * embed), nn.Linear(4 * embed, embed)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Classifier(nn.Module):
    """Bytes `(batch, seq)` to logits `(batch, classes)`."""

    def __init__(self, classes: int = 10, embed: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, embed)
        self.blocks = nn.ModuleList(Block(embed, heads) for _ in range(layers))
        self.classes = nn.Linear(embed, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean(1))


def build() -> nn.Module:
    """What the command line calls: a function without arguments that returns the model."""
    return Classifier()
