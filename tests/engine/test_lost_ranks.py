"""A rank that is killed, raises or stands still while a model trains: the others say which, and a restart goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib import MeshShape, checkpoint, testing
from shardlib.checkpoint import _save
from shardlib.engine import _torch
from shardlib.engine.data.executor.bucket import Bucket
from shardlib.engine.data.executor.reduce import AllReduceBucket
from shardlib.engine.ranks import agree, lost
from shardlib.errors import CheckpointError, LostRankError, MeshError
from shardlib.testing import shared_pool
from shardlib.testing.models import Transformer, batch_for, rules_for
from shardlib.testing.strategies import Case, ModelFactory
from tests.checkpoint import processes, training

_MODEL = ModelFactory(Transformer)
_SECONDS = 15.0  # in which survivors have to know; a look takes 20 ms, but four ranks share two cores with other tests
_CHOSEN = 8.0  # for a collective; ranks that are there are seconds behind where others share their cores


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The pool's first process is forked from a server that has imported torch; so are those of these tests then."""
    shared_pool(2).run(dist.get_rank)


def _case(mesh: str, stage: int) -> Case:
    model = _MODEL()
    return Case(_MODEL, batch_for(model), MeshShape(mesh), rules_for(model), (sl.zero(stage),) if stage else ())


# --- how ranks are lost ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Where a rank is lost, and how.

    Attributes:
        where: "meeting", before ranks exchange their processes in `shard_model`; "sharding", after that; "forward", at
            its beginning; "backward", in the middle of it; "exchange", when gradients move;
            "update", when it has updated its part and parts are not gathered yet; "save", while it writes.
        how: "kill", "stop", "sleep" or "raise".
        linger: survivors keep their processes until all of them know, as in a notebook.
        timeout: of the process groups, in seconds.
        keeps_store: the job's store is on the lost rank.
        outlived: rank 0 has the job's store, and ends before rank 1 notices anything; the others keep their processes
            until all of them know.
    """

    where: str
    rank: int = 1
    step: int = 1
    how: str = "kill"
    linger: bool = True
    timeout: float | None = None
    keeps_store: bool = False
    outlived: bool = False

    def strike(self, *_: Any) -> None:
        if self.how == "raise":
            raise ZeroDivisionError("a mistake")
        if self.how != "sleep":
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)
        time.sleep(60)

    def arm_sharding(self) -> None:
        """Let this process be lost when it next shards a model."""
        if self.where == "meeting":
            lost.meet = self.strike
        elif self.where == "sharding":
            agree.weights_agree = self.strike

    def arm(self, run: training.Run) -> None:
        """Let this process be lost when it next comes there."""
        if self.where == "forward":
            run.model.register_forward_pre_hook(self.strike, prepend=True)
        elif self.where == "backward":
            run.model.get_submodule("blocks.0").register_forward_hook(
                lambda _module, _args, output: output.register_hook(self.strike) and None
            )
        elif self.where == "exchange":
            Bucket.reduce = AllReduceBucket.wait = self.strike
        elif self.where == "update":
            run.optimizer.register_step_pre_hook(self.strike)
        else:
            _save.write_tensors = self.strike


def _train(case: Case, fault: Fault, folder: str, end: int, saving: bool) -> None:
    """Steps, each with a checkpoint if asked for, until a rank is lost; who is told writes it down."""
    sl.mesh(str(case.mesh), timeout=fault.timeout)
    if fault.keeps_store:
        _keep_store_on(fault.rank)
    if fault.outlived:
        _keep_store_on(0)
    begin = time.monotonic()
    try:
        if dist.get_rank() == fault.rank:
            fault.arm_sharding()
        run, checkpoints = training.Run(case), checkpoint.Checkpoints(folder)
        for step in range(end):
            if step == fault.step and dist.get_rank() == fault.rank:
                fault.arm(run)
            if step == fault.step and fault.outlived:
                _end_soon_or_late(fault)
            begin = time.monotonic()
            run.train([step])
            if saving:
                checkpoints.save(step + 1, run.model, run.optimizer, lr_scheduler=run.scheduler, timeout=10).wait()
    except (LostRankError, CheckpointError) as error:
        told = {"seconds": time.monotonic() - begin, "message": str(error), **vars(error)}
        _write(Path(folder), told)
        if fault.linger or (fault.outlived and dist.get_rank() != 0):
            _wait_for_others(Path(folder), case.mesh.world_size - 1)


def _end_soon_or_late(fault: Fault) -> None:
    """Rank 0 does not wait for others before it ends, and rank 1 does not go on before both others have ended."""
    if dist.get_rank() == 0:
        lost._ANSWER_TIMEOUT = 0.1
    if dist.get_rank() == 1:
        for rank in (0, fault.rank):
            assert _becomes(lost._members()[rank], "ended", within=60)


def _keep_store_on(rank: int) -> None:
    """The job's store goes with a rank, as it does with rank 0 where nothing like torchrun keeps it."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == rank else None
    port = [kept.port if kept is not None else 0]
    dist.broadcast_object_list(port, src=rank)
    store = kept or dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
    lost._torch.default_store = lambda: store  # type: ignore[attr-defined]


def _write(folder: Path, told: dict[str, Any]) -> None:
    hidden = folder / f".told-{dist.get_rank()}"
    hidden.write_text(json.dumps(told))
    hidden.rename(folder / f"told-{dist.get_rank()}")


def _wait_for_others(folder: Path, survivors: int) -> None:
    until = time.monotonic() + 30
    while len(list(folder.glob("told-*"))) < survivors and time.monotonic() < until:
        time.sleep(0.05)


def _lose(folder: Path, case: Case, fault: Fault, *, end: int = 3, saving: bool = False) -> dict[int, dict[str, Any]]:
    """What each survivor was told."""
    meeting = folder / "meeting"
    meeting.mkdir()
    size = case.mesh.world_size
    processes.run(size, meeting, _train, case, fault, str(folder), end, saving, lost=fault.rank, seconds=60)
    raised = {int(file.name[-1]): file.read_text() for file in meeting.glob("raised-*")}
    if fault.how == "raise":
        assert raised.pop(fault.rank).endswith("ZeroDivisionError: a mistake\n")
    assert not raised, "\n".join(raised.values())
    told = {int(file.name[-1]): json.loads(file.read_text()) for file in folder.glob("told-*")}
    assert sorted(told) == [rank for rank in range(size) if rank != fault.rank]
    return told


# --- what survivors are told ----------------------------------------------------------------------------------------

_deep = functools.partial(pytest.param, marks=pytest.mark.deep)
_KILLED = [
    ("dp=2,tp=1", 0, Fault("forward"), "backward"),  # the first time that ranks meet in a step
    _deep("dp=2,tp=1", 0, Fault("exchange", rank=0), "backward"),
    ("dp=2,tp=1", 1, Fault("exchange"), "backward"),
    ("dp=2,tp=1", 1, Fault("update"), "step"),
    _deep("dp=2,tp=1", 3, Fault("forward"), "forward"),
    ("dp=2,tp=1", 3, Fault("backward"), "backward"),
    ("dp=2,tp=1", 3, Fault("update", rank=0), "forward"),  # nothing is gathered after a step
    ("dp=1,tp=2", 0, Fault("forward"), "forward"),
    _deep("dp=1,tp=2", 0, Fault("backward"), "backward"),
    _deep("dp=1,tp=2", 0, Fault("update", rank=0), "forward"),
]


@pytest.mark.parametrize(("mesh", "stage", "fault", "phase"), _KILLED)
def test_a_killed_rank_is_named_with_the_phase(tmp_path: Path, mesh: str, stage: int, fault: Fault, phase: str):
    (told,) = _lose(tmp_path, _case(mesh, stage), fault).values()
    assert told["seconds"] < _SECONDS
    assert (told["ranks"], told["phase"]) == ([fault.rank], phase)
    assert f"Rank {fault.rank} (process " in told["message"] and "has ended" in told["message"]
    assert f'phase "{phase}"' in told["message"]


@pytest.mark.parametrize("linger", [pytest.param(True, marks=pytest.mark.deep), False])
def test_ranks_that_wait_for_a_survivor_name_the_first_that_was_lost(tmp_path: Path, linger: bool):
    """Rank 2 meets rank 3 in forward, rank 0 meets rank 2 in backward alone."""
    told = _lose(tmp_path, _case("dp=2,tp=2", 0), Fault("forward", rank=3, linger=linger))
    assert {rank: each["ranks"] for rank, each in told.items()} == {0: [3], 1: [3], 2: [3]}
    assert max(each["seconds"] for each in told.values()) < _SECONDS


@pytest.mark.deep
def test_a_killed_rank_that_keeps_the_store_is_named_too(tmp_path: Path):
    fault = Fault("forward", rank=0, timeout=_CHOSEN, keeps_store=True)
    told = _lose(tmp_path, _case("dp=2,tp=2", 0), fault)
    assert [each["ranks"] for each in told.values()] == [[0]] * 3
    assert max(each["seconds"] for each in told.values()) < _CHOSEN + _SECONDS


@pytest.mark.parametrize(("where", "keeps_store"), [("meeting", False), ("sharding", False), ("sharding", True)])
def test_a_rank_that_is_lost_while_a_model_is_sharded_is_named(tmp_path: Path, where: str, keeps_store: bool):
    fault = Fault(where, rank=0 if keeps_store else 2, keeps_store=keeps_store)
    told = _lose(tmp_path, _case("dp=3,tp=1", 0), fault)
    assert {(*each["ranks"], each["phase"]) for each in told.values()} == {(fault.rank, "sharding")}
    assert max(each["seconds"] for each in told.values()) < _SECONDS + lost._ANSWER_TIMEOUT


def test_a_rank_that_raises_while_a_model_is_sharded_is_named_with_what_it_raised(tmp_path: Path):
    (told,) = _lose(tmp_path, _case("dp=2,tp=1", 1), Fault("sharding", how="raise")).values()
    assert (told["ranks"], told["phase"]) == ([1], "sharding")
    assert "has ended, after it raised ZeroDivisionError: a mistake." in told["message"]


def test_rank_0_that_ends_because_of_another_is_not_taken_for_the_cause(tmp_path: Path):
    """Rank 0 meets rank 2 in forward, and rank 1 alone meets rank 0 later, in backward."""
    told = _lose(tmp_path, _case("tp=2,dp=2", 0), Fault("forward", rank=2, linger=False, outlived=True))
    assert {rank: each["ranks"] for rank, each in told.items()} == {0: [2], 1: [2], 3: [2]}
    assert "has ended. Rank 0 has ended too, and the job's store with it. Rank 1 was in" in told[1]["message"]


def _staying() -> bool:
    """Whether rank 1 knew the finding when rank 0 went on, which began to wait long before."""
    lost._ANSWER_TIMEOUT = 100.0
    if dist.get_rank():
        time.sleep(0.5)
    store = lost._StoreClient()
    lost._stay_for([0, 1], store)
    return len(store.said("knows", [0, 1])) == 2 or dist.get_rank() > 0


def test_rank_0_stays_until_the_others_know_which_rank_is_lost():
    assert shared_pool(2).run(_staying) == [True, True]


def _findings_of_meetings() -> list[Any]:
    found = []
    for _ in range(2):
        lost.meet(dist.group.WORLD)
        found.append(lost._store_client().get("first"))
        dist.barrier()
        lost._store_client().claim("first", [[1], "ended"])
    return found


def test_a_finding_is_not_that_of_a_later_job_in_the_same_store():
    assert shared_pool(2).run(_findings_of_meetings) == [[None, None]] * 2


def test_a_rank_that_raised_is_named_with_what_it_raised(tmp_path: Path):
    (told,) = _lose(tmp_path, _case("dp=2,tp=1", 2), Fault("forward", how="raise")).values()
    assert told["ranks"] == [1] and told["seconds"] < _SECONDS
    assert "has ended, after it raised ZeroDivisionError: a mistake." in told["message"]


def _forward_after_one_that_raised(model: nn.Module, where: tuple[int | None, ...]) -> str:
    """Raise in front of a block, catch it, and call the model again; `where` has one block for each rank."""
    block, x = where[dist.get_rank()], torch.ones(2, 4)
    raising = model[block].register_forward_pre_hook(lambda *_: 1 // 0) if block is not None else None  # type: ignore[index]
    try:
        with contextlib.suppress(ZeroDivisionError):
            model(x)
        if raising is not None:
            raising.remove()
        return str(model(x).shape)
    except LostRankError as error:
        return str(error)


def _forwards_that_raise(*cases: tuple[int | None, ...]) -> list[str]:
    lost._AGREEMENT_TIMEOUT = 1.0
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model = sl.shard_model(blocks, sl.mesh("dp=2", timeout=_CHOSEN), {"**": None}, transforms=[sl.zero(3)])
    return [_forward_after_one_that_raised(model, where) for where in cases]


@pytest.mark.parametrize("other", [None, 2])
def test_a_rank_that_catches_what_its_forward_raised_goes_on_only_with_the_others(other: int | None):
    with testing.ranks(2) as pool:
        first, second = pool.run(_forwards_that_raise, (1, 1), (other, 0))
    assert first[0] == second[0] == "torch.Size([2, 4])"  # all raised at the same place
    assert second[1].startswith("Rank 1 raised ZeroDivisionError: ")
    assert "script went on. Ranks 0 take part in collectives" in second[1]
    assert ("raised ZeroDivisionError" in first[1] and "while others waited for it" in first[1]) or other is not None


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        (0, Fault("forward", rank=0, how="stop", timeout=_CHOSEN, keeps_store=True)),
        _deep(1, Fault("forward", rank=2, how="stop", timeout=_CHOSEN)),
    ],
)
def test_a_rank_that_stands_still_is_named_when_the_chosen_time_is_over(tmp_path: Path, stage: int, fault: Fault):
    told = _lose(tmp_path, _case("dp=2,tp=2", stage), fault)
    for each in told.values():
        assert each["ranks"] == [fault.rank] and _CHOSEN <= each["seconds"] < _CHOSEN + _SECONDS
        assert "did not answer in time: its process is stopped." in each["message"]


def test_a_rank_that_does_something_else_is_named_when_the_chosen_time_is_over(tmp_path: Path):
    (told,) = _lose(tmp_path, _case("dp=2,tp=1", 3), Fault("forward", how="sleep", timeout=_CHOSEN)).values()
    assert told["ranks"] == [1] and _CHOSEN <= told["seconds"] < _CHOSEN + _SECONDS
    assert "did not answer in time, nor within 5 s after that." in told["message"]


# --- going on -------------------------------------------------------------------------------------------------------

_END = 4
_RESUMED = [
    _deep(1, Fault("forward", step=2)),
    _deep(3, Fault("backward", step=1, rank=0)),
    (2, Fault("exchange", step=3)),
    _deep(1, Fault("update", step=1)),
    (3, Fault("save", step=2)),
]


def _goes_on(case: Case, folder: str, done: int) -> training.State:
    run = training.Run(case, seed=5 if done else 0)  # weights that loading has to replace
    if done:
        checkpoint.Checkpoints(folder).load(run.model, run.optimizer, lr_scheduler=run.scheduler)
    return run.train(range(done, _END)).state()


def _uninterrupted(case: Case) -> training.State:
    return training.Run(case).train(range(_END)).state()


def _check_that_a_restart_arrives(folder: Path, stage: int, fault: Fault) -> None:
    case = _case("dp=2,tp=1", stage)
    _lose(folder, case, fault, end=_END, saving=True)
    done = max(checkpoint.Checkpoints(folder).steps(), default=0)
    assert done == fault.step
    want = shared_pool(2).run(_uninterrupted, case)[0]
    same = shared_pool(2).run(_goes_on, case, str(folder), done)[0]
    assert {name for name in want if not want[name].equal(same[name])} == set()
    other = dataclasses.replace(case, mesh=MeshShape("dp=1,tp=2"))
    elsewhere = shared_pool(2).run(_goes_on, other, str(folder), done)[0]
    assert training.differences(elsewhere, want) == {}


@pytest.mark.parametrize(("stage", "fault"), _RESUMED)
def test_a_restart_goes_on_from_the_last_whole_checkpoint(tmp_path: Path, stage: int, fault: Fault):
    _check_that_a_restart_arrives(tmp_path, stage, fault)


_FAULTS = st.builds(
    Fault,
    where=st.sampled_from(["forward", "backward", "exchange", "update", "save"]),
    rank=st.sampled_from([0, 1]),
    step=st.integers(0, _END - 1),
    linger=st.booleans(),
)


@pytest.mark.deep
@settings(max_examples=40)
@given(stage=st.integers(0, 3), fault=_FAULTS)
def test_a_restart_goes_on_wherever_a_rank_was_lost(tmp_path_factory: Any, stage: int, fault: Fault):
    _check_that_a_restart_arrives(tmp_path_factory.mktemp("run"), stage, fault)


# --- the parts ------------------------------------------------------------------------------------------------------


class _Broken(nn.Module):
    """Its forward raises, on all ranks alike."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.weight, self.error = nn.Parameter(torch.zeros(2)), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


def _raised(error: Exception) -> tuple[bool, str]:
    model = sl.shard_model(_Broken(error), "dp=2", {"**": None})
    try:
        model(torch.zeros(2))
    except Exception as caught:
        return caught is error, traceback.extract_tb(caught.__traceback__)[-1].name
    return False, ""


@pytest.mark.parametrize("error", [ValueError("timed out"), RuntimeError("gloo: 8 vs 4"), KeyError("gloo timed out")])
def test_what_is_not_about_a_lost_rank_passes_as_it_is(error: Exception):
    assert shared_pool(2).run(_raised, error) == [(True, "forward")] * 2


_OF_OTHERS = [
    RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31747"),
    RuntimeError("[/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv"),
    RuntimeError("Application timeout caused pair closure"),
    dist.DistNetworkError("Connection reset by peer"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
]
_OF_THE_PROGRAM = [
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4"),
    RuntimeError("the tokenizer timed out"),
    dist.DistBackendError("NCCL error: invalid usage"),
    TimeoutError("gloo timed out"),
]


@pytest.mark.parametrize("error", [*_OF_OTHERS, *_OF_THE_PROGRAM])
def test_which_errors_are_about_other_ranks(error: Exception):
    assert lost._is_about_a_peer(error) == (error in _OF_OTHERS)


def _timeouts(chosen: float | timedelta) -> set[float]:
    mesh = sl.mesh("dp=2,fsdp=2,tp=1", timeout=chosen)
    sl.shard_model(nn.Linear(4, 4), str(MeshShape.of(mesh)), {"**": None}, transforms=[sl.zero(1, axis="dp")])
    limits = [_torch.timeout_of(group) for group in _torch.process_groups()]
    return {limit.total_seconds() for limit in limits if limit is not None}


@pytest.mark.parametrize("chosen", [7.5, timedelta(seconds=7.5)])
def test_all_groups_of_a_mesh_wait_as_long_as_was_chosen(chosen: float | timedelta):
    assert shared_pool(4).run(_timeouts, chosen) == [{7.5}] * 4


@pytest.mark.parametrize("given", [0, -1.5, timedelta(0)])
def test_a_timeout_is_positive(given: Any):
    with pytest.raises(MeshError, match=r"timeout=.* was given; give a positive number of seconds, or a timedelta\."):
        sl.mesh("dp=1", timeout=given)


def test_conditions_of_processes():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        started = lost._status(process.pid)[1]
        member = lost._Member(lost._machine(), "here", process.pid, started)
        assert member.condition() == "there"
        assert dataclasses.replace(member, started="0").condition() == "ended"  # the id is another process's now
        process.send_signal(signal.SIGSTOP)
        assert _becomes(member, "stopped")
        process.kill()
        assert _becomes(member, "ended")  # a zombie: nobody has waited for it
    finally:
        process.kill()
        process.wait()
    assert member.condition() == "ended"


def _becomes(member: Any, condition: str, within: float = 10) -> bool:
    until = time.monotonic() + within
    while member.condition() != condition and time.monotonic() < until:
        time.sleep(0.01)
    return member.condition() == condition
