"""Groups that overlap, and a gradient handler that uses them: sums within a host first, between hosts a part of them.

    torchrun --nproc_per_node 4 examples/own_modes/two_levels.py

Every rank is in two groups: its host, and the ranks of other hosts that have the same place there. Gradients are
reduce-scattered within the host, each rank's part is summed with its counterparts elsewhere, and gathered within the
host: between hosts travels one part in as many as a host has ranks (as in Horovod's hierarchical all-reduce,
arXiv 1802.05799).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.engine import GradientBucket
from shardlib.trainer import BaseGradientHandler, initialize, launch_from_torch, register_gradient_handler

PER_HOST = 2


@sl.axes.register_axis("levels", kind="overlay")
def levels(shape: sl.MeshShape) -> list[list[int]]:
    """Hosts first, then ranks that have the same place on their hosts."""
    ranks = range(shape.world_size)
    hosts = [list(ranks[first : first + PER_HOST]) for first in range(0, shape.world_size, PER_HOST)]
    return [*hosts, *(list(ranks[place::PER_HOST]) for place in range(PER_HOST))]


class TwoLevels:
    """Sums a bucket of gradients over all ranks."""

    def __init__(self, mesh: Any) -> None:
        self.host, self.others = sl.axes.axis_groups("levels", mesh)

    def __call__(self, bucket: GradientBucket) -> None:
        count = len(self.host.ranks)
        padded = F.pad(bucket.tensor, (0, -len(bucket.tensor) % count))
        part = torch.empty_like(padded[: len(padded) // count])
        dist.reduce_scatter_tensor(part, padded, group=self.host.group)
        dist.all_reduce(part, group=self.others.group)
        dist.all_gather(list(padded.chunk(count)), part, group=self.host.group)
        bucket.tensor.copy_(padded[: len(bucket.tensor)])


@register_gradient_handler("two_levels")
class TwoLevelsHandler(BaseGradientHandler):
    """The same, for a config to name."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self.sum = TwoLevels(sl.get_plan(model).mesh)

    def reduce(self, bucket: GradientBucket) -> None:
        self.sum(bucket)


CONFIG = {"gradient_handler": [{"type": "two_levels"}]}


def main() -> None:
    launch_from_torch(CONFIG, backend="gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    engine, *_ = initialize(net, torch.optim.AdamW(net.parameters(), lr=1e-2), nn.CrossEntropyLoss(), verbose=False)
    for step in range(20):
        draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 8, generator=draw)
        engine.zero_grad()
        loss = engine.criterion(engine(x), x[:, :4].argmax(1))
        engine.backward(loss)
        engine.step()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
