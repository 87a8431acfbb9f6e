"""The models that cases share: a causal transformer with the options that faults need, and complete right plans for it.

Heads are counted by `-1`, as the interfaces for tensor parallelism ask for, and a forward with labels returns a loss.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = ["GPT", "add_over", "clip_whole", "copy_to", "sequence_plan", "tensor_plan", "tokens"]

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 4, 8


class Rotary(nn.Module):
    """The cosines and sines of positions; the frequencies are a buffer that no checkpoint has."""

    inv_freq: torch.Tensor

    def __init__(self, head: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, head, 2) / head), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions.to(self.inv_freq.dtype).unsqueeze(-1) * self.inv_freq
        return torch.cat([angles.cos(), angles.cos()], -1), torch.cat([angles.sin(), angles.sin()], -1)


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate heads `(rows, heads, length, head)` by their positions' angles."""
    cos, sin = (part.unsqueeze(-3) for part in angles)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Causal self-attention, with grouped keys and values, fused or apart."""

    def __init__(self, width: int, heads: int, groups: int, fused: bool, bias: bool, head_norm: bool) -> None:
        super().__init__()
        self.head, self.repeat, self.fused = width // heads, heads // groups, fused
        if fused:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q = nn.Linear(width, heads * self.head, bias=bias)
            self.k, self.v = (nn.Linear(width, groups * self.head, bias=bias) for _ in range(2))
        self.proj = nn.Linear(width, width, bias=bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head) if head_norm else nn.Identity() for _ in range(2))

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        flat = self.qkv(x).chunk(3, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in flat)
        q, k = rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (part.repeat_interleave(self.repeat, 1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """The experts of a layer: `scores` is `(tokens, experts)`, zero for experts that a token does not take."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.of(x, scores, self.up, self.down)

    @staticmethod
    def of(x: torch.Tensor, scores: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(torch.einsum("ti,eio->eto", x, up))
        return torch.einsum("eto,eoi,te->ti", hidden, down, scores)


class MoE(nn.Module):
    """A router that sends each token to two experts."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, -2)
        scores = self.router(flat).softmax(-1)
        best = scores.topk(2, -1)
        kept = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        return self.experts(flat, kept).view_as(x)


class Block(nn.Module):
    def __init__(self, width: int, experts: int, bias: bool, *attention: Any) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), Attention(width, *attention)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = MoE(experts, width) if experts else MLP(width, bias)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A causal transformer. No parameter begins at zero or one, which would hide mistakes."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        heads: int = HEADS,
        groups: int = HEADS,
        layers: int = 2,
        fused: bool = False,
        tied: bool = False,
        bias: bool = False,
        experts: int = 0,
        head_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rotary = Rotary(width // heads)
        attention = heads, groups, fused, bias, head_norm
        self.blocks = nn.ModuleList(Block(width, experts, bias, *attention) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p) * 0.1)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> Any:
        x = self.embed(input_ids)
        angles = self.rotary(torch.arange(input_ids.shape[1]) if positions is None else positions)
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return logits if labels is None else {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(
    step: int, rows: int = 4, length: int = LENGTH, vocabulary: int = VOCABULARY, ragged: bool = False
) -> dict[str, torch.Tensor]:
    """Return ids and next tokens of a global batch; `ragged` ends rows at different tokens (-100)."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if ragged:
        ends = 1 + torch.arange(rows) * (length - 1) // max(rows - 1, 1)
        labels[torch.arange(length) >= ends[:, None]] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


# --- right plans ----------------------------------------------------------------------------------------------------


def tensor_plan() -> dict[str, ParallelStyle]:
    """Return the plan of Megatron's tensor parallelism: whole activations between layers."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **{f"blocks.*.attn.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "blocks.*.attn.proj": RowwiseParallel(),
        **{f"blocks.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Return the plan with activations between layers split over the sequence."""
    whole = functools.partial(PrepareModuleInput, input_layouts=Shard(1), desired_input_layouts=Replicate())
    attn = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.attn": attn,
        **{f"blocks.*.attn.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "blocks.*.attn.proj": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp": whole(),
        **{f"blocks.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


# --- Megatron's two functions, for code by hand ---------------------------------------------------------------------


class _CopyTo(torch.autograd.Function):
    """The identity; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _AddOver(torch.autograd.Function):
    """The sum over ranks; its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def copy_to(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return `x`, whose gradient is summed over the group."""
    return _CopyTo.apply(x, group)


def add_over(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of `x` over the group; the gradient passes as it is."""
    return _AddOver.apply(x, group)


def clip_whole(model: nn.Module) -> torch.Tensor:
    """Clip gradients to norm 1 by their full tensors, and return the norm: slow and right."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm([g.full_tensor() if isinstance(g, DTensor) else g for g in grads])
    for grad in grads:
        grad.mul_(torch.clamp(1.0 / norm, max=1.0))
    return norm
