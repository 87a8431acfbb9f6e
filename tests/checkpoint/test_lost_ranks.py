"""A rank that is killed or stands still while a checkpoint is saved: the others say so, and the job goes on after."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardlib import MeshShape, Rules, checkpoint
from shardlib.checkpoint import _paths, _save
from shardlib.errors import CheckpointError
from shardlib.testing import shared_pool
from shardlib.testing.models import MLP, batch_for
from shardlib.testing.strategies import Case, ModelFactory
from tests.checkpoint import processes, training

_RULES = Rules({"up": "colwise", "down": "rowwise"}, unmatched="replicate")
_MODEL = ModelFactory(MLP)


def _case(mesh: str) -> Case:
    return Case(_MODEL, batch_for(_MODEL()), MeshShape(mesh), _RULES)


# Where a rank is lost: what it calls there, and the phase that the others then name.
_PLACES = {
    "writing": (_save, "write_tensors", "write"),
    "replacing": (_paths, "commit", "put in place"),
    "finishing": (_save, "sync_folder", "write"),
}


def _lose(place: str, rank: int, how: signal.Signals) -> None:
    module, name, _ = _PLACES[place]
    if dist.get_rank() == rank:
        setattr(module, name, lambda *args, **kwargs: os.kill(os.getpid(), how) or time.sleep(60))


def _until_lost(
    mesh: str, folder: str, place: str, rank: int, how: signal.Signals, timeout: float, options: dict[str, Any]
) -> None:
    """Two steps and a checkpoint, one step more and a checkpoint that is not finished."""
    run = training.Run(_case(mesh)).train([0, 1])
    checkpoints = checkpoint.Checkpoints(folder, **options)
    checkpoints.save(2, run.model, run.optimizer, lr_scheduler=run.scheduler, timeout=timeout).wait()
    run.train([2])
    _lose(place, rank, how)
    begin = time.monotonic()
    try:
        checkpoints.save(3, run.model, run.optimizer, lr_scheduler=run.scheduler, timeout=timeout).wait()
    except CheckpointError as error:
        Path(folder, f"told-{dist.get_rank()}").write_text(f"{time.monotonic() - begin:.1f}\n{error}")


def _goes_on(mesh: str, folder: str) -> training.State:
    run = training.Run(_case(mesh), seed=5)
    checkpoints = checkpoint.Checkpoints(folder)
    checkpoints.load(run.model, run.optimizer, lr_scheduler=run.scheduler)
    assert checkpoints.latest() == Path(folder) / "step-000002"
    state = run.train([2, 3]).state()
    checkpoints.save(4, run.model, run.optimizer)
    assert checkpoints.steps() == [2, 4]
    return state


def _uninterrupted(mesh: str) -> training.State:
    return training.Run(_case(mesh)).train([0, 1, 2, 3]).state()


def _lose_a_rank(folder: Path, place: str, rank: int, how: signal.Signals, timeout: float, options: Any) -> None:
    """What the surviving ranks are told stands in files "told-<rank>" after it."""
    meeting = folder / "meeting"
    meeting.mkdir()
    arguments = ("dp=2,tp=2", str(folder), place, rank, how, timeout, options)
    processes.run(4, meeting, _until_lost, *arguments, lost=rank, seconds=60)
    for file in meeting.glob("raised-*"):
        raise AssertionError(file.read_text())


_deep = functools.partial(pytest.param, marks=pytest.mark.deep)
_LOST = [
    _deep("writing", 2, signal.SIGKILL, 30.0, {}),
    ("writing", 3, signal.SIGKILL, 30.0, {"weights": "huggingface", "shard_mb": 1e-4}),
    _deep("writing", 1, signal.SIGKILL, 30.0, {"background": True}),
    ("replacing", 0, signal.SIGKILL, 30.0, {}),
    ("finishing", 2, signal.SIGSTOP, 3.0, {}),
]


@pytest.mark.parametrize(("place", "rank", "how", "timeout", "options"), _LOST)
def test_others_name_the_rank_and_the_phase_in_time_and_a_restart_goes_on(
    tmp_path: Path, place: str, rank: int, how: signal.Signals, timeout: float, options: dict[str, Any]
):
    folder = str(tmp_path)
    _lose_a_rank(tmp_path, place, rank, how, timeout, options)
    told = {int(file.name[-1]): file.read_text() for file in tmp_path.glob("told-*")}
    assert sorted(told) == [each for each in range(4) if each != rank]
    for text in told.values():
        seconds, message = text.split("\n", 1)
        assert float(seconds) < timeout + 20  # two graces of 5 s, and a machine that is busy
        assert f"rank {rank} " in message and f'phase "{_PLACES[place][2]}"' in message
        assert "has ended" in message if how is signal.SIGKILL else f"within {timeout:g} s" in message
    want = shared_pool(4).run(_uninterrupted, "dp=2,tp=2")[0]
    same = shared_pool(4).run(_goes_on, "dp=2,tp=2", folder)[0]
    assert {name for name in want if not torch.equal(same[name], want[name])} == set()


@pytest.mark.parametrize("mesh", [_deep("dp=1,tp=1"), "dp=1,tp=2", _deep("dp=4,tp=1")])
def test_a_restart_on_another_mesh(tmp_path: Path, mesh: str):
    folder = str(tmp_path)
    _lose_a_rank(tmp_path, "writing", 2, signal.SIGKILL, 30.0, {})
    want = shared_pool(4).run(_uninterrupted, "dp=2,tp=2")[0]
    world = 1
    for part in mesh.split(","):
        world *= int(part.split("=")[1])
    assert training.differences(shared_pool(4)(world).run(_goes_on, mesh, folder)[0], want) == {}


def _one_rank_cannot_write(folder: str) -> str:
    model = nn.Linear(3, 2)
    checkpoint.save(f"{folder}/checkpoint", model)
    before = sorted(Path(folder, "checkpoint").iterdir())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        if dist.get_rank() == 1:  # a warm rank, which runs other tests afterwards
            patch.setattr(_save, "write_tensors", _full)
        checkpoint.save(f"{folder}/checkpoint", model)
    assert sorted(Path(folder, "checkpoint").iterdir()) == before
    checkpoint.load(f"{folder}/checkpoint", model, verify="all")
    return str(caught.value)


def _full(path: Path, entries: Any, advance: Any) -> Any:
    raise OSError(28, "No space left on device", str(path))


def test_an_error_of_one_rank_reaches_all(tmp_path: Path):
    told = shared_pool(3).run(_one_rank_cannot_write, str(tmp_path))
    where = tmp_path / ".checkpoint.writing" / "pieces-00001-000.safetensors"
    message = f"Saving \"{tmp_path / 'checkpoint'}\" failed (on rank 1): [Errno 28] No space left on device: '{where}'"
    assert told == [message] * 3


def _only_rank_0_saves(folder: Path) -> str:
    if dist.get_rank():
        while not (folder / "gave up").exists():
            time.sleep(0.01)
        return ""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(folder / "saved", nn.Linear(2, 2), timeout=0.5)
    (folder / "gave up").touch()
    assert not (folder / "saved").exists()
    return str(caught.value)


def test_a_first_checkpoint_that_not_all_ranks_come_to(ranks, tmp_path: Path):
    said, _ = ranks(2).run(_only_rank_0_saves, tmp_path)
    assert said.startswith(f'Saving "{tmp_path}/saved" failed: not all 2 ranks came to it within 0.5 s (')
