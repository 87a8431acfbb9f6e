"""An axis with rank groups of its own: tensor parallel ranks that share a host, wherever the launcher put them.

    torchrun --nproc_per_node 4 examples/own_modes/near.py

Some launchers deal ranks out in turn (Slurm's `--distribution=cyclic`): ranks 0, 2, ... are on one host, 1, 3, ...
on the other. A mesh "dp=2,tp=2" would put the ranks of each tp group on two hosts; the axis below does not.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn

import shardlib as sl

HOSTS = 2


@sl.axes.register_axis("near", kind="model")
def near(shape: sl.MeshShape) -> list[list[int]]:
    """Ranks of one host, in groups as long as the axis."""
    hosts = [list(range(host, shape.world_size, HOSTS)) for host in range(HOSTS)]
    size = shape["near"]
    return [host[at : at + size] for host in hosts for at in range(0, len(host), size)]


RULES = sl.Rules({"up": "colwise", "down": "rowwise"}, axis="near")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def main() -> None:
    torch.manual_seed(0)
    mesh = sl.mesh("dp=2,near=2")
    model = sl.shard_model(Net(), mesh, RULES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shape = sl.MeshShape.of(mesh)
    index, count = shape.data_place(shape.coordinate(int(os.environ["RANK"])))
    for step in range(20):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).chunk(count)[index]
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    (group,) = sl.axes.axis_groups("near", mesh)
    print(f"rank {os.environ['RANK']}: its tensor parallel group is {list(group.ranks)}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
