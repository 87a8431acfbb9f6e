"""Cutting a model into stages: the tensors that a rank keeps, and the placeholders for the others.

Modules stay in the model, so that its own forward runs on every stage. The engine removes the parameters and buffers of
other stages. In their place it puts fake tensors without memory, for code that reads the dtype or the device of a
weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh import MeshShape, mesh
from shardlib._plan import Plan, Row, expert_rows
from shardlib._plan.schedules import default_schedule, rank_of_stage, splits_backward
from shardlib.engine import _torch
from shardlib.engine.regions import inside
from shardlib.engine.undo import Undo
from shardlib.errors import PlanError

__all__ = ["Place", "fake_copy", "fake_like", "mesh_with_stages", "of_stages", "remove_foreign", "shape_with_stages"]


class Place:
    """The coordinate of a rank in the pipeline of a plan, and the stages that it runs.

    Attributes:
        ranks: the number of ranks of the pipeline axis.
        index: the coordinate of this rank on it.
        schedule: the name of the schedule.
        stages: all stages.
        own: the numbers of this rank's stages.
        everywhere: named modules without parameters: any stage that has their inputs may call them.
        same: for each name of a module that has several, all its names.
    """

    def __init__(self, plan: Plan, index: int, model: nn.Module) -> None:
        self.ranks, self.index, self.stages = plan.mesh.only(plan.mesh.pipeline_axes).world_size, index, plan.stages
        self.schedule = plan.step.schedule or default_schedule(self.ranks, len(self.stages))
        named = {name for row in plan.rows if row.kind == "parameter" for name in row.tied}
        self.everywhere = frozenset(
            module
            for stage in plan.stages
            for module in stage.modules
            if not any(name.startswith(f"{module}.") for name in named)
        )
        self.own = tuple(stage for stage in range(len(self.stages)) if self.rank_of(stage) == index)
        self.same = {name: names for names in _names_of_modules(model).values() if len(names) > 1 for name in names}

    @property
    def splits_backward(self) -> bool:
        """Whether the backward of weights runs apart from the backward of inputs."""
        return splits_backward(self.schedule)

    def rank_of(self, stage: int) -> int:
        """Return the coordinate on the pipeline axis of the rank that runs a stage."""
        return rank_of_stage(self.schedule, self.ranks, stage)

    def holders(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the coordinates of the ranks that hold a tensor of these names; all of them if no stage holds it."""
        found = {self.rank_of(i) for i, stage in enumerate(self.stages) if any(map(stage.holds, names))}
        return tuple(sorted(found)) if found else tuple(range(self.ranks))

    def keeps(self, name: str, names: Sequence[str]) -> bool:
        """Tell whether this rank keeps the tensor under one of its names.

        A name that no stage holds is kept with the other names of the tensor. A module that is kept under one of its
        names is kept under all.
        """
        module, _, key = name.rpartition(".")
        same = [f"{each}.{key}" for each in self.same.get(module, ())] or [name]
        named = [stage for stage in self.stages if any(map(stage.holds, same))]
        if any(one.startswith(f"{module}.") for module in self.everywhere for one in same):
            return True
        if named:
            return any(self.stages[own] in named for own in self.own)
        return self.index in self.holders(names)


def mesh_with_stages(given: DeviceMesh) -> DeviceMesh:
    """Return a mesh with at least one axis besides the pipeline axis, so that each stage has a mesh."""
    shape = MeshShape.of(given)
    wanted = shape_with_stages(shape)
    return given if wanted == shape else mesh(wanted, device_type=given.device_type)


def shape_with_stages(shape: MeshShape) -> MeshShape:
    """Return a mesh shape with at least one axis besides the pipeline axis.

    >>> shape_with_stages(MeshShape("pp=2"))
    MeshShape("dp=1,pp=2")
    """
    return shape if set(shape.names) - set(shape.pipeline_axes) else MeshShape({"dp": 1, **dict(shape.items())})


def of_stages(plan: Plan, place: Place, shape: MeshShape) -> Plan:
    """Return the part of a plan that this rank's stages carry out, on a stage mesh of this shape.

    Raises:
        PlanError: the plan cannot be carried out on stages.
    """
    _refuse(plan, place)
    own = [module for i in place.own for module in place.stages[i].modules]

    def runs_here(module: str) -> bool:
        return any(inside(name, own) for name in place.same.get(module, (module,)))

    return plan.replace(
        mesh=shape,
        rows=tuple(row for each in plan.rows if (row := _own_row(each, place)) is not None),
        borders=tuple(border for border in plan.borders if runs_here(border.module)),
        units=tuple(filter(runs_here, plan.units)),
        repeated=tuple(filter(runs_here, plan.repeated)),
        stages=(),
        blocks=None,
    )


def _own_row(row: Row, place: Place) -> Row | None:
    names = tuple(name for name in row.tied if place.keeps(name, row.tied))
    return row.replace(name=names[0], tied=names) if names else None


def _refuse(plan: Plan, place: Place) -> None:
    modules = [module for stage in place.stages for module in stage.modules]
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
    if place.splits_backward and plan.step.recompute and expert_rows(plan.rows, plan.mesh):
        raise PlanError(
            "The plan spreads experts and computes activations again in backward, and its schedule "
            f'"{place.schedule}" computes the gradients of weights late: ranks whose experts no token asked for would '
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


def remove_foreign(model: nn.Module, place: Place, mode: Any, device: torch.device, undo: Undo) -> None:
    """Remove the tensors of other stages from a model, and put fake tensors in their place."""
    names = _names_of_tensors(model)
    for module, module_names in _names_of_modules(model).items():
        for tensors in _torch.own_tensors(module):
            foreign = [
                key
                for key, tensor in tensors.items()
                if tensor is not None
                and not any(place.keeps(f"{n}.{key}".lstrip("."), names[id(tensor)]) for n in module_names)
            ]
            if foreign:
                undo.callback(_put_back, module, tensors, dict(tensors), foreign)
            for key in foreign:
                tensor = tensors.pop(key)
                module.__dict__[key] = _torch.as_kind(fake_like(tensor, mode, device), tensor).requires_grad_(False)


def _put_back(module: nn.Module, tensors: dict[str, Any], before: dict[str, Any], foreign: Sequence[str]) -> None:
    for key in foreign:
        module.__dict__.pop(key, None)
    tensors.clear()
    tensors.update(before)


def _names_of_tensors(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            found.setdefault(id(tensor), []).append(name)
    return found


def _names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found
