"""A rank that is killed in the middle of a schedule is named by all others, wherever they wait."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.errors import LostRankError
from shardlib.testing import shared_pool
from tests.checkpoint import processes

_SECONDS = 20.0  # in which survivors have to know; it takes them tenths of one, but four ranks share two cores


class Mortal(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 1e6).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, mortal: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Mortal if i == mortal else nn.Linear)(4, 4) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _train(folder: str, mortal: int) -> None:
    torch.manual_seed(0)
    rules = sl.Rules({"**": None}, stages="blocks.0 | blocks.1 | blocks.2 | blocks.3")
    model = sl.shard_model(Stack(mortal), "pp=4", rules)
    good = torch.ones(8, 4)
    bad = torch.cat([good[:4], torch.full((4, 4), 1e30)])
    try:
        for batch in (good, bad):
            sl.pipeline_step(model, batch, lambda y, x: y.mean(), microbatches=8)
    except LostRankError as error:
        told: dict[str, Any] = {"ranks": error.ranks, "phase": error.phase}
        Path(folder, f"told-{dist.get_rank()}").write_text(json.dumps(told))


@pytest.mark.parametrize("mortal", [pytest.param(0, marks=pytest.mark.deep), 2])
def test_a_killed_rank_is_named(tmp_path: Path, mortal: int):
    shared_pool(2).run(dist.get_rank)  # the processes below are forked from a server that has imported torch then
    processes.run(4, tmp_path, _train, str(tmp_path), mortal, lost=mortal, seconds=_SECONDS)
    told = {rank: json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(4) if rank != mortal}
    assert [each["ranks"] for each in told.values()] == [[mortal]] * 3
    assert {each["phase"] for each in told.values()} <= {"forward", "backward"}
