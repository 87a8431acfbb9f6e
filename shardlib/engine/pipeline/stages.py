"""The stages of a model: the tensors that a rank keeps, and the placeholders for the others.

Modules stay in the model, so that its own forward runs on every stage. The engine removes the parameters and buffers of
other stages. In their place it puts fake tensors without memory, for code that reads the dtype or the device of a
weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import device_here, mesh
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan, Row, expert_rows, rows_by_name
from shardlib._plan.schedules import default_schedule, rank_of_stage, splits_backward
from shardlib.engine import _torch
from shardlib.engine.model.choose_regions import inside
from shardlib.engine.undo import Undo
from shardlib.errors import PlanError

__all__ = ["Stages", "as_bytes", "fake_copy", "fake_like", "has_stages", "shape_with_stages"]


def has_stages(plan: Plan) -> bool:
    """Tell whether a plan is for a mesh whose ranks run different stages."""
    return any(plan.mesh[axis] > 1 for axis in plan.mesh.pipeline_axes)


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a plan, and those of them that this rank runs.

    Attributes:
        plan: the plan of the whole model.
        mesh: the whole mesh.
        skeleton: a copy of all modules with fake tensors.
        mode: the fake tensor mode.
    """

    plan: Plan
    mesh: DeviceMesh
    skeleton: nn.Module
    mode: Any

    @classmethod
    def of(cls, model: nn.Module, plan: Plan, given: DeviceMesh, *, exact_random: bool) -> Stages:
        """Return the stages of a model that is to be cut. Creates process groups: collective over all ranks.

        Raises:
            PlanError: the plan has no stages, or cannot be carried out on them.
        """
        if not plan.stages:
            raise PlanError(
                f'Mesh "{plan.mesh}" has the pipeline axis "{plan.mesh.pipeline_axes[0]}", and the rules name no '
                'stages for it. Name them: Rules(..., stages="embed, blocks.0-3 | blocks.4-7, norm, head"), or '
                "stages=Balanced(); a layout file's rules take them with rules.with_stages(Balanced())."
            )
        if exact_random:
            raise PlanError(
                'rng="exact" draws in the order of one device, and the stages of a pipeline run at the same time. Use '
                'rng="fast" on a mesh with a pipeline axis.'
            )
        shape, device = shape_with_stages(MeshShape.of(given)), device_here(given.device_type)
        mode = _torch.new_fake_mode()
        mesh_ = given if shape == MeshShape.of(given) else mesh(shape, device_type=given.device_type)
        dtypes = {name: row.compute.dtype for row in plan.rows for name in row.tied if row.compute.dtype is not None}
        stages = cls(plan, mesh_, fake_copy(model, mode, device, dtypes), mode)
        _refuse(plan, stages.schedule)
        # All groups that any stage may need: all ranks of the job must create each of them together.
        axes = [name for name in shape.names if name != stages.axis]
        for count in range(2, len(axes) + 1):
            for some in itertools.combinations(axes, count):
                _torch.flattened(stages.stage_mesh, some)
        _torch.flattened(mesh_, shape.names)
        return stages

    # --- ranks --------------------------------------------------------------------------------------------------------

    @property
    def axis(self) -> str:
        """The pipeline axis."""
        return self.plan.mesh.pipeline_axes[0]

    @cached_property
    def ranks(self) -> int:
        """The number of ranks of the pipeline axis."""
        return self.plan.mesh[self.axis]

    @cached_property
    def index(self) -> int:
        """The coordinate of this rank on the pipeline axis."""
        return self.mesh.get_local_rank(self.axis)

    @cached_property
    def device(self) -> torch.device:
        """The device of this rank."""
        return device_here(self.mesh.device_type)

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of all ranks of the mesh."""
        return _torch.flattened(self.mesh, self.mesh.mesh_dim_names or ()).get_group()

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks with this rank's coordinates in all stages."""
        return self.mesh[self.axis].get_group()

    @cached_property
    def stage_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that run the same stages as this one."""
        return self.mesh[tuple(name for name in self.mesh.mesh_dim_names or () if name != self.axis)]

    # --- stages -------------------------------------------------------------------------------------------------------

    @cached_property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self.plan.step.schedule or default_schedule(self.ranks, len(self.plan.stages))

    @property
    def splits_backward(self) -> bool:
        """Whether the backward of weights runs apart from the backward of inputs."""
        return splits_backward(self.schedule)

    def rank_of(self, stage: int) -> int:
        """Return the coordinate on the pipeline axis of the rank that runs a stage."""
        return rank_of_stage(self.schedule, self.ranks, stage)

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's stages."""
        return tuple(stage for stage in range(len(self.plan.stages)) if self.rank_of(stage) == self.index)

    @cached_property
    def everywhere(self) -> frozenset[str]:
        """Named modules without parameters: any stage that has their inputs may call them."""
        parameters = [name for row in self.plan.rows if row.kind == "parameter" for name in row.tied]
        modules = (module for stage in self.plan.stages for module in stage.modules)
        return frozenset(m for m in modules if not any(name.startswith(f"{m}.") for name in parameters))

    @cached_property
    def _same(self) -> dict[str, list[str]]:
        """For each name of a module, all its names."""
        return {name: names for names in _names_of_modules(self.skeleton).values() for name in names}

    # --- tensors ------------------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Rows of the plan of the whole model, by each name of their tensors."""
        return rows_by_name(self.plan.rows)

    def holders(self, row: Row) -> tuple[int, ...]:
        """Return the coordinates of the ranks that hold a tensor; all of them if no stage holds it."""
        found = {self.rank_of(i) for i, stage in enumerate(self.plan.stages) if any(map(stage.holds, row.tied))}
        return tuple(sorted(found or range(self.ranks)))

    def is_counted(self, name: str) -> bool:
        """Tell whether this rank, and not one of an earlier stage, counts a tensor in norms."""
        return self.holders(self.rows[name])[0] == self.index

    def _keeps(self, name: str, row: Row) -> bool:
        """Tell whether this rank keeps a tensor under one of its names.

        A name that no stage holds is kept with the other names of the tensor. A module that is kept under one of its
        names is kept under all.
        """
        module, _, key = name.rpartition(".")
        same = [f"{each}.{key}".lstrip(".") for each in self._same.get(module, [module])]
        if any(one.startswith(f"{module}.") for module in self.everywhere for one in same):
            return True
        if named := [number for number, stage in enumerate(self.plan.stages) if any(map(stage.holds, same))]:
            return not set(named).isdisjoint(self.own)
        return self.index in self.holders(row)

    @cached_property
    def stage_plan(self) -> Plan:
        """The part of the plan that this rank's stages carry out, on the mesh of these stages."""
        own = [module for stage in self.own for module in self.plan.stages[stage].modules]
        kept = [(row, tuple(name for name in row.tied if self._keeps(name, row))) for row in self.plan.rows]

        def runs_here(module: str) -> bool:
            return any(inside(name, own) for name in self._same.get(module, [module]))

        return self.plan.replace(
            mesh=MeshShape.of(self.stage_mesh),
            rows=tuple(row.replace(name=names[0], tied=names) for row, names in kept if names),
            borders=tuple(border for border in self.plan.borders if runs_here(border.module)),
            units=tuple(filter(runs_here, self.plan.units)),
            repeated=tuple(filter(runs_here, self.plan.repeated)),
            stages=(),
            blocks=None,
        )

    @cached_property
    def names(self) -> dict[str, str]:
        """Canonical names by the names of this rank's tensors."""
        return {row.name: self.rows[row.name].name for row in self.stage_plan.rows}

    @cached_property
    def names_here(self) -> dict[str, str]:
        """The names of this rank's tensors by their canonical names."""
        return {first: name for name, first in self.names.items()}

    @property
    def foreign(self) -> set[str]:
        """All names of tensors that only other ranks hold."""
        return {name for row in self.plan.rows if row.name not in self.names_here for name in row.tied}

    def cut(self, model: nn.Module, undo: Undo) -> None:
        """Remove the tensors of other stages from the model, and put fake tensors in their place."""
        kept = rows_by_name(self.stage_plan.rows)
        for module, names in _names_of_modules(model).items():
            for tensors in _torch.own_tensors(module):
                foreign = [
                    key
                    for key, tensor in tensors.items()
                    if tensor is not None and not any(f"{name}.{key}".lstrip(".") in kept for name in names)
                ]
                if foreign:
                    undo.callback(_put_back, module, tensors, dict(tensors), foreign)
                for key in foreign:
                    tensor = tensors.pop(key)
                    fake = _torch.as_kind(fake_like(tensor, self.mode, self.device), tensor)
                    module.__dict__[key] = fake.requires_grad_(False)

    def drop_foreign(self, model: nn.Module, state: dict[str, Any], prefix: str, *loading: Any) -> None:
        """Drop the entries of other stages, so that a state dict of the whole model can be loaded.

        What torch would say of them is said here: a load raises on all stages or on none.
        """
        _metadata, _strict, missing, _unexpected, errors = loading
        here = set(model.state_dict(keep_vars=True))
        foreign = {name: row for row in self.plan.rows for name in row.tied if name not in here}
        given = {name: state.pop(prefix + name) for name in foreign if prefix + name in state}
        if given:  # a stage's own state dict has none of them
            missing += [prefix + n for n, row in foreign.items() if row.kind == "parameter" and n not in given]
        errors += [
            f"size mismatch for {prefix}{name}: its shape is {tuple(value.shape)} in the state dict and "
            f"{tuple(foreign[name].global_shape)} in the model, in another stage."
            for name, value in given.items()
            if isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(foreign[name].global_shape)
        ]

    def full_state(self, own: Mapping[str, torch.Tensor], names: Collection[str] | None) -> dict[str, torch.Tensor]:
        """Return the state dict of the whole model: each tensor from the first rank of the pipeline that holds it.

        Collective over the pipeline axis.

        Args:
            own: full tensors of this rank's stages, by name.
            names: the entries to return, the same on all ranks; None for all.
        """
        sent: dict[str, torch.Tensor] = {}
        found = {}
        for name in self.skeleton.state_dict():
            if names is not None and name not in names:
                continue
            row = self.rows[name]
            if row.name not in sent:
                local = next((own[each] for each in row.tied if each in own), None)
                value = torch.empty(row.global_shape, dtype=row.stored.dtype or row.dtype) if local is None else local
                moving = value.to(self.device).resolve_conj().contiguous()
                dist.broadcast(as_bytes(moving), group=self.pipeline_group, group_src=self.holders(row)[0])
                sent[row.name] = moving.to(value.device)
            found[name] = sent[row.name]
        return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, which any back end sends, whatever the dtype; the memory is shared.

    >>> as_bytes(torch.zeros((), dtype=torch.float8_e4m3fn))
    tensor([0], dtype=torch.uint8)
    """
    return tensor.reshape(-1).view(torch.uint8)


def shape_with_stages(shape: MeshShape) -> MeshShape:
    """Return a mesh shape with at least one axis besides the pipeline axis.

    >>> shape_with_stages(MeshShape("pp=2"))
    MeshShape("dp=1,pp=2")
    """
    return shape if set(shape.names) - set(shape.pipeline_axes) else MeshShape({"dp": 1, **dict(shape.items())})


def _refuse(plan: Plan, schedule: str) -> None:
    modules = [module for stage in plan.stages for module in stage.modules]
    for border in plan.borders:
        between = border.rule is not None and not inside(border.module, modules)
        if between and border.layout is not None and border.layout.axes & {*plan.mesh.model_axes}:
            raise PlanError(
                f'The rule "{border.rule}" gives a layout to the {border.side} of "{border.module or "the model"}" '
                f"over {', '.join(sorted(border.layout.axes))}, but that module runs on several stages of the "
                "pipeline. Name modules that are within one stage."
            )
    if plan.step.fp8_history:
        raise PlanError(
            'precision("fp8") with delayed scales is planned but not run on a pipeline. Scale by the tensors as they '
            "are: fp8_history=0."
        )
    if splits_backward(schedule) and plan.step.recompute and expert_rows(plan.rows, plan.mesh):
        raise PlanError(
            "The plan spreads experts and computes activations again in backward, and its schedule "
            f'"{schedule}" computes the gradients of weights late: ranks whose experts no token asked for would '
            'send no tokens once more, for which others wait. Use "1f1b" or "interleaved", or leave '
            "checkpoint_activations out."
        )


def fake_copy(model: nn.Module, mode: Any, device: torch.device, dtypes: Any) -> nn.Module:
    """Return a copy of a model whose tensors are fake; no tensor of `model` is copied.

    `dtypes` are compute dtypes by parameter name, where they differ from the parameter's.
    """
    names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    return _torch.copied_with(model, lambda x: fake_like(x, mode, device, dtypes.get(names.get(id(x)))))


def fake_like(tensor: torch.Tensor, mode: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a fake tensor of the shape and strides of another."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=device)


def _put_back(module: nn.Module, tensors: dict[str, Any], before: dict[str, Any], foreign: Sequence[str]) -> None:
    for key in foreign:
        module.__dict__.pop(key, None)
    tensors.clear()
    tensors.update(before)


def _names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found
