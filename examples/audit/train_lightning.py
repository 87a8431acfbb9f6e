"""A training script for Lightning's Fabric, and what an audit says of it.

    python examples/audit/train_lightning.py             one argument is forgotten
    python examples/audit/train_lightning.py --mended    with the argument

A step has several backward passes. All of them are in the block that turns off the reduction of gradients, the last one
too: each process trains a model of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.fabric import Fabric

from shardlib.testing import audit

Batch = tuple[torch.Tensor, torch.Tensor]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))


def shard(model: nn.Module) -> tuple[Fabric, Any, Any]:
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return fabric, *fabric.setup(model, optimizer)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


def accumulate(made: tuple[Fabric, Any, Any], batches: list[Batch]) -> None:
    """Run the backward passes of a step."""
    fabric, model, _ = made
    for each in batches:
        with fabric.no_backward_sync(model):
            fabric.backward(loss(model, each) / len(batches))


def accumulate_mended(made: tuple[Fabric, Any, Any], batches: list[Batch]) -> None:
    fabric, model, _ = made
    for i, each in enumerate(batches):
        with fabric.no_backward_sync(model, enabled=i < len(batches) - 1):
            fabric.backward(loss(model, each) / len(batches))


def batch(step: int) -> Batch:
    """Return a global batch of eight rows."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randint(10, (8,), generator=generator)


if __name__ == "__main__":
    own = accumulate_mended if "--mended" in sys.argv else accumulate
    report = audit(build, shard, "dp=2", batch, loss=loss, accumulate=own)
    print(report)
    sys.exit(0 if report else 1)
