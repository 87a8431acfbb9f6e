"""Context parallelism by hand: each rank has a part of the sequence, and gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.audit.faults.models import add_over

__all__ = ["mean_of_all", "positions_of_all", "shifted_labels", "split_sequence"]

Labels = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
Positions = Callable[[int, int], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]


def positions_of_all(rank: int, length: int) -> torch.Tensor:
    """Return the positions of a rank's part in the sequence."""
    return torch.arange(rank * length, (rank + 1) * length)


def shifted_labels(ids: torch.Tensor, labels: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a rank's part of labels that were shifted before the split."""
    return labels.chunk(size, 1)[rank]


def mean_of_all(logits: torch.Tensor, labels: torch.Tensor, every: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of losses over the tokens of all ranks, divided by their number."""
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return add_over(total / (every != -100).sum(), group)


def split_sequence(
    model: Any,
    mesh: DeviceMesh,
    *,
    positions: Positions = positions_of_all,
    labels_of: Labels = shifted_labels,
    loss: Loss = mean_of_all,
) -> nn.Module:
    """Have a `GPT` run on this rank's part of the sequence, and sum the gradients of parameters over ranks."""
    rank, size, group, inner = mesh.get_local_rank(), mesh.size(), mesh.get_group(), model.forward
    for block in model.blocks:
        _gather_keys(block.attn, rank, group)
    for p in model.parameters():
        p.register_hook(lambda grad: _summed(grad, group))

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        ids = input_ids.chunk(size, 1)[rank]
        logits = inner(ids, positions=positions(rank, ids.shape[1]))
        return {"loss": loss(logits, labels_of(input_ids, labels, rank, size), labels, group), "logits": logits}

    model.forward = forward
    return model


def _gather_keys(attn: Any, rank: int, group: Any) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = _Gather.apply(k, group), _Gather.apply(v, group)
        first, length = rank * q.shape[2], k.shape[2]
        mask = torch.arange(first, first + q.shape[2]).unsqueeze(1) >= torch.arange(length)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    attn.attend = attend


def _summed(grad: torch.Tensor, group: Any) -> torch.Tensor:
    grad = grad.contiguous().clone()
    dist.all_reduce(grad, group=group)
    return grad


class _Gather(torch.autograd.Function):
    """Joins the parts of the sequence (dim 2); the gradient is the sum of what ranks have of a part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return _summed(grad, ctx.group).chunk(size, 2)[rank], None
