"""What an installed shardlib has to do, away from its repository; `make dist-test` starts it on two processes.

torchrun --nproc_per_node 2 tests/installed.py
"""

from __future__ import annotations

from importlib import metadata, resources
from pathlib import Path

import torch
from torch import nn

import shardlib as sl

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    here = Path(sl.__file__).resolve()
    assert REPOSITORY not in here.parents or ".venv-dist" in here.parts, f"{here} is not the installed package"
    assert metadata.version("shardlib") == sl.__version__
    assert resources.files("shardlib").joinpath("py.typed").is_file()
    assert "llama" in sl.layouts.available()
    assert "h100" in sl.Cluster.presets()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    rules = {"0": "colwise", "2": "rowwise"}
    assert sl.plan(model, "dp=2,tp=4", rules).memory().total > 0
    sharded = sl.shard_model(model, "tp=2", rules)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    before = sharded(torch.ones(2, 8)).square().mean()
    before.backward()
    optimizer.step()
    after = sharded(torch.ones(2, 8)).square().mean()
    assert after < before
    print(f"shardlib {sl.__version__} on torch {torch.__version__}: planned and trained from {here.parent}")


if __name__ == "__main__":
    main()
