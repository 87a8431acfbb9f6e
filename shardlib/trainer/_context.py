"""The context of a job: its config, its mesh, and this rank's coordinate. Read-only."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh_shape import MeshShape
from shardlib.booster import Config
from shardlib.booster._plugins import _of_job
from shardlib.booster.launch import Launched, launched
from shardlib.engine import _torch
from shardlib.errors import LaunchError, MeshError, nearest
from shardlib.trainer._settings import shape_of

__all__ = ["ParallelContext", "ParallelMode", "global_context", "remember"]


class ParallelMode(Enum):
    """Ways in which ranks share work; each belongs to some axes of the mesh. The name of an axis can replace a mode.

    GLOBAL is all ranks, DATA the ranks with different examples, MODEL those with the same examples, TENSOR (and
    PARALLEL_1D) those that shard tensors, PIPELINE the stages, SEQUENCE those that shard sequences, SEQUENCE_DP the
    last and DATA.

    >>> ParallelMode("data")
    <ParallelMode.DATA: 'data'>
    """

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipeline"
    TENSOR = "tensor"
    PARALLEL_1D = "1d"
    SEQUENCE = "sequence"
    SEQUENCE_DP = "sequence_dp"


_SEQUENCE = ("sp", "cp")


@dataclass(frozen=True)
class _Known:
    """The result of `initialize`, for the job as it was configured then."""

    config: Config
    mesh: DeviceMesh
    job: Launched | None


# Forgotten with the process group, as the job is.
_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, _Known] = weakref.WeakKeyDictionary()


def remember(config: Config, mesh: DeviceMesh) -> None:
    """Set the config and the mesh of the context."""
    world = dist.group.WORLD
    assert world is not None
    _KNOWN[world] = _Known(config, mesh, launched())


class ParallelContext:
    """The class of `global_context`: a view of the launched job, and of the mesh of `initialize` once there is one.

    >>> global_context.config.get("BATCH_SIZE", 32)
    32
    >>> global_context.get_world_size(ParallelMode.DATA), global_context.get_local_rank("tp")
    (1, 0)
    """

    __slots__ = ()

    def _known(self) -> _Known | None:
        world = dist.group.WORLD if dist.is_initialized() else None
        known = None if world is None else _KNOWN.get(world)
        return known if known is not None and known.job is launched() else None  # launched again: with another config

    @property
    def config(self) -> Config:
        """The configuration of the job: from `initialize`, else from `launch` or a function like it, else empty."""
        known, job = self._known(), launched()
        return known.config if known is not None else job.config if job is not None else Config()

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of `initialize`.

        Raises:
            LaunchError: `initialize` was not called yet.
        """
        known = self._known()
        if known is None:
            raise LaunchError(
                "There is no mesh yet: initialize makes it. Ranks and sizes are known before, groups are not."
            )
        return known.mesh

    @property
    def shape(self) -> MeshShape:
        """Names and sizes of the axes: those of the mesh, or of the one that the config asks for."""
        known = self._known()
        return shape_of(self.config) if known is None else MeshShape.of(known.mesh)

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks with examples of their own."""
        return self.get_world_size(ParallelMode.DATA)

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks over which tensors are sharded."""
        return self.get_world_size(ParallelMode.TENSOR)

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of stages."""
        return self.get_world_size(ParallelMode.PIPELINE)

    def axes(self, mode: ParallelMode | str) -> tuple[str, ...]:
        """Return the axes of the mesh that belong to a mode; none where the mesh has none of them."""
        shape = self.shape
        if isinstance(mode, str) and mode in shape:
            return (mode,)
        model = (*shape.pipeline_axes, *shape.model_axes)
        tensor = tuple(axis for axis in shape.model_axes if axis not in _SEQUENCE)
        sequence = tuple(axis for axis in shape.model_axes if axis in _SEQUENCE)
        return {
            ParallelMode.GLOBAL: shape.names,
            ParallelMode.DATA: shape.data_axes,
            ParallelMode.MODEL: tuple(axis for axis in shape.names if axis in model),
            ParallelMode.PIPELINE: shape.pipeline_axes,
            ParallelMode.TENSOR: tensor,
            ParallelMode.PARALLEL_1D: tensor,
            ParallelMode.SEQUENCE: sequence,
            ParallelMode.SEQUENCE_DP: (*shape.data_axes, *sequence),
        }[_mode(mode, shape)]

    def is_initialized(self, mode: ParallelMode | str) -> bool:
        """Return whether several ranks work together in this mode. GLOBAL and DATA always are, once the ranks have
        joined."""
        if mode in (ParallelMode.GLOBAL, ParallelMode.DATA):
            return dist.is_initialized()
        return dist.is_initialized() and self.get_world_size(mode) > 1

    def get_global_rank(self) -> int:
        """Return this rank's number among all ranks."""
        return _of_job("RANK", 0)

    def get_ranks_in_group(self, mode: ParallelMode | str) -> list[int]:
        """Return the global numbers of the ranks that work with this one in a mode, itself included."""
        rank, axes = self.get_global_rank(), self.axes(mode)
        return next(group for group in self.shape.groups(axes) if rank in group)

    def get_world_size(self, mode: ParallelMode | str) -> int:
        """Return the number of ranks in this rank's group."""
        return len(self.get_ranks_in_group(mode))

    def get_local_rank(self, mode: ParallelMode | str) -> int:
        """Return this rank's number in its group."""
        return self.get_ranks_in_group(mode).index(self.get_global_rank())

    def is_first_rank(self, mode: ParallelMode | str) -> bool:
        """Return whether this rank is the first of its group."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: ParallelMode | str) -> bool:
        """Return whether this rank is the last of its group."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def get_group(self, mode: ParallelMode | str) -> dist.ProcessGroup:
        """Return the process group of a mode.

        Raises:
            LaunchError: before `initialize`.
            MeshError: no axis of the mesh is of this mode.
        """
        mesh, axes = self.mesh, self.axes(mode)
        if mode is ParallelMode.GLOBAL:
            world = dist.group.WORLD
            assert world is not None
            return world
        if not axes:
            raise MeshError(
                f'Mesh "{self.shape}" has no axis of mode {getattr(mode, "name", mode)}; ask is_initialized(mode) '
                "before."
            )
        return _torch.flattened(mesh, axes).get_group()

    def __repr__(self) -> str:
        return f'global_context(mesh="{self.shape}", rank={self.get_global_rank()})'


def _mode(given: Any, shape: MeshShape) -> ParallelMode:
    if isinstance(given, ParallelMode):
        return given
    names = [*shape.names, *(mode.value for mode in ParallelMode)]
    if given not in names:
        raise MeshError(
            f"There is no mode {given!r}; give a ParallelMode ({', '.join(mode.name for mode in ParallelMode)}) or an "
            f'axis of mesh "{shape}".{nearest(str(given), names)}'
        )
    return ParallelMode(given)


global_context = ParallelContext()
"""The context of this process's job."""
