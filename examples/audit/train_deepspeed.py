"""A training script for DeepSpeed, and what an audit says of it.

    python examples/audit/train_deepspeed.py             the loop divides the loss
    python examples/audit/train_deepspeed.py --mended    without the division

A step has two backward passes. The loop divides the loss by their number, as loops for PyTorch do, and
`engine.backward` divides it again: gradients are half of what they should be.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F

from shardlib.testing import audit

Batch = tuple[torch.Tensor, torch.Tensor]

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))


def shard(model: nn.Module) -> Any:
    deepspeed.init_distributed("nccl")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    return engine


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, labels = batch
    return F.cross_entropy(model(x), labels)


def accumulate(engine: Any, batches: list[Batch]) -> None:
    """Run the backward passes of a step."""
    for each in batches:
        engine.backward(loss(engine, each) / len(batches))
        engine.step()


def accumulate_mended(engine: Any, batches: list[Batch]) -> None:
    for each in batches:
        engine.backward(loss(engine, each))
        engine.step()


def batch(step: int) -> Batch:
    """Return a global batch of eight rows."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randint(10, (8,), generator=generator)


if __name__ == "__main__":
    own = accumulate_mended if "--mended" in sys.argv else accumulate
    report = audit(build, shard, "dp=2", batch, loss=loss, accumulate=own)
    print(report)
    sys.exit(0 if report else 1)
