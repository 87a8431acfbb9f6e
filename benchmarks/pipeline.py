"""A training step (microbatches forward and back, AdamW) on two stages: shardlib, torch's schedules, one process.

    python benchmarks/pipeline.py                       # both sizes, some minutes on two cores
    python benchmarks/pipeline.py --size tiny --quick

1.00 is what one writes with `torch.distributed.pipelining`: a module for each stage, cut by hand, a `PipelineStage` and
`Schedule1F1B`, with torch's fused AdamW, which shardlib takes on CPU where the user left the choice. Peers with the
default, a loop on CPU, are there for the record. shardlib is given the whole model, unchanged. Every variant starts
from the same weights, sees the same batches, cuts them into four microbatches, and must show the same losses.

`Pipe` is of one process: rank 0 has both partitions, one thread as all others, and the other rank waits. It recomputes
nothing. fairscale's runs where it is installed, which `make bench` does in an environment of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _harness import Variant, compare, fused, fused_and_default, is_rank, parser, start_ranks, write
from _models import SIZES, Batch, Size, plain
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shardlib as sl
from shardlib.booster import Pipe

MICROBATCHES = 4
PIPE_SIZES = {name: replace(size, rows=2 * MICROBATCHES) for name, size in SIZES.items()}


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- by hand ----------------------------------------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        whole = plain(size)
        self.token, self.position, self.blocks = whole.token, whole.position, whole.blocks[: size.layers // 2]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        whole = plain(size)
        self.blocks, self.norm, self.head = whole.blocks[size.layers // 2 :], whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ByHand(nn.Module):
    """A stage of torch's and its schedule."""

    def __init__(self, size: Size, *, schedule: Any) -> None:
        super().__init__()
        self.stage = (Last if dist.get_rank() else First)(size)
        self.schedule = schedule(
            PipelineStage(self.stage, dist.get_rank(), 2, torch.device("cpu")), MICROBATCHES, loss_fn=criterion
        )

    def train_on(self, batch: Batch) -> float:
        """The harness takes the mean over ranks, and the last alone knows the loss."""
        ids, targets = batch
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(ids)
            return 0.0
        self.schedule.step(target=targets, losses=losses)
        return 2 * torch.stack(losses).mean().item()


# --- shardlib ---------------------------------------------------------------------------------------------------------


class Labelled(nn.Module):
    """The whole model, which is given the targets beside the ids: the criterion reads them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gpt = plain(size)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.gpt(ids)

    def train_on(self, batch: Batch) -> float:
        loss = sl.pipeline_step(self, batch, lambda logits, given: criterion(logits, given[1])).loss
        assert loss is not None
        return loss.item()


def ours(size: Size, *, schedule: str) -> nn.Module:
    half = size.layers // 2
    first, last = f"gpt.token, gpt.position, gpt.blocks.0-{half - 1}", f"gpt.blocks.{half}-{size.layers - 1}"
    rules = sl.Rules({"**": None}, stages=f"{first} | {last}, gpt.norm, gpt.head")
    return sl.shard_model(Labelled(size), "pp=2", rules, transforms=[sl.pipeline(schedule, MICROBATCHES)])


# --- one process ------------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    def __init__(self, first: First) -> None:
        super().__init__()
        self.token, self.position = first.token, first.position

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class OneProcess(nn.Module):
    def __init__(self, size: Size, *, pipe: Callable[..., nn.Module]) -> None:
        super().__init__()
        first, last = First(size), Last(size)
        layers = [Embedding(first), *first.blocks, *last.blocks, last.norm, last.head]
        balance, devices = [1 + len(first.blocks), len(last.blocks) + 2], ["cpu", "cpu"]
        net = nn.Sequential(*layers)
        self.pipe = pipe(net, balance, devices=devices, chunks=MICROBATCHES, checkpoint="never")

    def train_on(self, batch: Batch) -> float:
        if dist.get_rank():
            return 0.0
        loss = criterion(self.pipe(batch[0]), batch[1])
        loss.backward()
        return 2 * loss.item()


def fairscale_pipe(*args: Any, **given: Any) -> nn.Module:
    from fairscale.nn import Pipe

    return Pipe(*args, **given)


FAIRSCALE = fused_and_default("fairscale Pipe", partial(OneProcess, pipe=fairscale_pipe))
VARIANTS = [
    *fused_and_default("Schedule1F1B", partial(ByHand, schedule=Schedule1F1B)),
    *fused_and_default("ScheduleGPipe", partial(ByHand, schedule=ScheduleGPipe)),
    Variant("shardlib, 1f1b", partial(ours, schedule="1f1b"), peers=(fused("Schedule1F1B"),)),
    Variant("shardlib, gpipe", partial(ours, schedule="gpipe"), peers=(fused("ScheduleGPipe"),)),
    *(FAIRSCALE if find_spec("fairscale") else []),
    Variant("shardlib, Pipe", partial(OneProcess, pipe=Pipe), fused=True, peers=(fused("fairscale Pipe"),)),
]


def main() -> None:
    args = parser(__doc__).parse_args()
    if not is_rank():
        sys.exit(start_ranks(2, sys.argv[1:]))
    sl.mesh(pp=2)
    write(args, compare(args, VARIANTS, seed=args.seed, sizes=PIPE_SIZES))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
