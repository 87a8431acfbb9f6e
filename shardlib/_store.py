"""The store at which ranks meet: it listens where it was asked to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardlib.errors import LaunchError

__all__ = ["address", "listening_store", "meeting", "store_of"]


@contextlib.contextmanager
def meeting(host: str, port: int, rank: int, world_size: int) -> Iterator[None]:
    """Raise `LaunchError` if ranks do not meet at this address."""
    try:
        yield
    except (dist.DistError, OSError) as fault:
        raise LaunchError(
            f"Rank {rank} of {world_size} did not meet the others at {address(host, port)}: {fault}\nIs rank 0 "
            "started, and on that host? Do all ranks name the same host, port and world_size? Is the port free there?"
        ) from fault


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
