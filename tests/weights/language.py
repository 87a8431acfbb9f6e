"""A language model that trains, on one device and on meshes that change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl

RULES = sl.Rules(
    {
        "attn.qkv": "(three heads@tp size)",
        "attn.out": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        "embed": "vocab@tp embed",
    },
    sizes={"three": 3, "heads": 4},
    unmatched="replicate",
    stages="embed, blocks.0 | blocks.1, norm, head",
)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    dropout = 0.0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.up, self.down = Attention(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale.to(x.dtype) * self.attn(x)
        return x + nn.functional.dropout(self.down(torch.relu(self.up(x))), self.dropout, self.training)


class Model(nn.Module):
    """A language model with a tied table, a fused weight and a buffer that no state dict has."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def ids(step: int) -> torch.Tensor:
    return torch.randint(33, (4, 9), generator=torch.Generator().manual_seed(step))


def mine(ids: torch.Tensor, model: nn.Module) -> torch.Tensor:
    mesh = sl.get_plan(model).mesh
    index, count = mesh.data_place(mesh.coordinate(dist.get_rank()))
    return ids.chunk(count)[index]


def criterion(labels: torch.Tensor) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    return lambda logits, _: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def seeded(width: int = 16) -> Model:
    torch.manual_seed(0)
    return Model(width)


def difference(model: nn.Module, single: nn.Module) -> float:
    """Return the largest difference of a sharded model's tensors from those of one device. Collective."""
    full, alone = sl.full_state_dict(model), single.state_dict()
    assert full.keys() == alone.keys()
    return max(float((full[name].double() - value.double()).abs().max()) for name, value in alone.items())


def train(
    meshes: Sequence[str],
    transforms: Any = (),
    make: Callable[[nn.Module], Any] = adam,
    *,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    width: int = 16,
    bucket_mb: float = 25.0,
    **options: Any,
) -> list[float]:
    """Train two steps on each mesh; return by how much values differ from one device after them.

    Args:
        meshes: the meshes.
        transforms: transforms of the plan.
        make: makes an optimizer, or several, of a model.
        prepare: changes the model of one device.
        width: the model's.
        bucket_mb: of `reshard`.
        **options: further arguments of `shard_model`.
    """
    single = prepare(seeded(width).double())
    model = sl.shard_model(copy.deepcopy(single), meshes[0], RULES, transforms=transforms, **options)
    optimizers = [each if isinstance(each, list) else [each] for each in (make(model), make(single))]
    every = [*optimizers[0], *optimizers[1]]
    every += [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in every]
    off = list[float]()
    for number, mesh in enumerate(meshes):
        if number:
            assert sl.reshard(model, mesh, optimizers[0], bucket_mb=bucket_mb) is model
            assert str(sl.get_plan(model).mesh) == mesh
        for step in range(2 * number, 2 * number + 2):
            backward(model, ids(step))
            loss(single, ids(step)).backward()
            for each in every:
                each.step()
            model.zero_grad()
            single.zero_grad()
        off.append(difference(model, single))
    return off


def backward(model: nn.Module, ids: torch.Tensor, optimizer: Any = None) -> None:
    """Run forward and backward of this rank's rows, in stages or not."""
    rows = mine(ids, model)
    sl.pipeline_step(model, rows[:, :-1], criterion(rows[:, 1:]), microbatches=1, optimizer=optimizer)
