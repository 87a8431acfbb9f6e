"""Live activations of a layer in a dry run, beside the formula that Megatron's authors derive.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), equation 4: a
layer keeps `s b h (34 + 5 a s / h) / t` bytes for backward, in 16 bits, with masks of one byte, attention not fused,
sequence and tensor parallel over t ranks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl

SEQ, BATCH, WIDTH, HEADS = 16, 4, 64, 4


class Attention(nn.Module):
    """Scores are kept, as the formula has them: 5 a s / h is for them, their softmax, and the mask of its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seq, _ = x.shape
        q, k, v = (each(x).view(rows, seq, HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        weights = self.dropout((q @ k.transpose(-1, -2)).softmax(-1))
        return self.proj((weights @ v).transpose(1, 2).reshape(rows, seq, WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout1, self.dropout2 = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout1(self.attn(self.norm1(x)))
        return x + self.dropout2(self.down(F.gelu(self.up(self.norm2(x)))))


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


SPLIT, WHOLE = "batch seq@tp embed", "batch seq embed"
RULES = sl.Rules(
    {
        "attn.[qkv]": "colwise",
        "attn.proj": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        **dict.fromkeys(("embed.output", "attn.proj.output", "down.output"), SPLIT),
        **dict.fromkeys(("norm1.output", "norm2.output"), WHOLE),
    },
    unmatched="replicate",
)


def kept(layers: int, ranks: int) -> int:
    with torch.device("meta"):
        model = Net(layers).to(torch.bfloat16)
    report = sl.plan(model, f"tp={ranks}", RULES, example=torch.empty(BATCH, SEQ, WIDTH, dtype=torch.bfloat16)).report
    assert report is not None
    return report.activation_bytes


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_layer_keeps_what_the_formula_says(ranks: int):
    sbh, scores = SEQ * BATCH * WIDTH, HEADS * SEQ * SEQ * BATCH
    formula = sbh * (34 + 5 * HEADS * SEQ / WIDTH) / ranks
    # A CPU's dropout keeps its mask in the dtype of its input: a second byte for each element of the three masks.
    masks = (2 * sbh + scores) / ranks
    # Mean and reciprocal deviation of each row of both norms, 16 bits each; the formula leaves them out.
    statistics = 2 * 2 * 2 * SEQ * BATCH / ranks
    # The inputs of q, k and v together and of `up` are kept whole. Megatron keeps 1/t of each, and gathers it again in
    # backward: one more collective for each.
    gathered = 2 * 2 * sbh * (1 - 1 / ranks)
    assert kept(2, ranks) - kept(1, ranks) == formula + masks + statistics + gathered
