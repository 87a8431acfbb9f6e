"""Mistakes in a user's own code: which rows a rank gets, how the loss is averaged, clipping and layers by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardlib.testing import models
from shardlib.testing.equivalence.case import rows_of
from shardlib.testing.equivalence.parts import local
from shardlib.testing.mutants._mutant import Arguments, Mutant, transformer

__all__ = ["USER"]


def _by_rank(batch: Any, index: int, count: int) -> Any:
    return rows_of(batch, dist.get_rank() % count, count)


def _always_first(batch: Any, index: int, count: int) -> Any:
    return rows_of(batch, 0, count)


def _mean_over_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return cross entropy over the tokens that are not padding (id 0), of which rows have different numbers."""
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0)


def _sum_over_rows(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the same loss, divided by the number of all tokens."""
    total = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0, reduction="sum")
    return total / ids.numel()


def _clip_own_pieces(model: nn.Module) -> torch.Tensor:
    """Clip to the norm of this rank's shards."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([local(g).square().sum() for g in grads]).sum().sqrt()
    return _clipped(grads, norm)


def _clip_sum_of_all(model: nn.Module) -> torch.Tensor:
    """Clip to the squares of all ranks' shards, including those that every rank holds."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    square = torch.stack([local(g).square().sum() for g in grads]).sum()
    if any(isinstance(g, DTensor) for g in grads):
        dist.all_reduce(square)
    return _clipped(grads, square.sqrt())


def _clip(model: nn.Module) -> torch.Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _clipped(grads: list[torch.Tensor], norm: torch.Tensor) -> torch.Tensor:
    for grad in grads:
        grad.mul_(torch.clamp(0.5 / norm, max=1.0))
    return norm


# --- experts sharded by hand ----------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Every token through every expert, weighed by the gate."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width, width))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eio,be->bo", x, self.weight, gate).tanh()


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.router = nn.Linear(8, 4)
        self.experts = Experts(4, 8)
        self.last = nn.Linear(8, 5)
        models.perturb(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.experts(x, self.router(x).softmax(-1)))


class _ToRanks(torch.autograd.Function):
    """The identity; its gradient is summed over ranks (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _FromRanks(torch.autograd.Function):
    """The sum over ranks; its gradient passes (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class ShardExperts:
    """Each rank computes with its own experts, by hand.

    Args:
        router_is_summed: False leaves out that the gate's gradient is a partial sum.
        twice: reduce the experts' gradients too, though no other rank has them.
    """

    def __init__(self, *, router_is_summed: bool = True, twice: bool = False) -> None:
        self.router_is_summed, self.twice = router_is_summed, twice

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.tensor import Shard, distribute_tensor

        experts: Any = model.experts
        experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh, [Shard(0)]))
        rank, summed = mesh.get_local_rank(), self.router_is_summed

        def forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            mine = experts.weight.to_local()
            here = (_ToRanks.apply(gate) if summed else gate).chunk(mesh.size(), -1)[rank]
            return _FromRanks.apply(torch.einsum("bi,eio,be->bo", _ToRanks.apply(x), mine, here)).tanh()

        experts.forward = forward
        if self.twice:
            experts.weight.register_hook(lambda grad: grad * mesh.size())
        return model


def _experts(**mistake: bool) -> Arguments:
    return {
        "model": MixtureOfExperts,
        "batch": models.Numbers((8, 6)),
        "mesh": "tp=2",
        "shard": ShardExperts(**mistake),
        "steps": 2,
    }


# --- attention, layers and FSDP by hand -----------------------------------------------------------------------------


class ShardAttention:
    """Megatron's attention by hand on plain tensors, for a fused qkv.

    Args:
        fused: cut q, k and v each; False cuts the fused weight like one dim.
        bias_once: add the bias of proj after the sum; False adds it on every rank.
    """

    def __init__(self, *, fused: bool = True, bias_once: bool = True) -> None:
        self.fused, self.bias_once = fused, bias_once

    def __call__(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            self._attention(block.attn, mesh)
        return model

    def _attention(self, attn: Any, mesh: DeviceMesh) -> None:
        rank, size, bias_once, fused = mesh.get_local_rank(), mesh.size(), self.bias_once, self.fused
        heads, head = attn.heads // size, attn.head

        def mine(t: torch.Tensor) -> torch.Tensor:
            if not fused:
                return t.chunk(size)[rank]
            return torch.cat([part.chunk(size)[rank] for part in t.chunk(3)])

        def forward(x: torch.Tensor, _angles: Any) -> torch.Tensor:
            batch, seq, _ = x.shape
            y = F.linear(_ToRanks.apply(x), mine(_ToRanks.apply(attn.qkv.weight)), mine(_ToRanks.apply(attn.qkv.bias)))
            q, k, v = (t.view(batch, seq, heads, head).transpose(1, 2) for t in y.chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, -1)
            weight = _ToRanks.apply(attn.proj.weight).chunk(size, 1)[rank]
            if bias_once:
                return _FromRanks.apply(F.linear(y, weight)) + attn.proj.bias
            return _FromRanks.apply(F.linear(y, weight, attn.proj.bias))

        attn.forward = forward


def _attention(**mistake: bool) -> Arguments:
    found = transformer("tp=2")
    del found["rules"]
    return {**found, "shard": ShardAttention(**mistake)}


def shard_fully(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def shard_fully_and_sum(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    model = shard_fully(model, mesh)
    module: Any
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    return model


def _fully(shard: Any) -> Arguments:
    found = transformer("fsdp=2")
    del found["rules"]
    return {**found, "shard": shard}


_MODEL = r""
USER = (
    Mutant(
        "rows by rank", "the sampler counts all ranks, so that a tensor-parallel group gets different examples",
        "huggingface/accelerate#3092; deepspeedai/DeepSpeed#7199", _MODEL,
        lambda: transformer("dp=2,tp=2"),
        mistaken=lambda: {**transformer("dp=2,tp=2"), "split": _by_rank, "check": False},
    ),
    Mutant(
        "the same rows", "every data rank gets the same examples",
        "NCAR/miles-credit#407", _MODEL,
        lambda: transformer("dp=2"), mistaken=lambda: {**transformer("dp=2"), "split": _always_first},
    ),
    Mutant(
        "mean of means", "the loss is a mean over each rank's own number of tokens",
        "huggingface/transformers#34191; deepspeedai/DeepSpeed#5583", _MODEL,
        lambda: {**transformer("dp=2"), "loss": _sum_over_rows},
        mistaken=lambda: {**transformer("dp=2"), "loss": _mean_over_tokens},
    ),
    Mutant(
        "norm of own pieces", "the gradient norm leaves out the other ranks' shards",
        "deepspeedai/DeepSpeed#5411", _MODEL,
        lambda: {**transformer("tp=2"), "clip": _clip},
        mistaken=lambda: {**transformer("tp=2"), "clip": _clip_own_pieces},
    ),
    Mutant(
        "norm counted twice", "the gradient norm counts a replicated gradient once for each rank",
        "meta-pytorch/torchtune#2420; NVIDIA/Megatron-LM#5916", _MODEL,
        lambda: {**transformer("tp=2"), "clip": _clip},
        mistaken=lambda: {**transformer("tp=2"), "clip": _clip_sum_of_all},
    ),
    Mutant(
        "router by hand", "experts by hand: the gate's gradient is a partial sum, and is not summed",
        "pytorch/torchtitan#2416, #4054", r"experts",
        _experts, mistaken=lambda: _experts(router_is_summed=False),
    ),
    Mutant(
        "experts twice", "experts by hand: their gradients are multiplied by the number of ranks",
        "pytorch/pytorch#160285", r"experts",
        _experts, mistaken=lambda: _experts(twice=True),
    ),
    Mutant(
        "qkv by hand", "attention by hand: the fused weight is sharded as one dim",
        "pytorch/pytorch#140069", r"blocks\.0\.attn",
        _attention, mistaken=lambda: _attention(fused=False),
    ),
    Mutant(
        "row bias by hand", "attention by hand: the bias is added before the sum",
        "pytorch/torchtitan#2106; NCAR/miles-credit#415", r"blocks\.0\.attn",
        _attention, mistaken=lambda: _attention(bias_once=False),
    ),
    Mutant(
        "fully_shard sum", "fully_shard with a gradient divide factor of one",
        "pytorch/torchtitan#2318", r"\(every module\)",
        lambda: _fully(shard_fully), mistaken=lambda: _fully(shard_fully_and_sum),
    ),
)  # fmt: skip
