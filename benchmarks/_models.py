"""The GPT that the benchmarks train, its sizes, and random batches whose second half can be learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """`rows` is the batch of one data rank; a benchmark measures each variant in `rounds` rounds of `burst` steps."""

    embed: int
    layers: int
    heads: int
    vocab: int
    seq: int
    rows: int
    rounds: int
    burst: int = 1


SIZES = {
    "tiny": Size(embed=64, layers=2, heads=4, vocab=512, seq=64, rows=2, rounds=60, burst=10),
    "d512": Size(embed=512, layers=6, heads=8, vocab=4096, seq=256, rows=2, rounds=30),
}


class Attention(nn.Module):
    """The rows of `qkv.weight` go head by head, q, k and v of one head together: any equal split holds whole heads.

    Local code may therefore split it as it is, which is what torch's own `parallelize_module` needs. With `stacked`
    they go all of q, all of k, all of v, as most models have it; `stack_qkv` turns weights of one kind into the other.
    """

    def __init__(self, size: Size, *, stacked: bool = False) -> None:
        super().__init__()
        self.head, self.stacked = size.embed // size.heads, stacked
        self.qkv = nn.Linear(size.embed, 3 * size.embed)
        self.proj = nn.Linear(size.embed, size.embed)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        if self.stacked:
            q, k, v = (t.view(rows, seq, -1, self.head) for t in self.qkv(x).chunk(3, dim=-1))
        else:
            q, k, v = self.qkv(x).view(rows, seq, -1, 3, self.head).unbind(3)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(rows, seq, -1))


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.embed, 4 * size.embed)
        self.down = nn.Linear(4 * size.embed, size.embed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, size: Size, *, stacked: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.embed), nn.LayerNorm(size.embed)
        self.attn, self.mlp = Attention(size, stacked=stacked), MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: Size, *, stacked: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocab, size.embed)
        self.position = nn.Embedding(size.seq, size.embed)
        self.blocks = nn.ModuleList(Block(size, stacked=stacked) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.embed)
        self.head = nn.Linear(size.embed, size.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain(size: Size) -> GPT:
    """The model on one device, the same weights whenever and wherever it is built."""
    torch.manual_seed(0)
    return GPT(size)


def stacked(size: Size) -> GPT:
    """The same function as `plain`, with the rows of each fused weight in the order q, k, v."""
    model = plain(size)
    twin = GPT(size, stacked=True)
    state = model.state_dict()
    twin.load_state_dict({name: stack_qkv(name, value, size) for name, value in state.items()})
    return twin


def stack_qkv(name: str, value: Tensor, size: Size) -> Tensor:
    if ".qkv." not in name:
        return value
    return value.unflatten(0, (size.heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def batches(size: Size, count: int, *, seed: int) -> Iterator[Batch]:
    """Random ids in which each odd place follows from the one before it, so that a loss has somewhere to go."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = torch.randint(size.vocab, (size.rows, size.seq + 1), generator=generator)
        ids[:, 1::2] = (5 * ids[:, 0:-1:2] + 1) % size.vocab
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
