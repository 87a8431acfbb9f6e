"""Process groups of an axis that has its own rank groups, for user-defined collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import MeshLike, MeshShape, rank_groups
from shardlib.engine import _torch
from shardlib.errors import MeshError

__all__ = ["AxisGroup", "axis_groups", "group_over"]


@dataclass(frozen=True)
class AxisGroup:
    """One group of an axis that this rank belongs to.

    Attributes:
        ranks: the group's global ranks, in the order of the axis.
        place: the index of this rank among them.
        group: the process group for collectives, which order its ranks ascending, as torch always does.
    """

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup


def axis_groups(name: str, mesh: MeshLike) -> tuple[AxisGroup, ...]:
    """Return the groups of an axis that this rank belongs to, in the order of the axis.

    A mesh axis has one; an overlay has as many as its function returns. Collective over all ranks of the job. A
    `DeviceMesh` already has the groups of its axes. Other groups are created once, and later calls return the same
    ones.

    Args:
        name: an axis of the mesh, or an overlay.
        mesh: the mesh, or its shape.

    Raises:
        MeshError: there is no such axis, or a group has ranks that do not exist.

    Example:
        >>> (group,) = axis_groups("tp", mesh)  # doctest: +SKIP
        >>> dist.all_reduce(tensor, group=group.group)  # doctest: +SKIP
    """
    shape = MeshShape.of(mesh)
    if isinstance(mesh, DeviceMesh) and name in shape:
        group = mesh.get_group(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        return (AxisGroup(ranks, ranks.index(dist.get_rank()), group),)
    found = shape.groups((name,)) if name in shape else rank_groups(name, shape)
    if not dist.is_initialized() or shape.world_size != dist.get_world_size():
        raise MeshError(
            f'axis_groups("{name}") was asked for on mesh "{shape}"; call it where its {shape.world_size} ranks run, '
            "after shardlib.mesh(...)."
        )
    key = (name, tuple(map(tuple, found)))
    job = dist.group.WORLD
    if (job, key) not in _opened:
        _opened[job, key] = _open(found)
    return _opened[job, key]


_opened: dict[tuple[object, object], tuple[AxisGroup, ...]] = {}


def _open(found: list[list[int]]) -> tuple[AxisGroup, ...]:
    rank, member_of = dist.get_rank(), []
    for ranks in found:
        group = _torch.new_group(ranks)
        if group is not None:
            member_of.append(AxisGroup(tuple(ranks), ranks.index(rank), group))
    return tuple(member_of)


def group_over(axes: tuple[str, ...], mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that differ on these axes of a mesh only; without axes, of this rank alone.

    Over several axes it is made when it is asked for first, by all ranks together.
    """
    if axes:
        return _torch.flattened(mesh, axes).get_group()
    key, rank = ("", ()), dist.get_rank()
    if (dist.group.WORLD, key) not in _opened:
        alone = dist.new_group([rank], use_local_synchronization=True)
        _opened[dist.group.WORLD, key] = (AxisGroup((rank,), 0, alone),)
    return _opened[dist.group.WORLD, key][0].group
