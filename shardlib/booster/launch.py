"""Launch of this process as one rank of a job: check the numbers, choose the device, join the ranks, seed.

The numbers come from the caller (`launch`), or from the environment of a launcher.
"""

from __future__ import annotations

import ipaddress
import os
import random
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from shardlib._store import address, is_torchruns, meeting, store_of, store_of_attempt
from shardlib.booster.config import Config
from shardlib.errors import LaunchError, nearest

__all__ = ["Launched", "launch", "launch_from_openmpi", "launch_from_slurm", "launch_from_torch"]

ConfigLike = Mapping[str, Any] | str | Path | None

# numpy takes no larger seed.
_SEEDS = 2**32


@dataclass(frozen=True)
class Launched:
    """The result of joining a job.

    Attributes:
        rank: the number of this rank.
        world_size: the number of ranks.
        local_rank: its number on its machine; None if it is not known.
        host, port: the address at which the ranks met.
        backend: the backend of collectives, as torch names it.
        device: this rank's own accelerator, or the CPU.
        seed: the seed of every rank.
        config: the configuration of the job.
    """

    rank: int
    world_size: int
    local_rank: int | None
    host: str
    port: int
    backend: str
    device: torch.device
    seed: int
    config: Config = field(compare=False)


# Forgotten with the process group: after destroy_process_group another job may be joined.
_JOINED: weakref.WeakKeyDictionary[dist.ProcessGroup, Launched] = weakref.WeakKeyDictionary()


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigLike = None,
    *,
    timeout: float | timedelta | None = None,
) -> Launched:
    """Join a job of `world_size` ranks that meet at `host:port`, where rank 0 listens.

    Python, numpy and torch have the same seed on every rank, so that all build the same initial weights, which
    `shard_model` checks. A second call with the same numbers does nothing; if the process group exists already
    (`sl.mesh`, `init_process_group`), the numbers are checked against it, and ranks are seeded.

    Args:
        rank: this process's number, from 0.
        world_size: the number of processes.
        host: a name or an address; IPv6 as "::1" or "[::1]".
        port: from 1 to 65535, free on that host.
        backend: by default NCCL for tensors on CUDA and gloo for those on CPU, the same for other accelerators, and
            gloo on a machine without one. A given backend is used as it is: "gloo" makes a job on CPU.
        local_rank: the index of this rank's device on its machine; by default the rank modulo their number. A process
            that sees one device uses that.
        seed: the seed of every rank.
        verbose: rank 0 prints one line to stderr.
        config: a dict, or the path of a .py or .toml file; see `Config`.
        timeout: the time that ranks wait for each other, now and later, in seconds or as a `timedelta`; by default half
            an hour to start, and then torch's default for the backend.

    Raises:
        LaunchError: invalid numbers, before any socket is opened; another job was joined already; the ranks did not
            meet.

    Example:
        >>> launch(rank=0, world_size=1, host="localhost", port=29500, verbose=False).device  # doctest: +SKIP
        device(type='cpu')
        >>> launch(rank=4, world_size=4, host="localhost", port=29500)
        Traceback (most recent call last):
            ...
        shardlib.errors.LaunchError: rank=4 was given; ranks of a job of 4 are 0 to 3.
    """
    settings = Config.of(config)
    _check_numbers(rank, world_size, port, local_rank, seed)
    limit = _checked_timeout(timeout)
    asked = Launched(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        host=_checked_host(host),
        port=port,
        backend=_checked_backend(backend),
        device=torch.device("cpu"),
        seed=seed,
        config=settings,
    )
    asked = replace(asked, device=_device(asked))
    if dist.is_initialized():
        return _again(asked, chosen=backend is not None, reconfigured=config is not None)
    if asked.device.type != "cpu":
        torch.accelerator.set_device_index(asked.device.index)
    _meet(asked, limit)
    return _started(asked, verbose=verbose)


def launched() -> Launched | None:
    """Return the result of `launch`, or of a function like it, for this process's job; None if none was called."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _JOINED.get(world)


def launch_from_torch(
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigLike = None,
    *,
    timeout: float | timedelta | None = None,
) -> Launched:
    """Call `launch` with the variables that `torchrun` and `shardlib run` set.

    These are RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: a variable is missing or is not a number; and the errors of `launch`.

    >>> launch_from_torch()  # doctest: +SKIP
    Launched(rank=0, world_size=2, local_rank=0, host='127.0.0.1', port=29500, backend='gloo', ...)
    """
    found = _TORCHRUN.read()
    return launch(
        found.number("RANK"),
        found.number("WORLD_SIZE"),
        found["MASTER_ADDR"],
        found.number("MASTER_PORT"),
        backend,
        found.number("LOCAL_RANK"),
        seed,
        verbose,
        config,
        timeout=timeout,
    )


def launch_from_slurm(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigLike = None,
    *,
    timeout: float | timedelta | None = None,
) -> Launched:
    """Call `launch` with the variables that SLURM's `srun` sets.

    These are SLURM_PROCID, SLURM_NPROCS and SLURM_LOCALID.

    Args:
        host: the host of rank 0, such as the first line of `scontrol show hostnames`.
        port: a free port of that host, the same for all ranks.
        backend: as for `launch`, like all that follow.
        seed: see there.
        verbose: see there.
        config: see there.
        timeout: see there.

    Raises:
        LaunchError: a variable is missing or is not a number; and the errors of `launch`.
    """
    found = _SLURM.read()
    rank, size, local_rank = map(found.number, _SLURM.variables)
    return launch(rank, size, host, port, backend, local_rank, seed, verbose, config, timeout=timeout)


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: ConfigLike = None,
    *,
    timeout: float | timedelta | None = None,
) -> Launched:
    """Call `launch` with the variables that Open MPI's `mpirun` sets: OMPI_COMM_WORLD_RANK and others.

    Args:
        host: the host of rank 0.
        port: a free port of that host, the same for all ranks.
        backend: as for `launch`, like all that follow.
        seed: see there.
        verbose: see there.
        config: see there.
        timeout: see there.

    Raises:
        LaunchError: a variable is missing or is not a number; and the errors of `launch`.
    """
    found = _OPENMPI.read()
    rank, size, local_rank = map(found.number, _OPENMPI.variables)
    return launch(rank, size, host, port, backend, local_rank, seed, verbose, config, timeout=timeout)


# --- what launchers put into the environment ---


@dataclass(frozen=True)
class _Launcher:
    """A program that starts processes, the variables that it sets for each, and our function that reads them."""

    function: str
    command: str
    variables: tuple[str, ...]

    def read(self) -> _Found:
        found = {name: os.environ[name] for name in self.variables if os.environ.get(name)}
        missing = [name for name in self.variables if name not in found]
        if missing:
            raise LaunchError(
                f"{self.function} found no {', '.join(missing)} in the environment; of what it reads, it found "
                f"{', '.join(f'{name}={value}' for name, value in found.items()) or 'nothing'}. {self.command} sets "
                f"them.{self._other()} Or call launch(rank=0, world_size=1, host='localhost', port=29500) with your "
                "own numbers."
            )
        return _Found(self, found)

    def _other(self) -> str:
        """Return the launcher that did start this process, as far as its variables show."""
        for other in (_TORCHRUN, _SLURM, _OPENMPI):
            if other is not self and all(os.environ.get(name) for name in other.variables):
                return f" {other.variables[0]} and its like are there: call {other.function}."
        return ""


class _Found(dict[str, str]):
    def __init__(self, launcher: _Launcher, found: Mapping[str, str]) -> None:
        super().__init__(found)
        self.launcher = launcher

    def number(self, name: str) -> int:
        try:
            return int(self[name])
        except ValueError:
            raise LaunchError(
                f'{self.launcher.function} found {name}="{self[name]}", which is not an integer. '
                f"{self.launcher.command} sets it; do not set it by hand."
            ) from None


_TORCHRUN = _Launcher(
    "launch_from_torch",
    "`torchrun --nproc_per_node N script.py`, or `shardlib run --nproc_per_node N script.py`,",
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
_SLURM = _Launcher(
    "launch_from_slurm",
    "`srun --ntasks N python script.py`, in an allocation of SLURM,",
    ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"),
)
_OPENMPI = _Launcher(
    "launch_from_openmpi",
    "`mpirun -n N python script.py` of Open MPI",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


# --- what was given, checked before any socket ---


def _check_numbers(rank: int, world_size: int, port: int, local_rank: int | None, seed: int) -> None:
    given = {"rank": rank, "world_size": world_size, "port": port, "local_rank": local_rank or 0, "seed": seed}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise LaunchError(
                f"{name}={value!r} was given, of type {type(value).__name__}; give an integer.{_is_it_a_config(value)}"
            )
    ranks = f"ranks of a job of {world_size} are 0 to {world_size - 1}"
    limits = {
        "world_size": (1, None, "a job has one rank or more"),
        "rank": (0, world_size - 1, ranks),
        "local_rank": (0, world_size - 1, f"{ranks}, and no machine runs more of them"),
        "port": (1, 65535, "ports are 1 to 65535, and all ranks need the same one"),
        "seed": (0, _SEEDS - 1, f"seeds are 0 to {_SEEDS - 1}"),
    }
    for name, (least, most, meaning) in limits.items():
        if given[name] < least or (most is not None and given[name] > most):
            raise LaunchError(f"{name}={given[name]} was given; {meaning}.")


def _is_it_a_config(given: object) -> str:
    """Return a hint for a config that was passed as the first argument."""
    file = isinstance(given, str) and given.endswith((".py", ".toml"))
    return " A config is given by its name: config=..." if file or isinstance(given, Mapping | Path) else ""


def _checked_timeout(timeout: float | timedelta | None) -> timedelta | None:
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    if limit is not None and limit <= timedelta(0):
        raise LaunchError(f"timeout={timeout!r} was given; give a positive number of seconds, or a timedelta.")
    return limit


def _checked_host(host: object) -> str:
    """Return a host name, or an address without brackets."""
    text = host.removeprefix("[").removesuffix("]") if isinstance(host, str) else ""
    if not text or "/" in text or any(map(str.isspace, text)):
        raise LaunchError(f'host={host!r} was given; give a name or an address, such as "localhost" or "[::1]".')
    if ":" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            raise LaunchError(
                f"host={host!r} was given, which is not an IPv6 address; give the port by itself, as in "
                f'host="{text.partition(":")[0]}", port=29500.'
            ) from None
    return text


def _checked_backend(backend: object) -> str:
    """Return the requested backend, if this machine has it; else the default of its device."""
    if backend is None:
        device = _accelerator()
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}" if device else "gloo"
    if not isinstance(backend, str):
        raise LaunchError(
            f"backend={backend!r} was given, of type {type(backend).__name__}; give a name such as "
            f'"gloo", or nothing.{_is_it_a_config(backend)}'
        )
    for name in (part.rpartition(":")[2].strip() for part in backend.split(",")):
        _check_backend(name)
    return backend


def _check_backend(name: str) -> None:
    known = [known for known in dist.Backend.backend_list if dist.is_backend_available(known)]
    if name not in known:
        raise LaunchError(
            f'backend "{name}" was asked for; this build of torch has {", ".join(known)}. Give one of them, or nothing '
            f"for the one that suits the device.{nearest(name, known)}{_is_it_a_config(name)}"
        )
    if name == "nccl" and not torch.cuda.is_available():
        raise LaunchError(
            'backend "nccl" was asked for, and no CUDA device is seen here. Leave backend out: gloo is then used; or '
            "run `shardlib doctor` to see what torch sees."
        )


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _device(asked: Launched) -> torch.device:
    """Return this rank's own device: a CPU with gloo alone, as `sl.mesh` takes it."""
    accelerator = _accelerator()
    if accelerator is None or asked.backend == "gloo":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    index = asked.rank % count if asked.local_rank is None else asked.local_rank
    if count == 1:  # a launcher that shows each process a device of its own, as SLURM may
        index = 0
    if index >= count:
        raise LaunchError(
            f"local_rank={index} was given, and this process sees {count} devices of type {accelerator.type}: start at "
            f"most {count} processes on a machine, or look at CUDA_VISIBLE_DEVICES."
        )
    return torch.device(accelerator.type, index)


# --- joining ---


def _meet(asked: Launched, limit: timedelta | None) -> None:
    # Where torchrun chose the address, its agent listens there already, or torch lets rank 0 do so.
    at: dict[str, Any] = {"init_method": "env://"}
    with meeting(asked.host, asked.port, asked.rank, asked.world_size):
        if is_torchruns() or not _is_the_agents(asked):
            made = store_of_attempt if _is_the_agents(asked) else store_of
            waits = limit or default_pg_timeout
            at = {"store": made(asked.host, asked.port, asked.rank, asked.world_size, waits)}
        dist.init_process_group(asked.backend, rank=asked.rank, world_size=asked.world_size, timeout=limit, **at)


def _is_the_agents(asked: Launched) -> bool:
    there = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return dist.is_torchelastic_launched() and there == (asked.host, str(asked.port))


def _again(asked: Launched, *, chosen: bool, reconfigured: bool) -> Launched:
    """Check ranks that have joined before, in this way or in another that leaves less to compare."""
    world = dist.group.WORLD
    assert world is not None
    before = _JOINED.get(world)
    if before is None:
        there: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        there |= {"backend": str(dist.get_backend())} if chosen else {}
        _check_same(there, asked)
        if asked.device.type != "cpu":
            torch.accelerator.set_device_index(asked.device.index)
        return _started(replace(asked, backend=str(dist.get_backend())), verbose=False)
    open_ones = {"local_rank"} if asked.local_rank is None else set()
    open_ones |= set() if chosen else {"backend", "device"}
    names = {each.name for each in fields(before) if each.compare} - open_ones
    _check_same({each.name: getattr(before, each.name) for each in fields(before) if each.name in names}, asked)
    if reconfigured:
        _JOINED[world] = replace(before, config=asked.config)
    return _JOINED[world]


def _check_same(there: Mapping[str, Any], asked: Launched) -> None:
    other = {name: value for name, value in there.items() if getattr(asked, name) != value}
    if other:
        raise LaunchError(
            f"This process has joined a job with {', '.join(f'{name}={value}' for name, value in other.items())}, and "
            f"was asked to join one with {', '.join(f'{name}={getattr(asked, name)}' for name in other)}. Launch once, "
            "or call torch.distributed.destroy_process_group() before."
        )


def _started(joined: Launched, *, verbose: bool) -> Launched:
    _seed(joined.seed)
    world = dist.group.WORLD
    assert world is not None
    _JOINED[world] = joined
    if verbose and joined.rank == 0:
        ranks = "1 rank" if joined.world_size == 1 else f"{joined.world_size} ranks"
        where = address(joined.host, joined.port)
        print(
            f"shardlib: {ranks} met at {where}, on {joined.device.type}, over {joined.backend}, seed {joined.seed}.",
            file=sys.stderr,
        )
    return joined


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    torch.manual_seed(seed)
