"""A training script for PyTorch's `fully_shard` and `parallelize_module`, and what an audit says of it.

    python examples/audit/train_torch.py             one line of the plan is forgotten
    python examples/audit/train_torch.py --mended    with the line

Blocks pass on activations that are split over the sequence. The last norm is not in the plan: its weight stays a plain
tensor on the ranks of tp, and each of them trains it with the gradient of its part of the sequence. No loss shows it.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardlib.testing import audit

VOCABULARY, WIDTH = 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def shard(model: nn.Module, forgotten: bool = True) -> nn.Module:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    if not forgotten:
        plan["norm"] = SequenceParallel()
    parallelize_module(model.cuda(), mesh["tp"], plan)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def mended(model: nn.Module) -> nn.Module:
    return shard(model, forgotten=False)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of a global batch, and the next token of each."""
    ids = torch.randint(VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


if __name__ == "__main__":
    report = audit(Model, mended if "--mended" in sys.argv else shard, "dp=2,tp=2", batch, loss=loss)
    print(report)
    sys.exit(0 if report else 1)
