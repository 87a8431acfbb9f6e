"""Launching: real ranks meet by every way there is; wrong numbers are refused before any socket."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib._store import listening_store
from shardlib.booster import Launched, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from shardlib.errors import LaunchError
from tests import listening

VARIABLES = {
    "launch_from_torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "launch_from_slurm": ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"),
    "launch_from_openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


@pytest.fixture
def port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher's variables."""
    for names in VARIABLES.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


def _by_numbers(rank: int, size: int, host: str, port: int) -> Launched:
    return launch(rank, size, host, port, seed=7, config={"mine": 3})


def _by_torchrun(rank: int, size: int, host: str, port: int) -> Launched:
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_RANK=f"{rank}", MASTER_ADDR=host)
    os.environ["MASTER_PORT"] = f"{port}"
    return launch_from_torch(seed=7, config={"mine": 3})


def _by_slurm(rank: int, size: int, host: str, port: int) -> Launched:
    os.environ.update(SLURM_PROCID=f"{rank}", SLURM_NPROCS=f"{size}", SLURM_LOCALID=f"{rank}")
    return launch_from_slurm(host, port, seed=7, config={"mine": 3})


def _by_openmpi(rank: int, size: int, host: str, port: int) -> Launched:
    for name, value in zip(VARIABLES["launch_from_openmpi"], (rank, size, rank), strict=True):
        os.environ[name] = str(value)
    return launch_from_openmpi(host, port, seed=7, config={"mine": 3})


def _alone() -> tuple[int, int]:
    """Which rank this is; the group by which it came to be one is left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return rank, size


def _joined(way: Callable[..., Launched], host: str, port: int) -> Any:
    """What a rank got, the numbers it draws, and the sum of all ranks' numbers."""
    rank, size = _alone()
    job = way(rank, size, host, port)
    total = torch.tensor(job.rank + 1)
    dist.all_reduce(total)
    drawn = random.random(), float(np.random.rand()), torch.rand(1).item()
    return job, drawn, total.item(), dist.get_backend()


@pytest.mark.parametrize(
    ("way", "host", "local"),
    [
        (_by_numbers, "127.0.0.1", False),
        (_by_numbers, "::1", False),
        (_by_torchrun, "[::1]", True),
        (_by_slurm, "localhost", True),
        (_by_openmpi, "127.0.0.1", True),
    ],
)
def test_ranks_meet_and_draw_alike(ranks, port: int, way: Callable[..., Launched], host: str, local: bool):
    random.seed(7)
    np.random.seed(7)
    expected = (
        random.random(),
        float(np.random.rand()),
        torch.rand(1, generator=torch.Generator().manual_seed(7)).item(),
    )
    every = ranks(2).run(_joined, way, host, port)
    for rank, (job, drawn, total, backend) in enumerate(every):
        assert (job.rank, job.world_size, job.local_rank) == (rank, 2, rank if local else None)
        assert (job.host, job.port, job.seed, job.device) == (host.strip("[]"), port, 7, torch.device("cpu"))
        assert (job.config.mine, total, backend, drawn) == (3, 3, "gloo", expected)


def _by_mesh(rank: int, size: int, host: str, port: int) -> None:
    given = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": host, "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in given.items()}):
        sl.mesh(f"dp={size}")


def _listening(host: str, port: int, way: Callable[..., Any]) -> set[str]:
    rank, size = _alone()
    way(rank, size, host, port)
    dist.barrier()
    found = listening.addresses(port)
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("host", "way"),
    [("127.0.0.1", _by_numbers), ("::1", _by_numbers), ("localhost", _by_numbers), ("127.0.0.1", _by_mesh)],
)
def test_a_job_of_this_machine_listens_for_no_other_machine(ranks, port: int, host: str, way: Callable[..., Any]):
    for found in ranks(2).run(_listening, host, port, way):
        assert len(found) == 1 and found <= {"127.0.0.1", "::1"}


def test_a_job_of_several_machines_listens_for_them(monkeypatch, port: int):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("192.0.2.1", port))])
    store = listening_store("127.0.0.1", port, wait_for_workers=False)
    assert store.port == port and not listening.addresses(port) & {"127.0.0.1", "::1"}


def _twice(port: int) -> list[Any]:
    rank, size = _alone()
    first = launch(rank, size, "localhost", port, local_rank=rank, config={"mine": 1})
    dist.barrier()  # whoever left before the other has connected would close the door on it
    state = torch.get_rng_state()
    same = launch(rank, size, "localhost", port, backend="gloo")
    drawn_again = torch.equal(state, torch.get_rng_state())
    other = launch(rank, size, "localhost", port, config={"mine": 2})
    later = launch(rank, size, "localhost", port)
    problems = []
    for changed in ({"port": port - 1}, {"seed": 1}, {"world_size": 3}, {"local_rank": 1 - rank}, {"host": "::1"}):
        numbers: dict[str, Any] = {"rank": rank, "world_size": size, "host": "localhost", "port": port} | changed
        with pytest.raises(LaunchError) as caught:
            launch(**numbers)
        problems.append(str(caught.value))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elsewhere = launch(0, 1, "localhost", port, seed=3)  # the group that was left is forgotten
    return [first == same == other == later, drawn_again, later.config.mine, problems, elsewhere.seed]


def test_a_second_launch_is_harmless_with_the_same_numbers_and_refused_with_others(ranks, port: int):
    for rank, (same, untouched, mine, problems, seed) in enumerate(ranks(2).run(_twice, port)):
        assert (same, untouched, mine, seed) == (True, True, 2, 3)
        told = [
            (f"port={port}", f"port={port - 1}"),
            ("seed=1024", "seed=1"),
            ("world_size=2", "world_size=3"),
            (f"local_rank={rank}", f"local_rank={1 - rank}"),
            ("host=localhost", "host=::1"),
        ]
        assert problems == [
            f"This process has joined a job with {before}, and was asked to join one with {asked}. Launch once, or "
            "call torch.distributed.destroy_process_group() before."
            for before, asked in told
        ]


def _met_already(port: int) -> Any:
    """A process group that others made: checked against the numbers, seeded, and remembered."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    with pytest.raises(LaunchError) as caught:
        launch((rank + 1) % size, size, "localhost", port)
    launch(rank, size, "localhost", port, seed=5)
    return str(caught.value), torch.rand(1).item(), launch(rank, size, "localhost", port, seed=5).seed


def test_ranks_that_have_met_in_another_way_are_checked_and_seeded(ranks, port: int):
    drawn = torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    for rank, (problem, number, seed) in enumerate(ranks(2).run(_met_already, port)):
        assert problem.startswith(
            f"This process has joined a job with rank={rank}, and was asked to join one with rank="
        )
        assert (number, seed) == (drawn, 5)


def test_ranks_that_do_not_come_are_waited_for_as_long_as_was_said(port: int):
    for rank in (0, 1):
        with pytest.raises(LaunchError) as caught:
            launch(rank, 2, "127.0.0.1", port, timeout=0.5)
        told = str(caught.value)
        assert told.startswith(f"Rank {rank} of 2 did not meet the others at 127.0.0.1:{port}: ")
        assert told.endswith("Do all ranks name the same host, port and world_size? Is the port free there?")
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_an_error_of_ours(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))
        for joins in (lambda: launch(0, 1, "127.0.0.1", port), lambda: sl.mesh("dp=1")):
            with pytest.raises(LaunchError, match=r"Rank 0 of 1 did not meet(.|\n)*Is the port free there\?"):
                joins()
    assert not dist.is_initialized()


NUMBERS: dict[str, Any] = {"rank": 0, "world_size": 1, "host": "localhost", "port": 29500}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank": 4, "world_size": 4}, "rank=4 was given; ranks of a job of 4 are 0 to 3."),
        ({"rank": -1}, "rank=-1 was given; ranks of a job of 1 are 0 to 0."),
        ({"world_size": 0}, "world_size=0 was given; a job has one rank or more."),
        ({"port": 65536}, "port=65536 was given; ports are 1 to 65535, and all ranks need the same one."),
        ({"port": 0}, "port=0 was given; ports are 1 to 65535, and all ranks need the same one."),
        ({"port": "29500"}, "port='29500' was given, of type str; give an integer."),
        ({"rank": True}, "rank=True was given, of type bool; give an integer."),
        ({"seed": -1}, "seed=-1 was given; seeds are 0 to 4294967295."),
        (
            {"local_rank": 2, "world_size": 2},
            "local_rank=2 was given; ranks of a job of 2 are 0 to 1, and no machine runs more of them.",
        ),
        (
            {"rank": {"zero": {}}},
            "rank={'zero': {}} was given, of type dict; give an integer. A config is given by its name: config=...",
        ),
        (
            {"rank": "c.py"},
            "rank='c.py' was given, of type str; give an integer. A config is given by its name: config=...",
        ),
        ({"host": ""}, 'host=\'\' was given; give a name or an address, such as "localhost" or "[::1]".'),
        ({"host": "tcp://a"}, 'host=\'tcp://a\' was given; give a name or an address, such as "localhost" or "[::1]".'),
        (
            {"host": "10.0.0.1:29500"},
            "host='10.0.0.1:29500' was given, which is not an IPv6 address; give the port by itself, as in "
            'host="10.0.0.1", port=29500.',
        ),
        ({"timeout": 0}, "timeout=0 was given; give a positive number of seconds, or a timedelta."),
        ({"config": "none.toml"}, f'There is no config file "none.toml" (looked for from {Path.cwd()}).'),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_any_socket(bare, changed: dict[str, Any], message: str):
    bare.setattr(dist, "TCPStore", None)
    bare.setattr(dist, "init_process_group", None)
    with pytest.raises(LaunchError) as caught:
        launch(**(NUMBERS | changed))
    assert str(caught.value) == message


def test_a_backend_that_is_not_there_is_refused(bare):
    bare.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r'"glo" was asked for; this build of torch has .*\. Did you mean "gloo"\?'):
        launch(**NUMBERS, backend="glo")
    with pytest.raises(LaunchError, match='backend "nccl" was asked for'):
        launch(**NUMBERS, backend="cpu:gloo,cuda:nccl")
    with pytest.raises(LaunchError, match=r"of type dict; give a name .* A config is given by its name: config=\.\.\."):
        launch(**NUMBERS, backend={"zero": {}})


@pytest.mark.parametrize(
    ("call", "found", "message"),
    [
        (
            launch_from_torch,
            {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
            "launch_from_torch found no RANK, LOCAL_RANK, MASTER_PORT in the environment; of what it reads, it found "
            "WORLD_SIZE=2, MASTER_ADDR=localhost. `torchrun --nproc_per_node N script.py`, or `shardlib run "
            "--nproc_per_node N script.py`, sets them. Or call launch(rank=0, world_size=1, host='localhost', "
            "port=29500) with your own numbers.",
        ),
        (
            lambda: launch_from_slurm("localhost", 29500),
            {"RANK": "0"},
            "launch_from_slurm found no SLURM_PROCID, SLURM_NPROCS, SLURM_LOCALID in the environment; of what it "
            "reads, it found nothing. `srun --ntasks N python script.py`, in an allocation of SLURM, sets them. Or "
            "call launch(rank=0, world_size=1, host='localhost', port=29500) with your own numbers.",
        ),
        (
            launch_from_torch,
            dict.fromkeys(VARIABLES["launch_from_slurm"], "0"),
            "launch_from_torch found no RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT in the environment; of "
            "what it reads, it found nothing. `torchrun --nproc_per_node N script.py`, or `shardlib run "
            "--nproc_per_node N script.py`, sets them. SLURM_PROCID and its like are there: call "
            "launch_from_slurm. Or call launch(rank=0, world_size=1, host='localhost', port=29500) with your own "
            "numbers.",
        ),
        (
            lambda: launch_from_openmpi("localhost", 29500),
            dict.fromkeys(VARIABLES["launch_from_openmpi"], "one"),
            'launch_from_openmpi found OMPI_COMM_WORLD_RANK="one", which is not an integer. `mpirun -n N python '
            "script.py` of Open MPI sets it; do not set it by hand.",
        ),
    ],
)
def test_every_missing_variable_is_named_and_what_sets_it(bare, call: Callable[[], Launched], found, message: str):
    for name, value in found.items():
        bare.setenv(name, value)
    with pytest.raises(LaunchError) as caught:
        call()
    assert str(caught.value) == message


class _Accelerators:
    """A machine with devices of which this process sees some; torch.accelerator as far as launching asks it."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, list[int]()

    def is_available(self) -> bool:
        return True

    def current_accelerator(self) -> torch.device:
        return torch.device("cuda")

    def device_count(self) -> int:
        return self.count

    def set_device_index(self, index: int) -> None:
        self.taken.append(index)


@pytest.mark.parametrize(
    ("seen", "numbers", "taken"),
    [
        (4, {"rank": 6, "local_rank": 2}, [2]),
        (4, {"rank": 6}, [2]),
        (1, {"rank": 6, "local_rank": 2}, [0]),
        (4, {"rank": 6, "local_rank": 2, "backend": "gloo"}, []),
    ],
)
def test_a_rank_takes_its_own_device_before_the_ranks_meet(bare, seen: int, numbers: dict[str, Any], taken: list[int]):
    machine, met = _Accelerators(seen), []

    def meet(*_where: object, **_how: object) -> None:
        met.append(list(machine.taken))
        raise dist.DistNetworkError("far enough")

    bare.setattr(torch, "accelerator", machine)
    bare.setattr(dist, "TCPStore", meet)
    with pytest.raises(LaunchError, match="far enough"):
        launch(world_size=8, host="localhost", port=29500, **numbers)
    assert met == [taken]


def test_more_local_ranks_than_devices_are_refused(bare):
    bare.setattr(torch, "accelerator", _Accelerators(2))
    with pytest.raises(LaunchError) as caught:
        launch(3, 4, "localhost", 29500, local_rank=3)
    assert str(caught.value) == (
        "local_rank=3 was given, and this process sees 2 devices of type cuda: start at most 2 processes on a machine, "
        "or look at CUDA_VISIBLE_DEVICES."
    )


def test_rank_0_says_where_they_met_unless_told_not_to(ranks, port: int):
    expected = f"shardlib: 2 ranks met at [::1]:{port}, on cpu, over gloo, seed 1024.\n"
    assert ranks(2).run(_said, port) == [(expected, ""), ("", "")]


def _said(port: int) -> tuple[str, str]:
    import contextlib
    import io

    rank, size = _alone()
    told = []
    for verbose in (True, False):
        with contextlib.redirect_stderr(io.StringIO()) as heard:
            launch(rank, size, "::1", port, verbose=verbose)
        told.append(heard.getvalue())
        dist.barrier()  # see _twice
        if verbose:
            dist.destroy_process_group()
            port += 1
    return told[0], told[1]
