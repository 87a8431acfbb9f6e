"""One training step without data, devices or peers: what a plan will communicate and how much memory it will take.

The engine that carries out a plan runs unchanged, on tensors that have a shape and no values, as rank 0 of a world
whose other ranks are imagined. What is recorded is therefore what a real run does, not a model of it.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib import _plan
from shardlib._mesh import MeshLike
from shardlib._plan import DryRun, Plan, RulesLike, Transform
from shardlib.engine import _torch, ops
from shardlib.engine._torch import pytree
from shardlib.engine.apply import apply_plan, is_sharded
from shardlib.engine.pipeline import imagined as stages
from shardlib.engine.pipeline.cut import shape_with_stages
from shardlib.engine.pipeline.stages import has_pipeline
from shardlib.engine.pipeline.weigh import counting
from shardlib.engine.recording import Recording, record_collectives
from shardlib.errors import PlanError

__all__ = ["dry_run", "plan", "run_step"]


def plan(
    model: nn.Module,
    mesh: MeshLike,
    rules: RulesLike | None = None,
    *,
    transforms: Sequence[Transform] = (),
    example: Any = None,
) -> Plan:
    """How every tensor of a model lies on a mesh, in each phase of its life; nothing is sharded, no process is needed.

    Model axes of a rule split a parameter in all four phases (stored, compute, grad, state). A data axis that a rule
    puts on a parameter splits what is kept and not what is computed with.

    Args:
        model: a single-device module; it is only looked at, so it may be on `meta`.
        mesh: a `DeviceMesh`, or a shape such as "dp=8,tp=4".
        rules: a `Rules`, a mapping of patterns to layouts, or the name or path of a layout file; by default what
            `layouts.for_model` finds.
        transforms: functions from plan to plan, applied in order.
        example: the batch of one data rank, as a tuple of arguments, a mapping of keyword arguments or one tensor.
            With it, forward and backward are run on fake tensors, and the plan reports every collective, every op
            that must be gathered, and the peak of memory.

    Raises:
        RuleError, LayoutError: the rules do not say one clear thing about this model and mesh.
        MeshError, PlanError: the mesh has an axis of unknown size; a transform returned no plan; the model cannot be
            run without values.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> p = plan(model, "dp=2,tp=2", {"0": "colwise", "2": "rowwise"})
    >>> p["0.weight"].local_shape(p.mesh), p.memory().parameters
    ((4, 4), 160)
    """
    device_type = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    weigh = counting(example, torch.device(device_type))
    made = _plan.plan(model, mesh, rules, transforms=transforms, weigh=weigh)
    if example is None:
        return made
    return made.replace(report=dry_run(model, made, example, device_type=device_type))


def dry_run(model: nn.Module, plan: Plan, example: Any, *, device_type: str = "cpu") -> DryRun:
    """Predict one training step of a plan, on the rank whose pieces are the largest.

    The step is the second one: what happens only once (agreeing on the order of gradients) is left out. Backward
    starts from ones in every scalar output or, without any, in every differentiable output. While this runs, other
    threads of the process must not use `torch.distributed`.

    Args:
        model: the single-device model that the plan was made for; it is left as it is.
        plan: what to carry out.
        example: the batch of one data rank: a tuple of arguments, a mapping of keyword arguments, or one tensor.
        device_type: of the mesh.

    Raises:
        PlanError: the model is sharded already, or its forward depends on values of tensors.
    """
    _refuse_sharded(model)
    if has_pipeline(plan):
        return _of_stages(model, plan, example, device_type)
    args, kwargs = _arguments(example)
    with _imagined(plan, device_type) as mesh:
        fake = _fake_copy(model, device_type)
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _fake(t, device_type), (args, kwargs))
        apply_plan(fake, plan, mesh, check=False)
        run_step(fake, args, kwargs)
        with record_collectives(fake, mesh=mesh) as log:
            left = run_step(fake, args, kwargs, log)
        return dataclasses.replace(log.report(), activation_bytes=left)


def _of_stages(model: nn.Module, plan: Plan, example: Any, device_type: str) -> DryRun:
    """One rank of the pipeline after the other, each by the schedule."""
    found: list[DryRun] = []
    for rank in plan.mesh.groups(plan.mesh.only(plan.mesh.pipeline_axes).names)[0]:
        with _imagined(plan, device_type, rank) as mesh:
            fake = _fake_copy(model, device_type)
            batch = pytree.tree_map_only(torch.Tensor, lambda t: _fake(t, device_type), example)
            apply_plan(fake, plan, mesh, check=False)
            stages.run(fake, plan, batch)
            with record_collectives(fake, mesh=mesh) as log:
                own = stages.run(fake, plan, batch, log)
            found.append(dataclasses.replace(log.report(), stages=own))
    every = [stage for report in found for stage in report.stages]
    largest = max(found, key=lambda report: report.peak_bytes)
    return dataclasses.replace(largest, stages=tuple(sorted(every, key=lambda s: s.stage)), ranks=tuple(found))


def run_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], log: Recording | None = None) -> int:
    """Forward and backward as a dry run does them; gradients are left in place, earlier ones are dropped first.

    Returns what forward leaves alive for backward and for its caller, in bytes; 0 where nothing is recorded.
    """
    for parameter in model.parameters():
        parameter.grad = None
    outputs = [t for t in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    roots = [t for t in outputs if t.ndim == 0] or outputs
    left = log.live.now - log.start_bytes if log is not None else 0
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    return left


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example, {}) if isinstance(example, tuple) else ((example,), {})


def _fake_copy(model: nn.Module, device_type: str) -> nn.Module:
    """The same module tree with tensors that have no values; real ones are not copied."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): _fake(tensor, device_type) for tensor in tensors})


def _fake(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_type)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def _refuse_sharded(model: nn.Module) -> None:
    if is_sharded(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise PlanError(
            "The model is sharded already. Make the plan, with its example, from the single-device model, before "
            "shard_model; a model on `meta` will do."
        )


@contextmanager
def _imagined(plan: Plan, device_type: str, rank: int = 0) -> Iterator[DeviceMesh]:
    """Fake tensors and fake ranks; what the engine switches on inside is off again after it."""
    shape = shape_with_stages(plan.mesh) if has_pipeline(plan) else plan.mesh
    world = _torch.fake_world(dict(shape.items()), device_type, rank)
    with ops.restored(), world as mesh, _explained(plan), _torch.fake_tensors(with_stages=has_pipeline(plan)):
        yield mesh


@contextmanager
def _explained(plan: Plan) -> Iterator[None]:
    """Say what a dry run cannot do, and for every other error that it was one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the report lists what is gathered; a real run says the rest
            yield
    except _torch.fake_tensor_errors() as error:
        raise PlanError(
            f"The dry run on {plan.mesh} stopped: the model's forward depends on values of tensors, which a dry run "
            f"does not have ({type(error).__name__}: {error}). Plan without example=, or record a real step with "
            "shardlib.engine.record_collectives."
        ) from error
    except Exception as error:
        error.add_note(f"This happened in a dry run on {plan.mesh}: fake tensors, rank 0 of imagined ranks.")
        raise
