"""A rank that is killed while weights move: the others say which, at once, and the target refuses forward."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.errors import CheckpointError, ShardingError
from shardlib.weights import _reshard, _transfer, reshard, transfer
from tests.checkpoint import processes
from tests.weights.cases import RULES, made

_SECONDS = 15.0  # in which survivors have to know; three ranks share two cores with other tests


def _dies_at(module: Any, name: str, call: int) -> None:
    """Let rank 1 end at a call of a function."""
    original, calls = getattr(module, name), list[int]()

    def counted(*args: Any) -> Any:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == call:
            os._exit(0)
        return original(*args)

    setattr(module, name, counted)


def _survive(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    source, target = made(0, width=256), made(1, width=256)
    sl.shard_model(source, "tp=3", RULES)
    sl.shard_model(target, "dp=3", RULES)
    _dies_at(*((_transfer, "local_of", 12) if kind == "transfer" else (_reshard, "_free", 3)))
    begun = time.monotonic()
    said = ""
    try:
        if kind == "transfer":
            transfer(source, target, bucket_mb=0.05)
        else:
            reshard(target, "tp=3", bucket_mb=0.05)
    except CheckpointError as error:
        said = f"{time.monotonic() - begun:.1f} {error}"
    try:
        target(torch.arange(4))
    except ShardingError as error:
        said += f"\n{error}"
    Path(folder, f"said-{dist.get_rank()}").write_text(said)


def _check(kind: str, folder: Path) -> None:
    processes.run(3, folder, _survive, kind, str(folder), lost=1, seconds=60)
    for rank in (0, 2):
        said = Path(folder, f"said-{rank}").read_text()
        assert float(said.split()[0]) < _SECONDS and "rank 1 has ended" in said, said
        assert "has a part of the weights" in said, said


def test_a_transfer_names_a_rank_that_is_killed(tmp_path: Path):
    _check("transfer", tmp_path)


def test_a_change_of_mesh_names_a_rank_that_is_killed(tmp_path: Path):
    _check("reshard", tmp_path)
