"""The pool of ranks: what it carries, what it forgets, what it says of ranks that hang, die or raise."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.testing._pool import HangError, RankDied, RankError, Ranks
from shardlib.testing._pool import ranks as own_pool
from shardlib.testing._standing import Standing, explain
from tests import listening

# --- carrying ------------------------------------------------------------------------------------------------------


class Box:
    def __init__(self, content: Any) -> None:
        self.content = content


def test_ranks_meet_where_no_other_machine_listens(ranks: Ranks):
    ranks(2).run(dist.get_rank)
    assert listening.addresses(ranks.workers.port) == {"127.0.0.1"}


def _device_of_a_mesh_beside_an_accelerator() -> str:
    there = {"is_available": lambda: True, "current_accelerator": lambda: torch.device("cuda")}
    with mock.patch.multiple(torch.accelerator, **there):
        return sl.mesh("tp=2").device_type


def test_ranks_compute_on_the_cpu_whatever_the_machine_has(ranks):
    assert ranks(2).run(_device_of_a_mesh_beside_an_accelerator) == ["cpu", "cpu"]


def test_lambdas_closures_and_classes_of_this_file_travel(ranks: Ranks):
    factor = 3

    class Local(Box):
        pass

    found = ranks(2).run(lambda x, box: (x * factor + dist.get_rank(), box, Local(1)), 2, box=Box([5]))
    assert [value for value, _, _ in found] == [6, 7]
    assert all(isinstance(box, Box) and box.content == [5] for _, box, _ in found)
    assert all(type(local) is Local for _, _, local in found)


def test_what_cannot_be_sent_is_named(ranks: Ranks, tmp_path: Path):
    with open(tmp_path / "file", "w") as file:
        with pytest.raises(
            RankError, match=r'^len cannot be sent to the ranks: argument "x", a TextIOWrapper, cannot be'
        ):
            ranks(2).run(len, 1, x=file)
        with pytest.raises(RankError, match="argument 1, a TextIOWrapper, cannot be pickled"):
            ranks(2).run(len, 1, file)
        with pytest.raises(RankError, match="the function itself cannot be pickled"):
            ranks(2).run(lambda: file)
    with pytest.raises(TypeError, match=r"returned on rank \d, a generator, cannot be sent back"):
        ranks(2).run(lambda: (i for i in range(3)))


@pytest.mark.parametrize("size", [0, -1, True, "4", 2.0])
def test_a_size_that_is_none_is_refused(size: Any):
    with pytest.raises(RankError, match="give a positive integer"):
        own_pool(size)


def test_a_pool_serves_every_smaller_world(ranks: Ranks):
    first = ranks(4).run(os.getpid)
    assert len(set(first)) == 4
    assert ranks(2).run(os.getpid) == first[:2]
    assert ranks(3).run(dist.get_world_size) == [3] * 3
    assert ranks(4).run(os.getpid) == first


# --- clean state ---------------------------------------------------------------------------------------------------


def _leave_everything_behind(folder: str) -> None:
    torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    nn.modules.module.register_module_forward_hook(lambda *_: 1 / 0)
    nn.modules.module.register_module_forward_pre_hook(lambda *_: 1 / 0)
    nn.modules.module.register_module_full_backward_hook(lambda *_: 1 / 0)
    nn.modules.module.register_module_parameter_registration_hook(lambda *_: 1 / 0)
    register_optimizer_step_pre_hook(lambda *_: 1 / 0)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_float32_matmul_precision("medium")
    torch._C._set_dtensor_allow_implicit_replication(True)
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("PATH")
    os.chdir(folder)
    sys.path.insert(0, folder)
    warnings.simplefilter("error")
    logging.disable(logging.CRITICAL)


def _state() -> dict[str, Any]:
    linear = nn.Linear(2, 2)
    linear(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(linear.parameters()).step()
    return {
        "drawn": (torch.rand(1).item(), random.random(), np.random.rand()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "implicit replication": torch._C._get_dtensor_allow_implicit_replication(),
        "precision": torch.get_float32_matmul_precision(),
        # torch sets the one left out when its compiler is imported, as switching deterministic algorithms does
        "environment": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "filters": [repr(f) for f in warnings.filters],
        "logging": logging.root.manager.disable,
    }


def test_nothing_of_one_call_reaches_the_next(ranks: Ranks, tmp_path: Path):
    before = ranks(2).run(_state)
    ranks(2).run(_leave_everything_behind, str(tmp_path))
    after = ranks(2).run(_state)
    changed = {key: (before[0][key], after[0][key]) for key in before[0] if after[0][key] != before[0][key]}
    assert changed == {}
    assert before[0]["drawn"] == before[1]["drawn"]


def test_ranks_draw_alike_whichever_has_to_import_what_draws(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "draws.py").write_text("import torch\ntorch.rand(1)\ndef one():\n    return torch.rand(1).item()\n")
    monkeypatch.syspath_prepend(tmp_path)
    one = importlib.import_module("draws").one
    drawn = ranks(2).run(one) + ranks(4).run(one)
    assert drawn == [drawn[0]] * 6


def test_a_file_that_makes_a_mesh_when_ranks_import_it_is_named(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ranks that had imported it before would not take part: the mesh is refused before any rank waits for another."""
    mesh = 'import os\nimport shardlib as sl\nsl.mesh("dp=-1" if "RANK" in os.environ else "dp=1")\n'
    (tmp_path / "trains_at_once.py").write_text(f"{mesh}def one():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sl, "mesh", lambda shape: None)  # this process needs no group
    one = importlib.import_module("trains_at_once").one
    for size in (2, 4):
        with pytest.raises(MeshError) as caught:
            ranks(size).run(one)
        assert re.fullmatch(
            rf'Rank \d was importing ".*/trains_at_once.py", line 3, which asks for mesh "dp={size}" on cpu at its '
            "top level. A rank imports the files of the functions and classes that it is given, and each rank at "
            'another time. Put what makes a mesh and trains below `if __name__ == "__main__":`, or the model and its '
            "rules into a file of their own.",
            str(caught.value),
        )


def _chosen() -> str | None:
    return os.environ.get("CHOSEN_BY_A_TEST")


def test_ranks_have_the_environment_of_their_caller(ranks: Ranks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHOSEN_BY_A_TEST", "yes")
    assert ranks(2).run(_chosen) == ["yes", "yes"]
    monkeypatch.delenv("CHOSEN_BY_A_TEST")
    assert ranks(2).run(_chosen) == [None, None]


def _use_a_mesh(axis: str = "a") -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(axis, "b"))
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0), Replicate()])
    return (x @ x.redistribute(mesh, [Replicate(), Shard(1)])).full_tensor().sum(0).tolist()


def test_equal_meshes_of_several_calls_do_no_harm(ranks: Ranks):
    x = torch.arange(16.0).reshape(4, 4)
    whole = (x @ x).sum(0).tolist()
    assert [ranks(4).run(_use_a_mesh) for _ in range(3)] == [[whole] * 4] * 3


def _leave_groups(destroyed: bool) -> int:
    init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), async_op=True)
    if destroyed:
        dist.barrier()
        dist.destroy_process_group()
    return dist.is_initialized()


@pytest.mark.parametrize("destroyed", [False, True])
def test_groups_that_a_call_left_or_destroyed_do_no_harm(ranks: Ranks, destroyed: bool):
    assert ranks(2).run(_leave_groups, destroyed) == [not destroyed] * 2
    assert ranks(2).run(dist.get_world_size) == [2, 2]


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def test_groups_that_are_gone_leave_no_threads(ranks: Ranks):
    def fewest() -> list[int]:
        """Groups end beside the next calls."""
        ranks(4).run(_use_a_mesh)
        time.sleep(0.5)
        return ranks(4).run(_threads)

    before = fewest()
    for axis in "cdefg":  # DTensor's caches would keep each of these meshes, and a mesh keeps its groups
        ranks(4).run(_use_a_mesh, axis)
    _wait_for(lambda: all(now <= then for now, then in zip(fewest(), before, strict=True)))


# --- ranks that raise, hang or die ---------------------------------------------------------------------------------


class Projection(nn.Module):
    def __init__(self, late: int) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(6, 6), late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = DTensor.from_local(self.linear(x), self.mesh["tp"], [Partial()])
        if dist.get_rank() == self.late:
            time.sleep(60)
        return y.full_tensor()  # the line where ranks wait


class Net(nn.Module):
    def __init__(self, late: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), Projection(late))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def _forward() -> None:
    net = Net(late=3)
    net.blocks[0][1].mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net(torch.ones(4, 6))


def _backward() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def reduce(parameter: nn.Parameter) -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        else:
            time.sleep(60)

    model[0].weight.register_post_accumulate_grad_hook(reduce)
    model(torch.ones(2, 3)).sum().backward()


def _line(text: str) -> int:
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


_PATIENCE = 6.0  # long enough for ranks to come to where they hang, on a machine that is busy


@pytest.fixture(scope="module")
def own():
    with own_pool(4, timeout=_PATIENCE) as pool:
        yield pool


def _import_this() -> None:
    """A first call on new processes imports this file, which may take longer than a hang is given."""


@pytest.fixture
def warm(own: Ranks) -> Ranks:
    own.run(_import_this, timeout=100.0)
    return own


def _flattened() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh._flatten("both")
    if dist.get_rank() != 2:
        dist.broadcast(torch.ones(2, dtype=torch.int64), 0, group=flat.get_group())
    else:
        time.sleep(60)


def _hold_the_lock() -> None:
    import ctypes

    if dist.get_rank() == 1:
        ctypes.PyDLL(None).sleep(60)  # holds Python's lock: no thread of this process can say anything


Hung = Callable[[Callable[..., Any]], tuple[HangError, Ranks]]


@pytest.fixture(scope="module")
def hung() -> Iterator[Hung]:
    """Return what calls that hang raise, and the pool of each. They wait at the same time."""
    sizes: dict[Callable[..., Any], int] = {_forward: 4, _backward: 2, _flattened: 4, _hold_the_lock: 2}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(sizes)) as threads:
        pools = {fn: stack.enter_context(own_pool(size, timeout=_PATIENCE)) for fn, size in sizes.items()}
        for pool in pools.values():
            pool.run(_import_this, timeout=100.0)
        calls = {fn: threads.submit(pool.run, fn) for fn, pool in pools.items()}

        def of(fn: Callable[..., Any]) -> tuple[HangError, Ranks]:
            with pytest.raises(HangError) as caught:
                calls[fn].result()
            return caught.value, pools[fn]

        yield of


def test_a_hang_is_told_for_every_rank_and_the_pool_is_rebuilt(hung: Hung):
    error, pool = hung(_forward)
    by_rank = error.standing
    assert [(s.rank, s.state) for s in by_rank] == [(0, "done"), (1, "done"), (2, "waiting"), (3, "running")]
    waiting, late = by_rank[2:]
    assert (waiting.phase, waiting.module) == (late.phase, late.module) == ("forward", "blocks.0.1")
    assert (waiting.collective, waiting.axis, waiting.dtype, waiting.shape) == ("all_reduce", "tp", "float32", (4, 6))
    assert waiting.where == f"test_pool.py:{_line('the line where ranks wait')} in forward"
    assert (waiting.group, late.collective) == ((2, 3), "")
    text = str(error)
    assert text.startswith("ranks 2 and 3 did not answer within 6 s in _forward; new processes are started.\n")
    assert "rank 2 waits in all_reduce over tp: rank 3 has not entered it" in text
    assert "\nrank 3:\nStack (most recent call last):\n" in text and "time.sleep(60)" in text
    assert pool.run(dist.get_rank) == [0, 1, 2, 3]


def test_a_hang_in_backward_names_the_parameter(hung: Hung):
    first, second = hung(_backward)[0].standing
    assert (first.phase, first.module) == (second.phase, second.module) == ("backward", "0.weight")
    assert (first.collective, first.axis, first.shape, first.state) == ("all_reduce", "dp", (4, 3), "waiting")
    assert second.state == "running"


def test_the_axis_of_a_flattened_mesh_is_named(hung: Hung):
    stuck = [s for s in hung(_flattened)[0].standing if s.state == "waiting"]
    assert {(s.collective, s.axis, s.dtype) for s in stuck} == {("broadcast", "both", "int64")}


def _finish_early() -> None:
    if dist.get_rank() != 1:
        dist.barrier()
    else:
        time.sleep(1.0)  # until the other waits


def test_a_rank_that_finished_while_others_wait_is_found_at_once(warm: Ranks):
    with pytest.raises(HangError, match="rank 1 finished _finish_early while others waited") as caught:
        warm(2).run(_finish_early, timeout=3600.0)
    assert [s.state for s in caught.value.standing] == ["waiting", "done"]
    assert caught.value.standing[0].collective == "barrier"


def test_a_rank_that_cannot_answer_gives_its_stack(hung: Hung):
    standing = hung(_hold_the_lock)[0].standing
    assert [s.state for s in standing] == ["done", "silent"]
    assert "(most recent call first):" in standing[1].stack and "in _hold_the_lock" in standing[1].stack


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(1.0)  # until the others wait
        raise LookupError(f"only {rank}")
    dist.all_reduce(torch.ones(3))


def test_an_exception_keeps_its_type_and_tells_of_the_others(warm: Ranks):
    pids = warm.run(os.getpid)
    with pytest.raises(LookupError, match="only 2") as caught:
        warm.run(_raise_on, 2, timeout=3600.0)
    (note,) = caught.value.__notes__
    assert note.startswith("rank 2 raised in _raise_on:\nTraceback")
    assert "rank 2  raised LookupError: only 2" in note
    assert "ranks 0, 1, 3 wait in all_reduce over world: rank 2 raised LookupError" in note
    assert warm.run(os.getpid) == pids  # no process was lost


class Written(Exception):
    """Writes a file when its message is asked for, which is after the pool has noted when it was raised."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        self.path.touch()
        time.sleep(0.1)  # the other rank raises meanwhile
        return "the first"


def _raise_after_another(path: Path) -> None:
    if dist.get_rank() == 1:
        raise Written(path)
    while not path.exists():
        time.sleep(0.01)
    raise KeyError("the second")


def test_of_two_exceptions_the_first_is_raised(warm: Ranks, tmp_path: Path):
    with pytest.raises(Written):
        warm(2).run(_raise_after_another, tmp_path / "raised")


def _leave_and_raise(path: Path) -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        raise LookupError("the cause")
    try:
        dist.all_reduce(torch.ones(3))
    finally:
        path.touch()


def test_a_rank_that_lost_a_peer_is_not_the_cause_though_it_raised_first(warm: Ranks, tmp_path: Path):
    with pytest.raises(LookupError, match="the cause"):
        warm(2).run(_leave_and_raise, tmp_path / "lost")


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_an_exception_that_cannot_travel_is_told_as_text(warm: Ranks):
    def fail() -> None:
        raise Unpicklable(1, 2)

    with pytest.raises(RankError, match="Unpicklable: 1 and 2"):
        warm(2).run(fail)


def test_an_exception_on_all_ranks_is_told_once(warm: Ranks):
    def fail() -> None:
        raise KeyError("same")

    with pytest.raises(KeyError) as caught:
        warm.run(fail)
    assert "raised KeyError: 'same'" in caught.value.__notes__[0] or "All 4 ranks" in caught.value.__notes__[0]


def _kill(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def test_a_killed_rank_is_named_with_its_signal(warm: Ranks):
    with pytest.raises(RankDied, match=r"^rank 1 died in _kill: its process was ended by SIGKILL") as caught:
        warm.run(_kill, 1)
    states = {s.rank: s.state for s in caught.value.standing}
    assert states[1] == "died" and set(states) == {0, 1, 2, 3}
    assert warm.run(dist.get_rank) == [0, 1, 2, 3]


def _crash(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.barrier()


def test_a_rank_that_crashes_is_named_with_its_stack(warm: Ranks):
    with pytest.raises(RankDied, match=r"^rank 1 died in _crash: its process was ended by SIGABRT") as caught:
        warm(2).run(_crash, 1)
    assert re.search(r"^rank 1 when it died:\nFatal Python error: Aborted$", str(caught.value), re.MULTILINE)
    assert f'File "{__file__}", line' in str(caught.value) and "in _crash" in str(caught.value)


def test_a_rank_that_exits_is_named_with_its_code(warm: Ranks):
    with pytest.raises(RankDied, match="exit code 3"):
        warm(2).run(os._exit, 3)


def test_ranks_cannot_start_ranks(ranks: Ranks):
    def nested() -> None:
        own_pool(2).run(os.getpid)

    with pytest.raises(RankError, match="A rank asked for ranks of its own"):
        ranks(2).run(nested)


def test_who_waits_for_whom():
    def stands(rank: int, op: str, sequence: int, **more: Any) -> Standing:
        return Standing(rank, "waiting", collective=op, axis="tp", group=(0, 1, 2), sequence=sequence, **more)

    assert explain([stands(0, "all_reduce", 5), stands(1, "all_reduce", 5), stands(2, "all_gather", 4)]) == (
        "ranks 0, 1 wait in all_reduce over tp: rank 2 has not entered it, it waits in all_gather over tp"
    )
    shapes = [stands(r, "all_reduce", 5, dtype="float32", shape=(2 + (r == 1),)) for r in range(3)]
    assert explain(shapes) == "rank 1 entered all_reduce float32 [3] where rank 0 entered all_reduce float32 [2]"
    assert explain([Standing(0, "running"), Standing(1, "done")]) == ""


# --- no process outlives its parent --------------------------------------------------------------------------------

PARENT = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from shardlib.testing._pool import ranks, shared_pool

def stat(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        return ["Z"]

def end_the_server(pool):  # the ranks end too, and others are there for the next call
    pids = pool.run(os.getpid)
    os.kill(int(stat(pids[0])[1]), signal.SIGKILL)
    while any(stat(pid)[0] != "Z" for pid in pids):
        time.sleep(0.05)
    time.sleep(0.5)  # the pipes of a process close with its last thread
    print("ended", pool.run(dist.get_rank, timeout=100.0), flush=True)

def stay(path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600) if "wait" in sys.argv else None

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with SIGINT ignored
    pool = ranks(2) if "own" in sys.argv else shared_pool(2)
    end_the_server(pool) if "server" in sys.argv else None
    try:
        pool.run(lambda: (stay(sys.argv[1]), None)[1]) if "lambda" in sys.argv else pool.run(stay, sys.argv[1])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
    if "raise" in sys.argv:
        raise ValueError
    print("ran", flush=True)
"""


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name so short that Python's fork server has its socket in it."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Starts a parent of two ranks; what a failed test leaves running is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, temporary: str = "tmp") -> tuple[subprocess.Popen[str], Path]:
        script, pids = folder / "parent.py", folder / "pids"
        script.write_text(PARENT)
        pids.touch()
        environment = {
            **os.environ,
            "TMPDIR": str(folder / temporary),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # torch makes it when its compiler is imported
        }
        (folder / temporary).mkdir()
        command = [sys.executable, str(script), str(pids), *words]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe))
        return started[-1], pids

    yield start
    for process in started:
        process.kill()
        process.communicate()


_PATIENT = 300.0  # seconds that nothing here takes, however busy the machine is


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + _PATIENT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _both(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()]


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


@needs_proc
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.deep)])
def test_a_parent_that_is_ended(start: Callable[..., Any], folder: Path, sent: signal.Signals):
    """Once its fork server was ended before it; otherwise the temporary folder's name has no room for a socket's."""
    temporary = "tmp" if sent is signal.SIGTERM else "long" * 30
    process, pids = start("wait", *(["server"] if sent is signal.SIGTERM else []), temporary=temporary)
    _wait_for(lambda: len(_both(pids)) == 2)
    process.send_signal(sent)
    out, err = process.communicate(timeout=_PATIENT)
    _wait_for(lambda: not any(map(_alive, _both(pids))))
    assert process.returncode == -sent
    assert ("ended [0, 1]" in out) is (sent is signal.SIGTERM)
    assert ("interrupted" in out and "KeyboardInterrupt" in err) is (sent is signal.SIGINT)
    assert _left(folder / temporary) == []


@needs_proc
@pytest.mark.deep
@pytest.mark.parametrize("raises", ["", "raise"])
@pytest.mark.parametrize("temporary", ["tmp", "long" * 30])
@pytest.mark.parametrize("pool", ["", "own"])
def test_a_parent_that_ends(start: Callable[..., Any], folder: Path, pool: str, raises: str, temporary: str):
    """With room in the temporary folder's name for a socket's, and without."""
    words = [word for word in (pool, raises) if word]
    process, pids = start(*words, temporary=temporary)
    out, err = process.communicate(timeout=_PATIENT)
    assert (process.returncode, out) == ((1, "") if raises else (0, "ran\n")), err
    assert len(_both(pids)) == 2
    _wait_for(lambda: not any(map(_alive, _both(pids))))
    assert list((folder / temporary).iterdir()) == []


def _left(temporary: Path) -> list[Path]:
    """Files in a temporary folder, but for Python's own socket of a fork server that was killed."""
    return [f for f in temporary.rglob("*") if f.is_file() or not f.name.startswith(("pymp-", "listener-"))]


def test_two_pools_at_the_same_time_do_not_meet(ranks: Ranks, own: Ranks):
    def gathered(of: int) -> list[int]:
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(found, torch.tensor([10 * of + dist.get_rank()]))
        return [int(x) for x in found]

    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            answers = [threads.submit(pool(2).run, gathered, of, timeout=100.0) for of, pool in enumerate((ranks, own))]
            assert [a.result() for a in answers] == [[[0, 1]] * 2, [[10, 11]] * 2]


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, where a test before has used it
def test_a_fork_of_this_process_leaves_the_ranks_alone(own: Ranks):
    pids = own(2).run(os.getpid)
    child = os.fork()
    if child == 0:
        own.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert own(2).run(os.getpid) == pids


def test_no_file_has_a_name(own: Ranks):
    before = set(os.listdir(tempfile.gettempdir()))
    own.run(os.getpid)
    new = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in new if "shardlib" in name]
