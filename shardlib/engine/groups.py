"""Process groups of an axis that has rank groups of its own, for collectives of one's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import MeshLike, MeshShape, rank_groups
from shardlib.engine import _torch
from shardlib.errors import MeshError

__all__ = ["AxisGroup", "axis_groups"]


@dataclass(frozen=True)
class AxisGroup:
    """One group of an axis that this rank is in.

    Attributes:
        ranks: of the job, in the order in which the axis has them.
        place: this rank's index among them.
        group: for collectives, which count its ranks in ascending order, as all of torch do.
    """

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup


def axis_groups(name: str, mesh: MeshLike) -> tuple[AxisGroup, ...]:
    """The groups of an axis that this rank is in: one of a mesh axis; of an overlay, as many as its function says, in
    the function's order.

    All ranks of the job call it together. A `DeviceMesh` has the groups of its axes already; others are opened, and
    asking again gives the same ones.

    Args:
        name: of an axis of the mesh, or of an overlay.
        mesh: the mesh, or its shape.

    Raises:
        MeshError: no such axis; groups of ranks that are not there.

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
    rank, mine = dist.get_rank(), []
    for ranks in found:
        group = _torch.new_group(ranks)
        if group is not None:
            mine.append(AxisGroup(tuple(ranks), ranks.index(rank), group))
    return tuple(mine)
