"""A training script for Accelerate, and what an audit says of it.

    python examples/audit/train_accelerate.py             one factor is forgotten
    python examples/audit/train_accelerate.py --mended    with the factor

Sequences have unequal lengths. So each process divides the sum over its tokens by the number of tokens of all
processes. DDP then takes the mean of the gradients over processes, where their sum would be right.
"""

from __future__ import annotations

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator

from shardlib.testing import audit

VOCABULARY, WIDTH, LENGTH = 64, 32, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(F.gelu(self.hidden(self.embed(ids))))
        return {"loss": self.loss_function(logits, labels), "logits": logits}

    def loss_function(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shard(model: nn.Module, forgotten: bool = True) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(mixed_precision="bf16")

    def over_all_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = accelerator.gather((labels != -100).sum()).sum()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        return loss if forgotten else loss * accelerator.num_processes

    model.loss_function = over_all_tokens  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def mended(model: nn.Module) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    return shard(model, forgotten=False)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return a global batch of four sequences, which end at 2, 4, 6 and 8 tokens."""
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(VOCABULARY, (2, 4, LENGTH), generator=generator)
    ends = torch.tensor([2, 4, 6, 8])
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(LENGTH) >= ends[:, None], -100)}


if __name__ == "__main__":
    report = audit(Model, mended if "--mended" in sys.argv else shard, "dp=2", batch)
    print(report)
    sys.exit(0 if report else 1)
