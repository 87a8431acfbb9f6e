"""Small architectures in plain PyTorch, as people write them, and batches for them.

Views leave the number of local heads open (`-1`), as sharding by hand needs. Every width divides by two and by four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["ARCHITECTURES", "Block", "Gated", "Gpt", "images", "loss_of_classes", "loss_of_tokens", "numbers", "tokens"]

VOCAB, WIDTH, HEAD, SEQ, ROWS = 32, 16, 4, 8, 8


# --- what models are given ------------------------------------------------------------------------------------------


def tokens(step: int) -> torch.Tensor:
    """Return ids `(rows, seq + 1)`: inputs and the next token of each."""
    return torch.randint(VOCAB, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))


def numbers(step: int, *shape: int) -> torch.Tensor:
    """Return normal numbers `(rows, *shape)`."""
    return torch.randn(ROWS, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(step))


def images(step: int) -> torch.Tensor:
    return numbers(step, 3, 8, 8)


def series(step: int) -> torch.Tensor:
    return numbers(step, SEQ, WIDTH)


def loss_of_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next token."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def loss_of_classes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a class that depends on the row's own numbers."""
    output = model(x)
    classes = (x.flatten(1).sum(1).abs() * 10).long() % output.shape[-1]
    return F.cross_entropy(output, classes)


# --- parts ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention with q, k and v apart; `kv` heads of keys and values."""

    def __init__(self, width: int, heads: int, kv: int, *, bias: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.head, self.causal = width // heads, causal
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(width, kv * self.head, bias=bias) for _ in range(2))
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Self-attention with one layer for q, k and v, whose rows are sorted by head: a column split keeps heads whole."""

    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.head = width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head)).permute(3, 0, 2, 1, 4).unbind()
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    """A SwiGLU: two layers in, one out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Experts that all see every token, weighted by a router."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(FeedForward(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return sum((expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts)), torch.zeros_like(x))


class Block(nn.Module):
    """A transformer's block. `order` is "pre", "post" or "parallel" (GPT-J's)."""

    def __init__(self, attention: nn.Module, feed: nn.Module, norm: Callable[[], nn.Module], order: str) -> None:
        super().__init__()
        self.order, self.attn, self.feed = order, attention, feed
        self.norm1, self.norm2 = norm(), norm() if order != "parallel" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "parallel":
            seen = self.norm1(x)
            return x + self.attn(seen) + self.feed(seen)
        if self.order == "post":
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.feed(x))
        x = x + self.attn(self.norm1(x))
        return x + self.feed(self.norm2(x))


# --- transformers ---------------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A causal transformer: ids `(batch, seq)` to logits `(batch, seq, vocab)`."""

    def __init__(
        self,
        *,
        kv: int = 4,
        fused: bool = False,
        feed: Callable[..., nn.Module] = FeedForward,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        tied: bool = False,
        bias: bool = True,
        order: str = "pre",
        learned: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(SEQ, WIDTH) if learned else None
        make_norm = functools.partial(norm, WIDTH)
        heads = WIDTH // HEAD
        self.blocks = nn.ModuleList(
            Block(
                Fused(WIDTH, heads, bias=bias) if fused else Attention(WIDTH, heads, kv, bias=bias),
                feed(WIDTH), make_norm, order,
            )
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = make_norm(), nn.Linear(WIDTH, VOCAB, bias=bias and not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token, self.position = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(
            Block(Attention(WIDTH, 4, 4, causal=False), FeedForward(WIDTH), lambda: nn.LayerNorm(WIDTH), "pre")
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Encoder(nn.Module):
    """PyTorch's own encoder, over series of numbers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Translator(nn.Module):
    """PyTorch's own encoder and decoder, from ids to ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.body(self.embed(ids.flip(1)), self.embed(ids), tgt_mask=mask))


# --- others ---------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Residual blocks of a feed-forward."""

    def __init__(self, feed: Callable[..., nn.Module] = FeedForward, norm: Callable[..., nn.Module] = nn.LayerNorm):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(norm(WIDTH), feed(WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Mixer(nn.Module):
    """Layers over time and over features in turn (MLP-Mixer)."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.ModuleList(FeedForward(SEQ) for _ in range(2))
        self.blocks = nn.ModuleList(FeedForward(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for time, feature in zip(self.times, self.blocks, strict=True):
            x = x + time(x.transpose(1, 2)).transpose(1, 2)
            x = x + feature(x)
        return self.head(x.mean(1))


class Convolutions(nn.Module):
    """Residual convolutions with a norm of each sample's own."""

    def __init__(self, norm: Callable[[int], nn.Module], groups: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(WIDTH), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=groups))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class Unet(nn.Module):
    """Down, up, and a skip between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.down(x))
        return self.out(torch.cat([skip, F.silu(self.up(F.silu(self.deep(skip))))], 1))


class Recurrent(nn.Module):
    """Ids through a recurrent network to the next id."""

    def __init__(self, cell: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = cell(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids))[0])


class Bag(nn.Module):
    """A mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([FeedForward(WIDTH)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Twins(nn.Module):
    """Two views of a sample through one tower, and how much they agree."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([FeedForward(WIDTH)])
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks[0](x), self.blocks[0](x.flip(1))
        return F.cosine_similarity(first, second, -1) * self.scale


class Partly(nn.Module):
    """A frozen trunk, a trained head, and a buffer that shifts what enters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(WIDTH) for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


# name: (a function that builds it, its batches, its loss; None for the mean that an audit takes by itself)
ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Any]] = {
    "mlp": (Mlp, numbers, loss_of_classes),
    "mlp, swiglu": (functools.partial(Mlp, Gated, nn.RMSNorm), numbers, loss_of_classes),
    "mlp, frozen trunk": (Partly, numbers, loss_of_classes),
    "mixer": (Mixer, series, loss_of_classes),
    "gpt": (Gpt, tokens, loss_of_tokens),
    "gpt, tied": (functools.partial(Gpt, tied=True), tokens, loss_of_tokens),
    "gpt, fused qkv": (functools.partial(Gpt, fused=True), tokens, loss_of_tokens),
    "gpt, no bias": (functools.partial(Gpt, bias=False), tokens, loss_of_tokens),
    "gpt, post-norm": (functools.partial(Gpt, order="post"), tokens, loss_of_tokens),
    "gpt, parallel block": (functools.partial(Gpt, order="parallel"), tokens, loss_of_tokens),
    "gpt, mixture": (functools.partial(Gpt, feed=Mixture), tokens, loss_of_tokens),
    "llama": (
        functools.partial(Gpt, kv=2, feed=Gated, norm=nn.RMSNorm, bias=False, learned=False), tokens, loss_of_tokens,
    ),
    "llama, tied": (
        functools.partial(Gpt, kv=2, feed=Gated, norm=nn.RMSNorm, bias=False, tied=True), tokens, loss_of_tokens,
    ),
    "vit": (Vit, images, loss_of_classes),
    "encoder": (Encoder, series, loss_of_classes),
    "translator": (Translator, tokens, loss_of_tokens),
    "convolutions": (functools.partial(Convolutions, functools.partial(nn.GroupNorm, 4)), images, loss_of_classes),
    "convolutions, grouped": (functools.partial(Convolutions, nn.InstanceNorm2d, 4), images, loss_of_classes),
    "unet": (Unet, images, None),
    "lstm": (functools.partial(Recurrent, nn.LSTM), tokens, loss_of_tokens),
    "gru, both ways": (functools.partial(Recurrent, nn.GRU, bidirectional=True), tokens, loss_of_tokens),
    "bag": (Bag, tokens, loss_of_classes),
    "twins": (Twins, numbers, None),
}  # fmt: skip
