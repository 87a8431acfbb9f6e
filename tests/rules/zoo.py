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


class Downsampled(nn.Module):
    """Stages whose convolution stands in a list beside a norm whose dims nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"down": nn.Sequential(Transposed(16, 16), conv(16))}) for _ in range(2)
        )
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3), Transposed(16, 16))


def conv(width: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, groups=groups)


class Gated(nn.Module):
    """Layers that make both halves of a gate, which no mesh divides; one of them for each expert."""

    def __init__(self, width: int = 6, middle: int = 7) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * middle), nn.GLU(), nn.Linear(middle, width)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.empty(3, 2 * middle, width))
        self.experts.down_proj = nn.Parameter(torch.empty(3, width, middle))


class Grouped(nn.Module):
    """Blocks as of a ResNeXt, of different numbers of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"conv1": conv(24), "conv2": conv(24, groups), "bn2": nn.BatchNorm2d(24), "conv3": conv(24)})
            for groups in (1, 3, 8)
        )
        self.up = nn.ConvTranspose2d(24, 24, 2, groups=4)
