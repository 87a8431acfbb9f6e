"""Process groups: creation, timeouts, and the removal of caches when the groups are gone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine._torch._private import private
from shardlib.engine._torch.dispatch import set_implicit_replication
from shardlib.engine._torch.meshes import forget_specs, live_meshes

private(
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    why="to send one collective over several axes, in a dry run too",
    without="parameters that are sharded over several data axes cannot be reduced together",
)
private(
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._device_types",
    "torch._C._distributed_c10d.Backend.Options._timeout",
    why="to read how long a process group waits",
    without="groups of a mesh would wait half an hour for a lost rank, whatever the user chose",
)
private(
    "torch.distributed.distributed_c10d._world",
    why="to list the process groups of this process",
    without="a rank cannot hang up when another rank is lost, and its peers wait for their time limit",
)
private(
    "torch.distributed._dist2._BACKENDS",
    why="to make a process group with ranks of another job, such as those of an inference engine",
    without="weights cannot be sent to an engine in memory",
    optional=True,
)
private(
    "torch.distributed.tensor._random._rng_tracker",
    why="to drop DTensor's tracker of random numbers with the mesh that it is for",
    without="the tracker of a job that is gone would be asked, and would synchronise over its groups",
)
private(
    "torch.distributed.device_mesh.DeviceMesh._pg_registry",
    why="to release process groups that compiled code keeps through a mesh",
    without="warm ranks of shardlib.testing keep the threads of old groups",
    optional=True,
)
private(
    "torch._C._distributed_c10d._dump_fr_trace_json",
    why="to say in which collective a rank of a test stands",
    without="a report of a hung test has no collectives",
    optional=True,
)

import torch.distributed.tensor._random as dtensor_random
from torch._subclasses.fake_tensor import unset_fake_temporarily

__all__ = [
    "default_store",
    "flattened",
    "forget_joined_group",
    "forget_meshes",
    "is_fake_group",
    "joined_group",
    "new_group",
    "place_of_group",
    "process_groups",
    "ranks_of_collective",
    "recorded_collectives",
    "reduction_of",
    "set_timeouts",
    "timeout_of",
    "wait_for",
]


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group that waits as long as the job's own; None on ranks outside of it. All ranks of the job call it."""
    group = dist.new_group(list(ranks), timeout=timeout_of(dist.group.WORLD))
    return group if dist.get_rank() in ranks else None


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the one-axis mesh over several axes of a mesh, in any order, so that one collective spans them all.

    The mesh object itself remembers it, since an equal one may stand for other process groups.
    """
    known: dict[tuple[str, ...], DeviceMesh] = mesh.__dict__.setdefault("_shardlib_flattened", {})
    axes = tuple(name for name in mesh.mesh_dim_names or () if name in axes)
    if axes not in known:
        with unset_fake_temporarily():  # a mesh is a tensor of ranks
            known[axes] = mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten()
            if len(axes) > 1:
                set_timeouts(known[axes])
    return known[axes]


def set_timeouts(mesh: DeviceMesh) -> None:
    """Let the groups of a mesh wait as long as the job's own, which its user chose in `init_process_group(timeout=)`.

    Torch (2.13.0) gives a new group its own default, half an hour, whatever that of the job is. Where a user chose
    another one for an axis, it stays.
    """
    world = timeout_of(dist.group.WORLD)
    if world is None:
        return
    for axis in mesh.mesh_dim_names or ():
        group = mesh.get_group(axis)
        if timeout_of(group) in (c10d.default_pg_timeout, c10d.default_pg_nccl_timeout or world):
            group.set_timeout(world)


def timeout_of(group: Any) -> timedelta | None:
    """Return how long operations of a group wait; None for fake groups and where the back end does not say."""
    if is_fake_group(group):
        return None
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError):
        return None


def is_fake_group(group: Any = None) -> bool:
    """Return whether a group, by default that of the job, has one process that stands for all ranks."""
    return dist.get_backend(group) == dist.Backend.FAKE


def wait_for(works: Iterable[dist.Work], limit: timedelta | None) -> None:
    """Wait for sends and receives, for each no longer than `limit`."""
    for work in works:
        if limit is None:
            work.wait()
        else:
            work.wait(limit)


def default_store() -> dist.Store:
    """Return the store through which the ranks of this job met."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def joined_group(
    store: dist.Store, name: str, place: tuple[int, int], backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group with ranks of other jobs, which has its own numbers of them. All of them call it.

    Args:
        store: a store that they share.
        name: what distinguishes the group in the store.
        place: the number of this process in the group, and of all.
        backend: such as "gloo".
        timeout: how long its collectives wait.
    """
    from torch.distributed import _dist2

    device = torch.device("cpu") if backend == "gloo" else torch.device(*_current_accelerator())
    prefixed = dist.PrefixStore(name, store)
    group = _dist2._BACKENDS[backend](prefixed, *place, timeout, device)
    # What the functions that send and receive look up of a group.
    c10d._world.pg_map[group] = (backend, prefixed)
    c10d._world.pg_group_ranks[group] = {each: each for each in range(place[1])}
    return group


def forget_joined_group(group: dist.ProcessGroup) -> None:
    """Release a group of `joined_group`: its connections close with the last reference to it."""
    c10d._world.pg_map.pop(group, None)
    c10d._world.pg_group_ranks.pop(group, None)


def _current_accelerator() -> tuple[str, int]:
    return torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index()  # type: ignore[union-attr]


def process_groups() -> list[dist.ProcessGroup]:
    """List the groups that this process is in. A group's sockets and threads live as long as it is referenced."""
    return list(c10d._world.pg_map)


def recorded_collectives() -> list[dict[str, Any]]:
    """List the last collectives of this process, oldest first, as torch's flight recorder writes them down (2.13.0).

    It records those of gloo too; an entry that is not "retired" is still under way. Empty where torch has no recorder.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return json.loads(dump()).get("entries", []) if dump else []


def place_of_group(name: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ranks of a process group, and the names of the mesh axes that it serves."""
    found = _group_named(name)
    ranks = tuple(dist.get_process_group_ranks(found)) if found is not None else ()
    axes = [axis for mesh in live_meshes() for axis in mesh.mesh_dim_names or () if _serves(name, mesh, axis)]
    return ranks, tuple(dict.fromkeys(axes))


def _group_named(name: str) -> dist.ProcessGroup | None:
    return next((group for group in process_groups() if group.group_name == name), None)


def _serves(name: str, mesh: DeviceMesh, axis: str) -> bool:
    try:
        return mesh.get_group(axis).group_name == name
    except Exception:  # a mesh without process groups, or of a job that is gone
        return False


def ranks_of_collective(arguments: dict[str, Any]) -> list[int]:
    """Return the global ranks that take part in a collective op, from its named arguments."""
    if "group_name" in arguments:
        group = _group_named(arguments["group_name"])
        assert group is not None
    else:
        group = dist.ProcessGroup.unbox(arguments["process_group"])
    return dist.get_process_group_ranks(group)


def reduction_of(arguments: dict[str, Any]) -> str:
    """Return how a collective op reduces, such as "SUM", from its named arguments; "" where it does not."""
    op = arguments.get("reduce_op", "")
    return op.upper() if isinstance(op, str) else dist.ReduceOp.RedOpType(op.op()).name


def forget_meshes() -> None:
    """Drop what DTensor remembers of meshes whose process groups are gone: cached propagation, the RNG tracker."""
    forget_specs()
    dtensor_random._rng_tracker = None
    set_implicit_replication(False)
    if "torch._dynamo" in sys.modules:  # which this would import
        torch.compiler.reset()
    # Compiled code keeps meshes after all (2.13.0), a mesh keeps its groups, and each of gloo's groups has threads that
    # wake a hundred times a second.
    for mesh in live_meshes():
        getattr(mesh, "_pg_registry", {}).clear()
