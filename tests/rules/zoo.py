"""Small models on `meta` that rules are tried on."""

from __future__ import annotations

import torch
from torch import nn


def on_meta(build: type[nn.Module], *args: object) -> nn.Module:
    with torch.device("meta"):
        return build(*args)


class Attention(nn.Module):
    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)


class Block(nn.Module):
    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, n_head)
        self.mlp = MLP(width)


class Tiny(nn.Module):
    """Two blocks, an embedding tied to the output layer, a non-persistent buffer."""

    def __init__(self, width: int = 16, n_head: int = 4, vocab: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, n_head) for _ in range(2))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.empty(8, 8), persistent=False)


TINY_RULES = {
    "embed": "rowwise",
    "attn.qkv": "(qkv heads@tp head)",
    "attn.proj": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
    "norm": None,
}
TINY_SIZES = {"qkv": 3, "heads": "n_head"}


class Transposed(nn.Module):
    """A linear layer that stores its weight as Hugging Face's Conv1D does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 4, 3, bias=False)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)


class Scale(nn.Module):
    """A module whose dims nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(4, 8))
        self.shift = nn.Parameter(torch.empty(8))
