"""Small models with awkward features, and their batches; importable on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, GPTConfig

VOCAB = 30

GPT_RULES: dict[str, Any] = {
    "embed": "rowwise",
    "position": None,
    "attn.qkv": "(qkv heads@tp head)",
    "attn.proj": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
    "norm*": None,
}
GPT_SIZES = {"qkv": 3, "heads": "config.n_head"}


def gpt(**changes: Any) -> GPT:
    sizes = {"vocab_size": VOCAB, "context": 8, "n_layer": 2, "n_head": 4, "d_model": 16, **changes}
    return GPT(GPTConfig(**sizes))


def tokens(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    """Ids for a global batch of 8."""
    return (torch.randint(VOCAB, (8, 8), generator=torch.Generator().manual_seed(step)),), {}


def spread(output: torch.Tensor) -> torch.Tensor:
    """A mean over the batch whose gradient differs from element to element."""
    weight = torch.linspace(0.5, 1.5, output[0].numel(), dtype=output.dtype).view(output.shape[1:])
    return (output.square() * weight + output.sin()).mean()


class MLP(nn.Module):
    """Two layers of uneven width: 7 does not divide by 2 or 4."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 5)
        self.register_buffer("offset", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x + self.offset)))


MLP_RULES = {"up": "colwise", "down": "rowwise"}


def rows(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


class Branches(nn.Module):
    """Uses `left` or `right` by the first element of its input, so that ranks may use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) if x[0, 0] > 0 else self.right(x)
