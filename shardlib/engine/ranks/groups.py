"""Process groups along a mesh axis, an overlay or several axes, and process groups of given ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh_shape import MeshLike, MeshShape, rank_groups
from shardlib.engine import _torch
from shardlib.errors import MeshError

__all__ = ["AxisGroup", "axis_groups", "group_of", "group_over"]


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
    rank, groups = dist.get_rank(), [(ranks, group_of(ranks, name)) for ranks in found]
    return tuple(AxisGroup(tuple(ranks), ranks.index(rank), group) for ranks, group in groups if group is not None)


def group_of(ranks: Sequence[int], purpose: str) -> dist.ProcessGroup | None:
    """Return the group of some ranks; None on other ranks.

    Collective over the job. The groups of a job are kept: each has connections, and on a GPU memory of its own, and a
    second model of the same mesh asks for the same ones.

    Args:
        ranks: global ranks.
        purpose: tells groups of equal ranks apart whose collectives or messages must not be mixed.
    """
    made = _made.setdefault(dist.group.WORLD, {})
    key = (purpose, tuple(ranks))
    if key not in made:
        made[key] = _torch.new_group(ranks)
    return made[key]


# The groups of each job that are not those of a mesh axis.
_made: WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup | None]] = WeakKeyDictionary()


def group_over(axes: tuple[str, ...], mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the ranks that differ on these axes of a mesh only; without axes, of this rank alone.

    Over several axes it is made when it is asked for first, by all ranks together.
    """
    if axes:
        return _torch.flattened(mesh, axes).get_group()
    made, rank = _made.setdefault(dist.group.WORLD, {}), dist.get_rank()
    group = made.get(("alone", (rank,))) or dist.new_group([rank], use_local_synchronization=True)
    made["alone", (rank,)] = group
    return group
