"""A plan on this rank: the coordinate of the rank on the mesh, and the meaning of the plan there.

`RankPlan` is created once, before the model changes. Every later step gets it and leaves it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import device_here
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Movement, Optimizer, Plan, Purpose, Row, movements_of, rows_by_name
from shardlib.engine import _torch
from shardlib.engine.data.executor import Executor
from shardlib.engine.feature import batchnorm, exact
from shardlib.engine.model.choose_regions import find_regions, inside
from shardlib.engine.pipeline.stages import Stages, has_stages
from shardlib.errors import ShardingError
from shardlib.layout import Layout

__all__ = ["RankPlan", "owner_of"]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The immutable facts about a plan on this rank.

    Attributes:
        plan: the plan; on a pipeline, the part that this rank's stages carry out.
        mesh: the mesh of the axes of `plan`.
        coordinate: the coordinate of this rank on each axis.
        device: the device of this rank.
        regions: names of the modules that compute on DTensors (`choose_regions.py`).
        batch_norms: names of the modules that normalise by batch statistics.
        exact_random: whether random numbers are drawn by global element.
        stages: the stages of a pipeline; None without any.
    """

    plan: Plan
    mesh: DeviceMesh
    coordinate: dict[str, int]
    device: torch.device
    regions: tuple[str, ...]
    batch_norms: frozenset[str]
    exact_random: bool
    stages: Stages | None

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, mesh: DeviceMesh, *, exact_random: bool) -> RankPlan:
        """Return the plan on this rank. A pipeline makes its process groups: collective over all ranks.

        Raises:
            ShardingError: this rank is not part of the mesh.
            PlanError: the plan has no stages, or cannot be carried out on them.
        """
        stages = None
        if has_stages(plan):
            stages = Stages.of(model, plan, mesh, exact_random=exact_random)
            plan, mesh = stages.stage_plan, stages.stage_mesh
        shape, modules = MeshShape.of(mesh), model.named_modules(remove_duplicate=False)
        return cls(
            plan,
            mesh,
            _coordinate(mesh),
            device_here(mesh.device_type),
            tuple(_regions(model, plan, _active(shape, shape.model_axes))),
            frozenset(name for name, module in modules if batchnorm.is_batch_norm(module)),
            exact_random,
            stages,
        )

    # --- axes and their groups ----------------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> MeshShape:
        """The sizes of the mesh's axes."""
        return MeshShape.of(self.mesh)

    @cached_property
    def model_axes(self) -> tuple[str, ...]:
        """Model axes of more than one rank."""
        return _active(self.shape, self.shape.model_axes)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Data axes of more than one rank."""
        return _active(self.shape, self.shape.data_axes)

    @cached_property
    def expert_axes(self) -> tuple[str, ...]:
        """Data axes of more than one rank whose ranks may hold different experts."""
        return _active(self.shape, self.shape.expert_axes)

    @cached_property
    def compute_axes(self) -> tuple[str, ...]:
        """Axes that may split a tensor in compute, in the mesh's order."""
        return tuple(axis for axis in self.shape.names if axis in self.model_axes + self.expert_axes)

    @cached_property
    def model_mesh(self) -> DeviceMesh | None:
        """The mesh of the model axes, on which regions compute."""
        return self.mesh[self.model_axes] if self.model_axes else None

    @cached_property
    def ranks_of_forward(self) -> tuple[int, ...]:
        """The global ranks that take part in the collectives of this rank's forward."""
        over = {*self.compute_axes}.union(*(row.added("stored") for row in self.plan.rows))
        axes = tuple(axis for axis in _active(self.shape, self.shape.names) if axis in over)
        return tuple(self.mesh[axes].mesh.flatten().tolist()) if axes else (dist.get_rank(),)

    @property
    def root_mesh(self) -> DeviceMesh | None:
        """The mesh on which the whole model computes on DTensors; None if only some modules do, or none."""
        return self.model_mesh if "" in self.regions else None

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """The mesh on which experts are DTensors."""
        return self.mesh[self.compute_axes] if self.expert_axes else None

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """Return the group of ranks that differ from this one on these axes only; None if this is the only one."""
        axes = _active(self.shape, axes)
        return _torch.flattened(self.mesh, axes).get_group() if axes else None

    @cached_property
    def mesh_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the mesh; None if there is one."""
        return self.group(self.shape.names)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The group of all ranks that train the model, of all stages; None if there is one."""
        return self.mesh_group if self.stages is None else self.stages.everyone

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks with this rank's coordinates in all stages; None without a pipeline."""
        return None if self.stages is None else self.stages.pipeline_group

    @property
    def random_stream(self) -> int:
        """The index of this rank's random stream: each data rank has its own, which its stages have in common."""
        return self.shape.data_place(self.coordinate)[0]

    @property
    def deferred(self) -> tuple[str, ...]:
        """Modules that wait for their own updated parameters when they run."""
        return self.plan.repeated if self.plan.step.overlap else ()

    @cached_property
    def executor(self) -> Executor:
        """The executor of this rank's movements."""
        return Executor(self.mesh, self.device)

    def movements(self, row: Row, optimizer: Optimizer) -> Mapping[Purpose, Movement]:
        """Return the movements of a row in a step, by purpose. Rows of one form share them, with one row's name."""
        key = row.form, optimizer
        if key not in self._movements:
            with _torch.no_modes():  # sizes are counted with tensors that have values, also in a dry run
                every = movements_of([row], self.plan.mesh, (), self.plan.step, optimizer=optimizer)
                self._movements[key] = {one.purpose: one for one in every}
        return self._movements[key]

    @cached_property
    def _movements(self) -> dict[tuple[object, Optimizer], dict[Purpose, Movement]]:
        return {}

    def place(self) -> exact.DataRank | None:
        """Return this rank's place on the data axes, if random numbers are drawn by that."""
        return exact.DataRank(*self.shape.data_place(self.coordinate)) if self.exact_random else None

    # --- rows and layouts ---------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Rows of the plan by each name of their tensors."""
        return rows_by_name(self.plan.rows)

    @property
    def meets_in_modules(self) -> bool:
        """Whether some modules wait for other data ranks while they compute."""
        return bool(self.batch_norms) or any(row.stored.axes & {*self.data_axes} for row in self.plan.rows)

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """Return the compute layout of a tensor."""
        row = self.rows.get(name)
        return self.on_compute_axes(row.compute) if row is not None else Layout.replicate(tensor.ndim)

    def on_compute_axes(self, layout: Layout) -> Layout:
        """Return a layout without the axes that may not split a tensor in compute."""
        return layout.with_axes_dropped(layout.axes.difference(self.compute_axes))

    def on_model_axes(self, layout: Layout) -> Layout:
        """Return a layout without the axes that are not model axes."""
        return layout.with_axes_dropped(layout.axes.difference(self.model_axes))

    def on_active_axes(self, layout: Layout) -> Layout:
        """Return a layout without axes of one rank."""
        return layout.with_axes_dropped(layout.axes.difference(self.model_axes, self.data_axes))

    def added(self, src: Layout, dst: Layout) -> tuple[str, ...]:
        """Return the data axes that split `dst` and not `src`."""
        return tuple(axis for axis in self.data_axes if axis in dst.axes - src.axes)

    def is_split(self, layout: Layout) -> bool:
        """Tell whether a layout splits a tensor over model axes."""
        return any(axis in self.model_axes for axis in layout.axes)

    def is_spread(self, name: str) -> bool:
        """Tell whether ranks hold different experts of a tensor."""
        return name in self.rows and not self.rows[name].compute.axes.isdisjoint(self.expert_axes)

    def is_stored_sharded(self, name: str) -> bool:
        """Tell whether data ranks store different shards of a tensor."""
        return name in self.rows and not self.rows[name].added("stored").isdisjoint(self.data_axes)

    def is_global(self, name: str, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a DTensor on the model axes.

        In a region, all parameters are, and also buffers that are split or that BatchNorm updates from sharded
        parameters.
        """
        names = self.rows[name].tied if name in self.rows else (name,)
        if not any(inside(owner_of(n), self.regions) for n in names):
            return False
        of_norm = owner_of(names[0]) in self.batch_norms and tensor.ndim > 0
        return isinstance(tensor, nn.Parameter) or of_norm or self.is_split(self.layout(name, tensor))

    def mesh_for(self, name: str, tensor: torch.Tensor) -> DeviceMesh | None:
        """Return the mesh of a tensor in compute; None if it is a plain tensor."""
        if self.is_spread(name):
            return self.expert_mesh
        return self.model_mesh if self.model_mesh is not None and self.is_global(name, tensor) else None


def owner_of(name: str) -> str:
    """Return the name of the module that a tensor belongs to.

    >>> owner_of("blocks.0.weight"), owner_of("weight")
    ('blocks.0', '')
    """
    return name.rpartition(".")[0]


def _regions(model: nn.Module, plan: Plan, axes: tuple[str, ...]) -> list[str]:
    """Return the modules that compute on DTensors.

    They follow from the rows and the module layouts of the plan, which tell which tensors these model axes split, and
    which outputs are summed.
    """
    if not axes:
        return []
    rows = rows_by_name(plan.rows)
    registered = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    sharded = (name for name, _ in registered if name in rows and _splits(rows[name].compute, axes))
    split = list(dict.fromkeys(map(owner_of, sharded)))
    closing = {b.module for b in plan.borders if b.side == "output" and b.layout is not None}
    laid_out = {b.module for b in plan.borders if b.layout is not None and _splits(b.layout, axes)}
    tied = [[owner_of(name) for name in row.tied] for row in plan.rows if len(row.tied) > 1]
    look_ups = [name for name in split if isinstance(model.get_submodule(name), nn.Embedding | nn.EmbeddingBag)]
    asked = [b.module for b in plan.borders if b.layout is not None and b.rule is not None]
    uncalled = {name for name, module in model.named_modules() if not _has_forward(module)}
    return find_regions(split, closing, laid_out, tied, alone=look_ups, asked=asked, uncalled=uncalled)


def _splits(layout: Layout, axes: tuple[str, ...]) -> bool:
    return not layout.axes.isdisjoint(axes)


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _active(shape: MeshShape, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if shape[axis] > 1)


def _coordinate(mesh: DeviceMesh) -> dict[str, int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(f"Rank {dist.get_rank()} is not part of the mesh {mesh}; call on its ranks only.")
    return dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))
