"""Dry runs: one training step without data, devices or other ranks, which predicts a plan's collectives and memory.

The engine runs unchanged, on fake tensors, as rank 0 of a fake world. The record is therefore that of a real run, not
of a model of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib import _plan
from shardlib._mesh_shape import MeshLike
from shardlib._plan import DryRun, Plan, RulesLike, Transform
from shardlib.engine import _torch, ops
from shardlib.engine._torch import pytree
from shardlib.engine.apply import apply_plan, is_sharded, partial_gradients, with_partial
from shardlib.engine.feature.recording import Recording, record_collectives
from shardlib.engine.pipeline import fake_run
from shardlib.engine.pipeline.batch import as_call
from shardlib.engine.pipeline.stages import has_stages, shape_with_stages
from shardlib.engine.pipeline.weigh import weighing
from shardlib.errors import PlanError, short_traceback

__all__ = ["plan", "run_step"]


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
    made = _plan.make_plan(model, mesh, rules, transforms=transforms, weigh=weigh)
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
    _refuse_sharded(model)
    staged = has_stages(plan)
    ranks = plan.mesh.groups(plan.mesh.pipeline_axes)[0] if staged else [0]
    given = example if staged else _arguments(model, example)

    def step(fake: nn.Module, batch: Any, log: Recording | None) -> dict[str, Any]:
        if staged:
            return {"stages": fake_run.run(fake, plan, batch, log)}
        args, kwargs = batch
        return {"activation_bytes": run_step(fake, args, kwargs, log)}

    found: list[DryRun] = []
    partial: dict[str, tuple[str, ...]] = {}
    for rank in ranks:
        with _fake_world(plan, device_type, rank) as mesh:
            fake = _fake_copy(model, device_type)
            batch = pytree.tree_map_only(torch.Tensor, lambda t: _fake(t, device_type), given)
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


def run_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], log: Recording | None = None) -> int:
    """Run forward and backward as in a dry run. Gradients of this step stay, earlier ones are dropped first.

    Returns the bytes that forward leaves alive for backward and for its caller; 0 without a recording.
    """
    for parameter in model.parameters():
        parameter.grad = None
    roots = fake_run.roots_of(model(*args, **kwargs))
    left = log.live.now - log.start_bytes if log is not None else 0
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return left


def _arguments(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of forward that an example is.

    Raises:
        PlanError: forward does not take them.
    """
    args, kwargs = as_call(example)
    takes = inspect.signature(model.forward)
    try:
        takes.bind(*args, **kwargs)
    except TypeError as error:
        count = len(args) + len(kwargs)
        raise PlanError(
            f"The example has {count} input{'' if count == 1 else 's'}, and {type(model).__name__}.forward takes "
            f"{takes}: {error}. Give example= a tuple, or a mapping by name; on the command line, --example NAME=SHAPE "
            "once for each input."
        ) from None
    return args, kwargs


def _fake_copy(model: nn.Module, device_type: str) -> nn.Module:
    """Return a copy of a module with fake tensors; no real tensor is copied."""
    return _torch.copied_with(model, lambda tensor: _fake(tensor, device_type))


def _fake(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_type)
    return fake.requires_grad_(tensor.requires_grad)


def _refuse_sharded(model: nn.Module) -> None:
    if is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PlanError(
            "The model is sharded already. Make the plan, with its example, from the single-device model, before "
            "shard_model; a model on `meta` will do."
        )


@contextmanager
def _fake_world(plan: Plan, device_type: str, rank: int = 0) -> Iterator[DeviceMesh]:
    """Enter a fake world with fake tensors; restore on exit what the engine enables inside."""
    shape = shape_with_stages(plan.mesh) if has_stages(plan) else plan.mesh
    world = _torch.fake_world(dict(shape.items()), device_type, rank)
    with ops.restored(), world as mesh, _explained(plan), _torch.fake_tensors(with_stages=has_stages(plan)):
        yield mesh


@contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Raise an error that names the limits of a dry run, and add a note to every other error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report lists gathered ops; a real run raises the other warnings
            yield
    except _torch.fake_tensor_errors() as error:
        raise PlanError(
            f"The dry run on {plan.mesh} stopped: the model's forward depends on values of tensors, which a dry run "
            f"does not have ({type(error).__name__}: {error}). Plan without example=, or record a real step with "
            "shardlib.engine.record_collectives."
        ) from error
    except Exception as error:
        error.add_note(f"Raised in a dry run on {plan.mesh}, which runs rank 0 with fake tensors.")
        raise
