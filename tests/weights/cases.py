"""A small language model, and ways to shard it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardlib as sl

RULES = sl.Rules({"up": "colwise", "down": "rowwise", "embed": "vocab@tp embed"}, unmatched="replicate")
COLUMNS = sl.Rules({"up.weight": "out in@tp", "down.weight": "out in@tp"}, unmatched="replicate")
STAGED = sl.Rules({"**": None}, stages="embed, blocks.0 | blocks.1, norm, head")
Shard = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """A language model with a tied table and a buffer; of some MiB at width 256."""

    def __init__(self, width: int = 16, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 33, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def made(seed: int, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    model = Model(**options)
    model.norm.running_mean.normal_()
    return model


def ours(mesh: str, rules: Any = RULES, *transforms: Any) -> Shard:
    return lambda model: sl.shard_model(model, mesh, rules, transforms=transforms)


def part(ranks: list[int], rules: Any) -> Shard:
    """Shard on some of the ranks."""

    def shard(model: nn.Module) -> nn.Module | None:
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("tp",))
        return sl.shard_model(model, mesh, rules) if dist.get_rank() in ranks else None

    return shard


def fsdp(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def megatron(model: nn.Module) -> nn.Module:
    mesh = sl.mesh("tp=4")
    return parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel()})
