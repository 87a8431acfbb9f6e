"""A rank that is killed while weights move: the others say which, at once, and the target refuses forward."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.checkpoint._peers import joined_peers
from shardlib.errors import CheckpointError, ShardingError
from shardlib.layout._boxes import full_box
from shardlib.weights import _reshard, _transfer, reshard, transfer
from shardlib.weights._feed import Feed
from shardlib.weights._views import Read
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


class _Eats:
    """A loader that reads all of every tensor, on ranks 1 and 2; rank 1 ends in the middle."""

    device, partly = torch.device("cpu"), ()

    def reads(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Read]:
        return {name: Read((full_box(tensor.shape),), tensor.dtype) for name, tensor in tensors.items()}

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for count, _ in enumerate(weights):
            if dist.get_rank() == 1 and count == 4:
                os._exit(0)


def _feed(folder: str) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))) if rank == 0 else None
    store = dist.FileStore(f"{folder}/store", 3)
    everyone = joined_peers("sending weights", store, rank, 3, 60.0)
    feed = Feed(
        everyone,
        trainers=1,
        model=model,
        convert=None if model is None else dict,
        loader=None if rank == 0 else _Eats(),
        group_bytes=2**18,
    )
    begun = time.monotonic()
    try:
        feed.send()
    except CheckpointError as error:
        Path(folder, f"said-{rank}").write_text(f"{time.monotonic() - begun:.1f} {error}")


def test_an_engine_that_is_killed_is_named_to_the_ranks_that_send(tmp_path: Path):
    processes.run(3, tmp_path, _feed, str(tmp_path), lost=1, seconds=60)
    for rank in (0, 2):
        said = Path(tmp_path, f"said-{rank}").read_text()
        assert float(said.split()[0]) < _SECONDS and "rank 1 has ended" in said and "Connect again" in said, said
