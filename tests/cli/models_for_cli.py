"""Models as a user of the command line might have them."""

from __future__ import annotations

import torch
from gpt import GPT, GPTConfig
from torch import nn
from torch.distributed.tensor import DTensor


def tiny() -> GPT:
    return GPT(GPTConfig(vocab_size=64, context=16, n_layer=2, n_head=4, d_model=32))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 33)
        self.down = nn.Linear(33, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Wrong(MLP):
    """Computes something else where it is sharded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if isinstance(self.up.weight, DTensor) else 1)


class ReadsValues(nn.Module):
    """Cannot be built on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.widths = [int(w) for w in torch.linspace(4, 8, 2).tolist()]
        self.layer = nn.Linear(*self.widths)


def number() -> int:
    return 3


nothing = 3
