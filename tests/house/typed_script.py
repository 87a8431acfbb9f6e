"""A user's training script: mypy accepts it with all of its strict checks (see pyproject.toml)."""

from pathlib import Path

import torch
from torch import nn

import shardlib as sl
from shardlib import functional
from shardlib.integrations.accelerate import Accelerator
from shardlib.integrations.lightning import ShardlibStrategy
from shardlib.integrations.transformers import Sharding
from shardlib.jax import check_layouts, compile_model
from shardlib.jax import make_mesh as jax_mesh
from shardlib.testing import assert_equivalent, equivalent

RULES = {"up": "colwise", "down": "rowwise"}


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


def half_of_the_bucket(plan: sl.Plan) -> sl.Plan:
    return plan.replace(step=plan.step.replace(bucket_mb=12.5))


def transform_everywhere(batch: torch.Tensor) -> None:
    """Every function that takes transforms takes one, several composed, a list of them, and a function of a plan."""
    recipe = sl.zero(2) | sl.precision("bf16")
    for each in (sl.zero(2), recipe):
        sl.plan(Net(), "dp=2,tp=2", RULES, transforms=each)
        sl.shard_model(Net(), "dp=2,tp=2", RULES, transforms=each)
        functional.functional(Net(), "dp=2", RULES, transforms=each)
        equivalent(Net, lambda step: batch, "dp=2", RULES, transforms=each)
        assert_equivalent(Net, lambda step: batch, "dp=2", RULES, transforms=each)
        compile_model(Net(), jax_mesh("dp=2"), RULES, transforms=each)
        check_layouts(Net(), "dp=2", RULES, example=batch, transforms=each)
        Accelerator(mesh="dp=2", transforms=each)
        ShardlibStrategy("dp=2", transforms=each)
        Sharding(transforms=each)
    sl.plan(Net(), "dp=2,tp=2", RULES, transforms=sl.zero(2) | sl.accumulate(4) | sl.checkpoint_activations())
    sl.plan(Net(), "dp=2,tp=2", RULES, transforms=[sl.zero(2), half_of_the_bucket])
    sl.plan(Net(), "dp=2,tp=2", RULES, transforms=half_of_the_bucket)
    sl.shard_model(Net(), "dp=2,tp=2", RULES, transforms=[sl.fsdp(), sl.offload("state")])
    compile_model(Net(), jax_mesh("dp=2"), RULES, transforms=(sl.zero(3), half_of_the_bucket))
