"""Ranks that torchrun starts again meet in a store that has what killed ones wrote, and go on from a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib._store import store_of_attempt
from shardlib.booster import launch_from_torch
from shardlib.errors import LaunchError
from tests.checkpoint import restarted
from tests.house.source import ROOT
from tests.torchvision_on_cpu import let_torchvision_in

LIMIT = timedelta(seconds=60)


def test_a_job_whose_rank_was_killed_goes_on_with_the_same_bits(ranks, tmp_path: Path):
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    ranks(2).run(restarted.main, str(tmp_path / "whole"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    again = ["--max-restarts=1", "--monitor-interval=0.1", restarted.__file__, str(tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*torchrun, *again], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    killed, whole = (torch.load(tmp_path / name / "end.pt") for name in ("killed", "whole"))
    assert (killed["begin"], whole["begin"]) == (2, 0)
    assert killed["weights"].keys() == whole["weights"].keys()
    assert all(torch.equal(killed["weights"][name], value) for name, value in whole["weights"].items())


def _attempt(port: int, ranks: int) -> list[str]:
    """The text that each rank of an attempt, which rank 0 writes, reads."""
    with ThreadPoolExecutor(ranks) as pool:
        asked = [pool.submit(store_of_attempt, "127.0.0.1", port, rank, ranks, LIMIT) for rank in range(ranks)]
        stores = [one.result() for one in asked]
    assert not stores[0].check(["ours"])
    stores[0].set("ours", f"of {ranks} ranks")
    return [store.get("ours").decode() for store in stores]


def test_attempts_are_apart_in_torchruns_store_whatever_others_left_there():
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asking = dist.PrefixStore("shardlib/attempts", agents)
    for rank in (1, 2):
        asking.set(f"asks/{rank}", f"a rank {rank} that was killed before it had an answer")
    for ranks in (3, 3, 2, 1):  # machines may leave between attempts
        assert _attempt(agents.port, ranks) == [f"of {ranks} ranks"] * ranks


def test_a_rank_that_does_not_come_is_named():
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(TimeoutError, match=r"rank 1 did not come within 0\.05 seconds"):
        store_of_attempt("127.0.0.1", agents.port, 0, 2, timedelta(seconds=0.05))


def test_an_address_of_an_earlier_attempt_is_explained(monkeypatch: pytest.MonkeyPatch):
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = kept.port
    del kept  # its node was lost
    for name, value in {"RUN_ID": "train", "USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(LaunchError, match=r"(?s)Rank 1 of 2 did not meet.*SHARE_RDZV_TCP_STORE=1 for torchrun on all"):
        sl.mesh("dp=2", device_type="cpu", timeout=0.1)


def _by_torch() -> None:
    dist.init_process_group("gloo")


def _by_our_mesh() -> None:
    sl.mesh("dp=2", device_type="cpu")


def _by_our_launch() -> None:
    launch_from_torch(backend="gloo", verbose=False)


def _by_our_accelerator() -> None:
    let_torchvision_in()  # accelerate imports it by the way
    from accelerate.state import AcceleratorState

    from shardlib.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process
    Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def _by_our_strategy() -> None:
    let_torchvision_in()
    from lightning.pytorch import Trainer

    from shardlib.integrations.lightning import ShardlibStrategy

    trainer = Trainer(accelerator="cpu", devices=2, strategy=ShardlibStrategy("dp=2"), logger=False, barebones=True)
    trainer.strategy.setup_environment()


def _warned(port: int, joins: Callable[[], None]) -> list[str]:
    """The warnings of `sl.mesh` on this rank, which has joined the job of a torchrun that restarts."""
    dist.destroy_process_group()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "torchrun"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2"}
    with mock.patch.dict(os.environ, variables), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # Lightning has some
        joins()
        warnings.simplefilter("always")
        sl.mesh("dp=2", device_type="cpu")
    return [str(each.message) for each in caught]


WARNING = (
    "torchrun may restart the ranks of this job, and they may not meet again: they have met by init_process_group, "
    "which keeps attempts in one store. Call shardlib.mesh(...) before, which joins the ranks; or set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun --standalone."
)


@pytest.mark.parametrize(
    ("joins", "warned"),
    [
        (_by_torch, [WARNING]),
        (_by_our_mesh, []),
        (_by_our_launch, []),
        (_by_our_accelerator, []),
        (_by_our_strategy, []),
    ],
)
def test_who_joins_in_a_way_that_cannot_be_restarted_is_warned(ranks, joins: Callable[[], None], warned: list[str]):
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks(2).run(_warned, agents.port, joins) == [warned, []]
