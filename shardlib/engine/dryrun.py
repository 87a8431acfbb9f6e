"""Dry runs: one training step without data, devices or other ranks, which predicts a plan's collectives and memory.

The engine runs unchanged, on fake tensors, as rank 0 of a fake world. The record is therefore that of a real run, not
of a model of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib import _plan
from shardlib._mesh_shape import MeshLike
from shardlib._plan import DryRun, Plan, RulesLike, Transform
from shardlib.engine._torch import pytree
from shardlib.engine.apply import apply_plan, partial_gradients, with_partial
from shardlib.engine.fakes import arguments_of, fake_copy, fake_like, fake_world, refuse_sharded, run_step
from shardlib.engine.feature.recording import Recording, record_collectives
from shardlib.engine.pipeline import fake_run
from shardlib.engine.pipeline.stages import has_stages
from shardlib.engine.pipeline.weigh import weighing
from shardlib.engine.work import ModelSource
from shardlib.errors import short_traceback

__all__ = ["plan"]


@short_traceback
def plan(
    model: nn.Module,
    mesh: MeshLike,
    rules: RulesLike | None = None,
    *,
    transforms: Transform | Sequence[Transform] = (),
    example: Any = None,
) -> Plan:
    """Return the layout of every tensor of a model on a mesh, in each phase; nothing is sharded, no process needed.

    Model axes in a rule shard a parameter in all four phases (stored, compute, grad, state). A data axis that a rule
    puts on a parameter shards its stored, grad and state layouts, but not the compute layout.

    Args:
        model: a single-device module; it is only inspected, so it may be on `meta`.
        mesh: a `DeviceMesh`, or a shape such as "dp=8,tp=4".
        rules: a `Rules`, a mapping of patterns to layouts, or the name or path of a layout file; by default the layout
            that `layouts.for_model` finds.
        transforms: a function from plan to plan, or several, applied in order.
        example: the batch of one data rank, as a tuple of arguments, a mapping of keyword arguments or one tensor. If
            it is given, forward and backward run on fake tensors, and the plan reports every collective, every op whose
            inputs must be all-gathered, and the peak of memory.

    Raises:
        RuleError, LayoutError: the rules are not unambiguous for this model and mesh.
        MeshError, PlanError: the mesh has an axis of unknown size, a transform did not return a plan, or the model
            cannot run without values.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> p = plan(model, "dp=2,tp=2", {"0": "colwise", "2": "rowwise"})
    >>> p["0.weight"].local_shape(p.mesh), p.memory().parameters
    ((4, 4), 160)
    """
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    weigh = weighing(example, torch.device(device_type))
    made = _plan.make_plan(model, mesh, rules, transforms=transforms, weigh=weigh).replace(source=ModelSource(model))
    if example is None:
        return made
    report, partial = _dry_run(model, made, example, device_type)
    return with_partial(made.replace(report=report), partial)


def _dry_run(model: nn.Module, plan: Plan, example: Any, device_type: str) -> tuple[DryRun, dict[str, tuple[str, ...]]]:
    """Predict one training step of a plan, on the rank with the largest shards.

    The step is the second one, without the collectives of the first step only (those that agree on the order of
    gradients). Backward starts from ones in every scalar output or, if there is none, in every differentiable output.
    During a dry run, other threads of the process must not use `torch.distributed`.

    Returns:
        The report, and the model axes over which gradients are partial sums.

    Raises:
        PlanError: the model is sharded already, or its forward depends on values of tensors.
    """
    refuse_sharded(model)
    staged = has_stages(plan)
    ranks = plan.mesh.groups(plan.mesh.pipeline_axes)[0] if staged else [0]
    given = example if staged else arguments_of(model, example)

    def step(fake: nn.Module, batch: Any, log: Recording | None) -> dict[str, Any]:
        if staged:
            return {"stages": fake_run.run(fake, plan, batch, log)}
        args, kwargs = batch
        return {"activation_bytes": run_step(fake, args, kwargs, log)}

    found: list[DryRun] = []
    partial: dict[str, tuple[str, ...]] = {}
    for rank in ranks:
        with fake_world(plan, device_type, rank) as mesh:
            fake = fake_copy(model, device_type)
            batch = pytree.tree_map_only(torch.Tensor, lambda t: fake_like(t, device_type), given)
            apply_plan(fake, plan, mesh, check=False)
            step(fake, batch, None)
            with record_collectives(fake, mesh=mesh) as log:
                measured = step(fake, batch, log)
            found.append(dataclasses.replace(log.report(), **measured))
            partial |= partial_gradients(fake)
    if not staged:
        return found[0], partial
    stages = tuple(sorted((stage for report in found for stage in report.stages), key=lambda s: s.stage))
    largest = max(found, key=lambda report: report.peak_bytes)
    return dataclasses.replace(largest, stages=stages, ranks=tuple(found)), partial
