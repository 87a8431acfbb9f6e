"""A training step (forward, backward, AdamW) on two tensor-parallel ranks, in as many ways as there are.

    python benchmarks/tensor_parallel.py                      # both sizes, some minutes on two cores
    python benchmarks/tensor_parallel.py --size tiny --quick

1.00 is what one would write by hand: Megatron's column- and row-parallel layers over local tensors, with one all-reduce
in each place where it is due and nothing else (Shoeybi et al. 2019, section 3), with torch's fused AdamW, which
shardlib takes on CPU where the user left the choice. Peers with the default, a loop on CPU, are there for the record.
Every variant starts from the same weights, sees the same batches, and must show the same losses.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _harness import (
    OPTIONS,
    Trained,
    Variant,
    compare,
    fused,
    fused_and_default,
    is_rank,
    own_optimizer,
    parser,
    start_ranks,
    write,
)
from _models import GPT, Block, Size, plain, stacked
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardlib as sl


class _SumGradient(torch.autograd.Function):
    """The tensor itself; its gradient is summed over ranks. It stands before a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is that of each part. It stands behind a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Column(nn.Module):
    """This rank's rows of a Linear's weight: its share of the output features."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(_mine(whole.weight, 0))
        self.bias = nn.Parameter(_mine(whole.bias, 0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_SumGradient.apply(x), self.weight, self.bias)


class Row(nn.Module):
    """This rank's columns of a Linear's weight: its share of the input features. The bias is added once."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(_mine(whole.weight, 1))
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(F.linear(x, self.weight)) + self.bias


def _mine(whole: Tensor, dim: int) -> Tensor:
    return whole.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def _blocks(model: GPT) -> list[Block]:
    return [cast(Block, block) for block in model.blocks]


def by_hand(size: Size) -> nn.Module:
    model = plain(size)
    for block in _blocks(model):
        block.attn.qkv, block.attn.proj = cast(nn.Linear, Column(block.attn.qkv)), cast(nn.Linear, Row(block.attn.proj))
        block.mlp.up, block.mlp.down = cast(nn.Linear, Column(block.mlp.up)), cast(nn.Linear, Row(block.mlp.down))
    return model


def native(size: Size, *, fused: bool | None) -> Trained:
    """torch's own: local activations between column- and row-parallel layers, DTensor parameters.

    The fused AdamW does not take plain tensors beside DTensors (torch 2.13), hence two groups.
    """
    model = plain(size)
    styles = {"attn.qkv": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    for block in _blocks(model):
        parallelize_module(
            block, sl.mesh(tp=-1), {**styles, "attn.proj": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        )
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is split] for split in (True, False)]
    return model, torch.optim.AdamW([{"params": group} for group in groups], fused=fused, **OPTIONS)


def ours(size: Size, *, compile: str | None, qkv_stacked: bool = False) -> nn.Module:
    """The plain model and rules. With `qkv_stacked` q, k and v are one weight, which no local code may cut."""
    model = stacked(size) if qkv_stacked else plain(size)
    qkv = "(qkv heads@tp head)" if qkv_stacked else "colwise"
    rules = sl.Rules(
        {"attn.qkv": qkv, "attn.proj": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"},
        sizes={"qkv": 3, "heads": size.heads} if qkv_stacked else {},
        unmatched="replicate",
    )
    return sl.shard_model(model, sl.mesh(tp=-1), rules, compile=compile)


PEERS = fused("by hand"), fused("parallelize_module")
VARIANTS = [
    *fused_and_default("by hand", by_hand),
    *own_optimizer("parallelize_module", native),
    *(
        Variant(name, partial(ours, compile=backend, qkv_stacked=qkv_stacked), peers=PEERS)
        for name, backend, qkv_stacked in (
            ("shardlib", None, False),
            ("shardlib aot_eager", "aot_eager", False),
            ("shardlib inductor", "inductor", False),
            ("shardlib, qkv stacked", None, True),
            ("shardlib aot_eager, qkv stacked", "aot_eager", True),
        )
    ),
]


def main() -> None:
    args = parser(__doc__).parse_args()
    if not is_rank():
        sys.exit(start_ranks(2, sys.argv[1:]))
    sl.mesh(tp=-1)
    write(args, compare(args, VARIANTS, seed=args.seed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
