"""A mesh that changes while a model trains: the numbers stay those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.testing import shared_pool
from shardlib.weights import reshard

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
LIMIT = 1e-12


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.up, self.down = Attention(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.attn(x)
        return x + self.down(torch.relu(self.up(x)))


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


def _loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _ids(step: int) -> torch.Tensor:
    return torch.randint(33, (4, 9), generator=torch.Generator().manual_seed(step))


def _mine(ids: torch.Tensor, model: nn.Module) -> torch.Tensor:
    mesh = sl.get_plan(model).mesh
    index, count = mesh.data_place(mesh.coordinate(dist.get_rank()))
    return ids.chunk(count)[index]


def _trained(
    meshes: Sequence[str], transforms: Any, make: Callable[[Any], torch.optim.Optimizer], bucket_mb: float, width: int
) -> dict[str, float]:
    """Train two steps on each mesh; return by how much values differ from one device."""
    torch.manual_seed(0)
    single = Model(width).double()
    model = sl.shard_model(copy.deepcopy(single), meshes[0], RULES, transforms=transforms)
    optimizer, alone = make(model.parameters()), make(single.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in (optimizer, alone)]
    off = dict[str, float]()
    for number, mesh in enumerate(meshes):
        if number:
            assert reshard(model, mesh, optimizer, bucket_mb=bucket_mb) is model
            assert str(sl.get_plan(model).mesh) == mesh
        for step in range(2 * number, 2 * number + 2):
            ids = _ids(step)
            sl.pipeline_step(model, _mine(ids[:, :-1], model), _criterion(_mine(ids[:, 1:], model)), microbatches=1)
            _loss(single, ids).backward()
            for each, scheduler in zip((optimizer, alone), schedulers, strict=True):
                each.step()
                scheduler.step()
                each.zero_grad()
        full = sl.full_state_dict(model)
        off[f"{number}: {mesh}"] = max(
            float((full[name] - value).abs().max()) for name, value in single.state_dict().items()
        )
    return off


def _criterion(labels: torch.Tensor) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    return lambda logits, _: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize(
    ("meshes", "transforms", "make"),
    [
        (["dp=4", "dp=2,tp=2", "tp=4", "dp=4"], [], _adam),
        (["dp=2,tp=2", "tp=2,dp=2", "dp=4"], [sl.zero(3)], _adam),
        (["dp=4", "tp=2,dp=2"], [sl.zero(1)], _sgd),
        (["tp=4", "dp=2,tp=2"], [sl.zero(2)], _adam),
        (["pp=2,dp=2", "dp=4", "pp=2,tp=2", "tp=4"], [], _adam),
        (["dp=4", "pp=2,dp=2"], [sl.zero(1)], _sgd),
    ],
)
def test_training_goes_on_as_on_one_device(meshes: list[str], transforms: Any, make: Any):
    for off in shared_pool(4).run(_trained, meshes, transforms, make, 25.0, 16):
        assert len(off) == len(meshes) and max(off.values()) < LIMIT, off


def test_tensors_larger_than_a_bucket():
    for off in shared_pool(4).run(_trained, ["dp=2,tp=2", "tp=4"], [sl.zero(3)], _adam, 1 / 64, 128):
        assert max(off.values()) < LIMIT, off
