"""A small GPT that trains in few bits, on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.testing.models import Tokens, Transformer, perturb, rules_for
from tests.engine.whole import whole

STEPS = 5


@dataclass
class Trained:
    """Mean losses over data ranks, which steps were skipped, and all gradients of the first step."""

    losses: list[float]
    skipped: list[bool]
    gradients: torch.Tensor

    def error(self, exact: Trained) -> float:
        """How far losses are from exact ones, relatively, at the worst step."""
        return max(abs(a - b) / b for a, b in zip(self.losses, exact.losses, strict=True))


def gpt(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab": 16, "heads": 4, "head": 8, "layers": 2, "tied": True}
    return perturb(Transformer(**{**sizes, **changes})).to(dtype)


def train(mesh: str, *transforms: Any, dtype: torch.dtype = torch.float32, clip: float | None = None) -> Trained:
    model = sl.shard_model(gpt(dtype), mesh, rules_for(gpt()), transforms=transforms, compile=None)
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-3)
    shape = sl.MeshShape(mesh)
    rank, count = shape.data_place(shape.coordinate(dist.get_rank()))
    losses, skipped, gradients = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = Tokens(8, 5, 16)(step).chunk(count)[rank]
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.backward(loss)
        gradients = gradients or [whole(p.grad).double().flatten() for p in model.parameters()]
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        skipped.append(optimizer.step_was_skipped)
    return Trained(losses, skipped, torch.cat(gradients))
