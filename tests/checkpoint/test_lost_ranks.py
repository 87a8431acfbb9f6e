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

import shardlib as sl
from shardlib import MeshShape, Rules, checkpoint
from shardlib.checkpoint import _paths, _peers, _save
from shardlib.engine import _torch
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


_FAILURES: list[tuple[Any, str, BaseException, dict[str, Any]]] = [
    (_save, "write_tensors", MemoryError(), {}),
    (
        _save._Rounds,
        "_gathered",
        RuntimeError("CUDA error: out of memory"),
        {"weights": "huggingface", "shard_mb": 1e-5},
    ),
    (_save._Rounds, "_send_round", KeyboardInterrupt(), {"weights": "file"}),
    (_save, "optimizer_items", MemoryError(), {}),
    (_save, "write_tensors", KeyboardInterrupt(), {"background": True}),
]


def _any_failure(folder: Path, which: int, rank: int) -> str:
    place, name, failure, options = _FAILURES[which]
    torch.manual_seed(0)
    model = sl.shard_model(MLP(), "dp=2", {"**": None}, transforms=sl.fsdp(), compile=None)
    optimizer = torch.optim.SGD(model.parameters())
    others = (optimizer,) if options.get("weights") != "file" else ()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BaseException) as caught:
        if dist.get_rank() == rank:
            patch.setattr(place, name, functools.partial(_raise, failure))
        checkpoint.save(folder / "saved", model, *others, timeout=20, **options).wait()
    assert sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(".")) == []
    checkpoint.save(folder / "saved", model, *others, **options).wait()
    checkpoint.load(folder / "saved", model, *others, verify="all")
    assert _peers._made[0][1]._kept == {}  # what others sent is in no memory any more
    return f"{type(caught.value).__name__}: {caught.value}"


def _raise(error: BaseException, *args: Any, **kwargs: Any) -> None:
    raise error


@pytest.mark.parametrize(("which", "rank"), [(0, 1), (1, 0), (1, 1), (2, 1), (3, 1), (4, 0)])
def test_a_failure_of_any_kind_is_told_on_all_ranks_with_its_cause(ranks, tmp_path: Path, which: int, rank: int):
    said = ranks(2).run(_any_failure, tmp_path, which, rank)
    cause = _peers.described(_FAILURES[which][2])
    told = f'CheckpointError: Saving "{tmp_path}/saved" failed (on rank {rank}): {cause}'
    assert said[1 - rank] == told
    assert said[rank] == (told if isinstance(_FAILURES[which][2], Exception) else f"{cause}: ")


def _interrupted_between_messages(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BaseException) as caught:
        if dist.get_rank() == 1:
            patch.setattr(_peers._Job, "_receive_json", functools.partial(_raise, KeyboardInterrupt()))
        checkpoint.save(folder / "saved", nn.Linear(2, 2), timeout=20)
    checkpoint.save(folder / "saved", nn.Linear(2, 2))
    return str(caught.value)


def test_an_interrupt_between_two_messages_ends_the_waiting_of_other_ranks(ranks, tmp_path: Path):
    said, _ = ranks(2).run(_interrupted_between_messages, tmp_path)
    assert said.startswith(
        f'Saving "{tmp_path}/saved" failed: rank 1 has left, after it raised KeyboardInterrupt, while the ranks were in'
    )


# --- calls that not all ranks make ------------------------------------------------------------------------------------

_CALLS: dict[str, Any] = {
    "sl.save": lambda folder: checkpoint.save(folder / "saved", nn.Linear(2, 2), timeout=0.5),
    "sl.load": lambda folder: checkpoint.load(folder / "saved", nn.Linear(2, 2), timeout=0.5),
    "Checkpoints.save": lambda folder: checkpoint.Checkpoints(folder, timeout=0.5).save(3, nn.Linear(2, 2)),
    "Checkpoints.load": lambda folder: checkpoint.Checkpoints(folder, timeout=0.5).load(nn.Linear(2, 2)),
}


def _only_rank_0(folder: Path, call: str) -> str:
    """Rank 1 comes after rank 0 has given up: it need not wait."""
    while dist.get_rank() and not (folder / "gave up").exists():
        time.sleep(0.01)
    with pytest.raises(CheckpointError) as caught:
        _CALLS[call](folder)
    (folder / "gave up").touch()
    assert [entry.name for entry in folder.iterdir()] == ["gave up"]
    checkpoint.save(folder / "saved", nn.Linear(2, 2))
    return str(caught.value)


@pytest.mark.parametrize("call", list(_CALLS))
def test_a_call_that_not_all_ranks_make(ranks, tmp_path: Path, call: str):
    for said in ranks(2).run(_only_rank_0, tmp_path, call):
        assert said.endswith(
            f" failed: only rank 0 called {call}, and rank 1 did not come within 0.5 s: every rank has to call it. "
            "Write the call outside of `if rank == 0`."
        )


def _different_calls(folder: Path) -> str:
    model = sl.shard_model(nn.Linear(4, 4), "dp=2", {"**": None}, transforms=sl.fsdp())
    with pytest.raises(CheckpointError) as caught:
        if dist.get_rank() == 0:
            sl.full_state_dict(model)
        else:
            sl.save(folder / "saved", model)
    sl.save(folder / "saved", model)
    return str(caught.value).partition("failed: ")[2]


def test_ranks_that_make_different_calls_hear_it_at_once(ranks, tmp_path: Path):
    said = "ranks do different things:\n  rank 0: sl.full_state_dict\n  rank 1: sl.save"
    assert ranks(2).run(_different_calls, tmp_path) == [said] * 2


def _keys_of_saves(folder: Path) -> list[int]:
    found = []
    for _ in range(4):
        checkpoint.save(folder / "saved", nn.Linear(2, 2))
        dist.barrier()
        found.append(_torch.default_store().num_keys())
        dist.barrier()
    return found


def test_the_store_does_not_grow_with_the_number_of_saves(ranks, tmp_path: Path):
    for _, *counts in ranks(2).run(_keys_of_saves, tmp_path):
        assert len(set(counts)) == 1


def _only_rank_0_lives(folder: str) -> None:
    torch.manual_seed(0)
    model = sl.shard_model(nn.Linear(4, 4), "dp=2", {"**": None}, transforms=sl.fsdp())
    if dist.get_rank():
        return
    for call in (lambda: sl.save(f"{folder}/saved", model), lambda: sl.full_state_dict(model)):
        with pytest.raises(CheckpointError) as caught:
            call()
        with open(f"{folder}/told", "a") as told:
            told.write(f"{caught.value}\n")


def test_a_save_on_rank_0_alone_does_not_wait_for_ranks_that_have_ended(tmp_path: Path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    processes.run(2, meeting, _only_rank_0_lives, str(tmp_path), lost=1, seconds=60)
    end = ", and rank 1 ended: every rank has to call it. Write the call outside of `if rank == 0`."
    assert (tmp_path / "told").read_text().splitlines() == [
        f'Saving "{tmp_path}/saved" failed: only rank 0 called sl.save{end}',
        f"Gathering full tensors failed: only rank 0 called sl.full_state_dict{end}",
    ]
