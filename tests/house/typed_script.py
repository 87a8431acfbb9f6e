"""A user's training script: mypy accepts it with all of its strict checks (see pyproject.toml)."""

from pathlib import Path

import torch
from torch import nn

import shardlib as sl


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out


def train(folder: Path, steps: int) -> float:
    mesh = sl.mesh("dp=-1")
    rules = sl.Rules({"up": "colwise", "down": sl.Shard(1)}, unmatched="replicate")
    plan: sl.Plan = sl.plan(Net(), "dp=2,tp=2", rules) | sl.zero(2) | sl.precision("bf16")
    print(plan.memory().total, [each.bytes for each in plan.traffic()])
    model: Net = sl.shard_model(Net(), mesh=mesh, rules={"**": None}, transforms=sl.fsdp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) - 1).square().mean()
        loss.backward()
        sl.clip_grad_norm_(model, 1.0)
        optimizer.step()
    sl.save(folder / "last", model, optimizer)
    sl.load(folder / "last", model, optimizer)
    return float(loss)
