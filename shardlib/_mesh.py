"""Meshes of torch's processes: a `DeviceMesh` is made of a `MeshShape`."""

from __future__ import annotations

import atexit
import os
import time
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardlib._mesh_shape import MeshLike, MeshShape, listed, order_of
from shardlib._same_mesh import ranks_ask_for, tell_of
from shardlib._store import is_torchruns, meeting, store_of, store_of_attempt, warn_of_restarts
from shardlib.errors import MeshError, short_traceback

__all__ = [
    "default_device_type",
    "device_here",
    "join_torchrun",
    "mesh",
]

_DROPPED = 0.05  # seconds


@short_traceback
def mesh(
    spec: MeshLike | None = None,
    *,
    device_type: str | None = None,
    timeout: float | timedelta | None = None,
    **axes: int,
) -> DeviceMesh:
    """Create a torch `DeviceMesh` with named axes over the running processes.

    Started by `torchrun` it joins that job (NCCL on GPU, gloo on CPU); started by nothing it becomes a job of one
    process. One axis size may be -1.

    Args:
        spec: "dp=2,tp=4", a `MeshShape` or a mapping; or give the axes as keywords.
        device_type: "cuda" or "cpu"; by default the accelerator that torch sees, else "cpu"; "cpu" too where a
            process group of gloo alone is there already.
        timeout: the time that ranks wait for each other, in seconds or as a `timedelta`; one that has stood still so
            long counts as lost. By default that of the process group, half an hour where torch chose it.
        **axes: names and sizes, instead of `spec`.

    Every rank of the job calls it, with the same mesh, which ranks compare before they make process groups. A second
    call for the same mesh, with the same timeout, returns the same one: process groups stay open as long as the job.

    Raises:
        MeshError: the sizes do not multiply to the number of processes; a timeout that is not positive; ranks that ask
            for different meshes.
        LaunchError: the ranks did not meet: the port is taken, or some did not come in time.

    Example:
        >>> mesh("dp=1,tp=1").mesh_dim_names  # doctest: +SKIP
        ('dp', 'tp')
    """
    limit = _checked_timeout(timeout)
    if isinstance(spec, DeviceMesh):
        if limit is not None:
            _stop_sharing(spec)
        _set_timeouts(spec, limit)
        return spec
    shape = MeshShape.of(spec) if spec is not None else MeshShape(**axes)
    if spec is not None and axes:
        raise MeshError(f'Give the mesh once: as "{shape}" or as keywords ({listed(axes)}), not both.')
    device_type = device_type or default_device_type()
    try:
        shape = shape.resolve(_world_size())
    except MeshError:
        tell_of(f'"{shape}" on {device_type}')
        raise
    _ensure_process_group(device_type, limit)
    ranks_ask_for(f'"{shape}" on {device_type}', limit)
    order = order_of(shape)
    shared = _shared.setdefault(dist.group.WORLD, {})
    key = (device_type, shape, order, limit)
    if key not in shared:
        if order is None:
            shared[key] = init_device_mesh(device_type, shape.sizes, mesh_dim_names=shape.names)
        else:
            ranks = torch.tensor(order).view(shape.sizes)
            shared[key] = DeviceMesh(device_type, ranks, mesh_dim_names=shape.names)
    _set_timeouts(shared[key], limit)
    return shared[key]


# The meshes of each job by what was asked for. Each has process groups, and these have connections, which torch closes
# with the job alone.
_shared: WeakKeyDictionary[Any, dict[Any, DeviceMesh]] = WeakKeyDictionary()


def _stop_sharing(made: DeviceMesh) -> None:
    """Let later calls make another mesh, since the timeouts of this one change."""
    shared = _shared.get(dist.group.WORLD, {})
    for key in [key for key, each in shared.items() if each is made]:
        del shared[key]


def _checked_timeout(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None:
        return None
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise MeshError(f"timeout={timeout!r} was given; give a positive number of seconds, or a timedelta.")
    return limit


def _set_timeouts(made: DeviceMesh, limit: timedelta | None) -> None:
    """Set the timeouts of the job's process group, from which new groups take theirs, and of the axes' groups."""
    if limit is not None:
        for group in (dist.group.WORLD, *made.get_all_groups()):
            assert group is not None
            group.set_timeout(limit)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def default_device_type() -> str:
    """Return the machine's accelerator, or "cpu" if the process group uses gloo."""
    if dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO:
        return "cpu"
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type if device else "cpu"


def device_here(kind: str) -> torch.device:
    """Return this process's device of a kind, such as "cuda"."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _ensure_process_group(device_type: str, timeout: timedelta | None = None) -> None:
    _let_gloo_end()
    if dist.is_initialized():
        warn_of_restarts()
        return
    if device_type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    backend = _backend_for(device_type)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, **_store(timeout))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _backend_for(device_type: str) -> str | None:
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo" if device_type == "cpu" else None


def join_torchrun(device_type: str, backend: str | None = None, timeout: timedelta | None = None) -> None:
    """Join torchrun's ranks before another library does so, which would not keep its attempts apart."""
    if is_torchruns() and not dist.is_initialized():
        dist.init_process_group(backend or _backend_for(device_type), timeout=timeout, **_store(timeout))


@cache
def _let_gloo_end() -> None:
    """Let gloo's threads drop their last tensors before the interpreter ends.

    A thread of gloo holds the tensors of a collective for a moment after `wait` has returned, and takes the GIL to drop
    them. Where the interpreter ends first, it ends the process: "terminate called without an active exception", seen on
    torch 2.13 in one of ten scripts of plain torch whose last statement waits for a collective.
    """
    atexit.register(time.sleep, _DROPPED)


def _store(timeout: timedelta | None) -> dict[str, Any]:
    """Return the arguments of a group that meets where the environment says; none where that is left to torch."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, world, host, port = (os.environ.get(name, "") for name in names)
    left_to_torch = dist.is_torchelastic_launched() and not is_torchruns()
    if left_to_torch or not (host and world.isdigit() and port.isdigit() and rank.isdigit()):
        return {}
    with meeting(host, int(port), int(rank), int(world)):
        made = store_of_attempt if is_torchruns() else store_of
        store = made(host, int(port), int(rank), int(world), timeout or default_pg_timeout)
    return {"store": store, "rank": int(rank), "world_size": int(world)}
