"""The job's store, at which ranks meet before they have a process group."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardlib.errors import LaunchError, warn

__all__ = ["address", "is_torchruns", "listening_store", "meeting", "store_of", "store_of_attempt", "warn_of_restarts"]

_POLL_INTERVAL = 0.01  # seconds


@contextlib.contextmanager
def meeting(host: str, port: int, rank: int, world_size: int) -> Iterator[None]:
    """Raise `LaunchError` if ranks do not meet at this address."""
    try:
        yield
    except (dist.DistError, OSError) as fault:
        raise LaunchError(
            f"Rank {rank} of {world_size} did not meet the others at {address(host, port)}: {fault}\n"
            f"{_NODES_CHANGE if is_torchruns() else _NUMBERS_DIFFER}"
        ) from fault


_NUMBERS_DIFFER = (
    "Is rank 0 started, and on that host? Do all ranks name the same host, port and world_size? Is the port free there?"
)
# Agents of torch 2.13 keep the address of the first attempt: nodes that were there are not told of another one, and
# nodes that come later are not told of the first one, and wait for it until all agents end.
_NODES_CHANGE = (
    "torchrun's agent gave this address. If nodes have joined or left, it may be that of an earlier attempt: set "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all nodes."
)


def address(host: str, port: int) -> str:
    """Return how an address is written.

    >>> address("::1", 29500)
    '[::1]:29500'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def store_of(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """Return a job's store, which rank 0 keeps at this address; wait until all ranks have come.

    Raises:
        OSError: the port is taken.
        DistError: the ranks did not come.
    """
    if rank == 0:
        return listening_store(host, port, world_size, timeout=timeout, wait_for_workers=True)
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)


def is_torchruns() -> bool:
    """Tell whether torchrun's agent keeps the store, and lets all attempts of the job share it."""
    return dist.is_torchelastic_launched() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_attempt(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return torchrun's store as this attempt alone sees it.

    If a rank fails, torchrun starts all ranks again, and its store still has what they wrote before. Torch (2.13) keeps
    no attempts apart: ranks read addresses of processes that have ended. TORCHELASTIC_RESTART_COUNT does not tell
    attempts apart, since each machine counts failures of its own ranks. So rank 0 chooses a name for each attempt, and
    answers the question of each other rank by it. A question is a random key, which no earlier attempt has answered.

    Raises:
        OSError: a rank did not ask rank 0 in time.
        DistError: the store cannot be reached, or rank 0 did not answer in time.
    """
    whole = dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    asking = dist.PrefixStore("shardlib/attempts", whole)
    name = secrets.token_hex(8)
    if rank == 0:
        until = time.monotonic() + timeout.total_seconds()
        for other in range(1, world_size):
            while not asking.check([f"{name}/{other}"]):
                if asking.check([f"asks/{other}"]):  # perhaps by an earlier attempt, and soon by this one
                    asking.set(asking.get(f"asks/{other}").decode(), name)
                if time.monotonic() > until:
                    raise TimeoutError(f"rank {other} did not come within {timeout.total_seconds():g} seconds")
                time.sleep(_POLL_INTERVAL)
    else:
        asking.set(f"asks/{rank}", name)
        name = asking.get(name).decode()
        asking.set(f"{name}/{rank}", "")
    return dist.PrefixStore(f"shardlib/attempt/{name}", whole)


def warn_of_restarts() -> None:
    """Warn if the ranks have met in a way in which they cannot meet again after torchrun has restarted them."""
    if not is_torchruns() or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0" or dist.get_rank():
        return
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if any(key.startswith("default_pg/") for key in store.list_keys()):  # of init_process_group by the environment
        warn(
            "torchrun may restart the ranks of this job, and they may not meet again: they have met by "
            "init_process_group, which keeps attempts in one store. Call shardlib.mesh(...) before, which joins the "
            "ranks; or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun --standalone."
        )


def listening_store(
    host: str, port: int, world_size: int | None = None, *, timeout: timedelta | None = None, wait_for_workers: bool
) -> dist.TCPStore:
    """Return a store that this process keeps; at a loopback address it listens there only, so that no other machine
    reaches it.

    At any other address it listens on all interfaces, as torch's does: other machines may know this one by another
    address than its own name leads to.

    Args:
        host: a name or an address.
        port: the port; 0 lets the system choose.
        world_size: the number of ranks that will come.
        timeout: the time limit of its operations.
        wait_for_workers: whether to wait until all ranks have come.

    Raises:
        OSError: the port is taken.
        DistError: the ranks did not come.
    """
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": wait_for_workers}
    if timeout is not None:
        options["timeout"] = timeout
    if (address := _loopback_address(host, port)) is None:
        return dist.TCPStore(host, port, world_size, **options)
    family, where = address
    with socket.create_server(where, family=family, backlog=socket.SOMAXCONN) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(host, port, world_size, master_listen_fd=listening.detach(), **options)


def _loopback_address(host: str, port: int) -> tuple[int, Any] | None:
    """Return the family and the socket address of a host's name, if that leads to this machine alone."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # torch names the host in its own error
        return None
    if not all(ipaddress.ip_address(where[0]).is_loopback for *_, where in found):
        return None
    family, _, _, _, where = found[0]
    return family, where
