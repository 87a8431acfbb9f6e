"""A dry audit: a step of foreign code on any mesh, with types in the place of numbers.

The code runs as one rank of a fake world, on tensors without values. What is followed instead is over which axes of the
mesh each tensor differs, through forward, backward and the collectives of both.
"""

from __future__ import annotations

import functools
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.feature.recording import record_collectives
from shardlib.errors import InputError, PlanError, ShardlibError, short_traceback
from shardlib.testing.auditing.dry_findings import Sharded, folded, shapes_of, ties_of
from shardlib.testing.auditing.dry_grid import Grid
from shardlib.testing.auditing.dry_report import DryFinding, DryReport, DryWork, Kept
from shardlib.testing.auditing.dry_watch import Watch
from shardlib.testing.auditing.dry_world import foreign_world
from shardlib.testing.auditing.foreign import check_meshes, check_shard, not_on_cpus, plan_of, wants
from shardlib.testing.equivalence.case import default_loss

__all__ = ["DryFinding", "DryReport", "DryWork", "Kept", "dry_audit"]

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Any], torch.Tensor]


@short_traceback
def dry_audit(
    build: Build,
    shard: Callable[..., Any],
    mesh: MeshLike,
    example: Any,
    *,
    loss: Loss | None = None,
    rank: int = 0,
) -> DryReport:
    """Run a training step of code that shards a model, without values, devices or other ranks, and report on it.

    Args:
        build: returns the model for one device. It is called with `meta` as the default device, and if that fails
            without.
        shard: shards that model by its own means and returns it, or a tuple that has it; its first
            parameter is the model, and `mesh` or `device_mesh` the `DeviceMesh`.
        mesh: names and sizes of the axes, such as "dp=512,tp=8".
        example: the batch of one data rank, or a function that returns it; tensors may be on `meta`.
        loss: a function (model, batch) -> scalar; by default the loss in the output, or a mean over its elements.
        rank: the rank that runs.

    Raises:
        PlanError: the code raises, needs a value of a tensor, uses a kernel without a shape function, or returns
            another model.
        MeshError: the mesh has no such rank, or an axis of unknown size or kind.
        InputError: arguments of which nothing can be audited, or a mesh in another order than that of `shard`.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
        >>> def shard(model, mesh):
        ...     return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        >>> report = dry_audit(lambda: nn.Sequential(nn.Linear(8, 8)), shard, "dp=4,tp=2", torch.zeros(2, 8))
        >>> print(report.findings[0].kind, *report.findings[0].axes)
        unreduced gradient dp
    """
    start, notes = time.perf_counter(), list[str]()
    shape = _shape(mesh, rank)
    model = _built(build, notes)
    shapes, ties = shapes_of(model), ties_of(model)
    mode = _torch.foreign_mode()
    with foreign_world(shape, rank, notes) as (device_mesh, on_cpu):
        fake = _fake_copy(model, mode)
        with _explained(f"shard={_named(shard)}", shape):
            returned = shard(**_arguments(shard, fake, device_mesh))
        whole = _model_in(returned, shard)
        inner = _inner(whole, fake, shapes)
        _without_values(inner, mode)
        on_cpu.sharding = False
        watch = Watch(Grid(shape, map(_ranks_of, _torch.process_groups())))
        check_meshes(dict(inner.named_parameters()), shape)
        sharded = Sharded(inner, watch, shapes, ties)
        sharded.seed()
        with _explained("The training step", shape), _implicitly(), mode:
            batch = _batch(example, watch, shape)
            with record_collectives(inner, mesh=device_mesh, watch=watch) as log, _watching(watch):
                value = _step(whole, batch, loss or default_loss)
            work, kept = _work(watch), sharded.kept()
            findings, remarks = sharded.findings(), sharded.remarks(work, kept)
            notes += _notes(sharded, value, shape, rank)
            plan = plan_of(inner, shape)
    return DryReport(
        mesh=shape,
        rank=rank,
        findings=tuple(findings),
        remarks=tuple(remarks),
        step=log.report(),
        work=work,
        parameters=tuple(kept),
        plan=plan,
        notes=tuple(notes),
        seconds=time.perf_counter() - start,
    )


def _shape(mesh: MeshLike, rank: int) -> MeshShape:
    shape = MeshShape.of(mesh)
    if -1 in shape.sizes:
        raise PlanError(f'The mesh was given as "{shape}"; a dry audit has no processes to count: give all sizes.')
    shape.coordinate(rank)
    return shape


def _built(build: Build, notes: list[str]) -> nn.Module:
    """Return the model, on meta where it can be built there."""
    if not callable(build) or isinstance(build, nn.Module):
        raise PlanError(f"build= was given as {_named(build)}; give a function that returns the model.")
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        notes.append(f"The model was built with values: on meta it raises {type(error).__name__}.")
        try:
            model = build()
        except (Exception, SystemExit) as again:
            raise PlanError(f"build={_named(build)} raised {_place_of(again)}: {_reason(again)}") from again
    if not isinstance(model, nn.Module):
        raise PlanError(f"build={_named(build)} returned {_named(model)}; it has to return a torch.nn.Module.")
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise PlanError(f"build={_named(build)} returned a model that is sharded; shard it in shard=.")
    return model


def _fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    made = functools.partial(_fake, mode)
    copied = _torch.copied_with(model, made)
    for module in copied.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):  # neither a parameter nor a buffer
                setattr(module, name, made(value))
    return copied


def _fake(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    if _torch.is_fake_tensor(tensor):
        return tensor
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def _without_values(model: nn.Module, mode: Any) -> None:
    """Put fake tensors in the place of those that sharding has made."""
    known: dict[int, torch.Tensor] = {}
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in own:
            if not isinstance(tensor, DTensor) and not _torch.is_fake_tensor(tensor):
                made = known.setdefault(id(tensor), _torch.as_kind(_fake(mode, tensor.detach()), tensor))
                setattr(module, name, made)


def _arguments(shard: Callable[..., Any], model: nn.Module, mesh: Any) -> dict[str, Any]:
    """Return what `shard` is called with, as any audit calls it; but there is no folder with values."""
    check_shard(shard)
    given = {"model": model, "mesh": mesh}
    asked = wants(shard)
    if absent := [name for name, what in asked.items() if what not in given]:
        raise InputError(
            f"shard={_named(shard)} takes {absent[0]}, the folder of a checkpoint; a dry audit has no values to load. "
            "Give a function (model, mesh) -> model."
        )
    return {name: given[what] for name, what in asked.items()}


def _model_in(returned: Any, shard: Any) -> nn.Module:
    values = returned if isinstance(returned, tuple | list) else (returned,)
    found = next((each for each in values if isinstance(each, nn.Module)), None)
    if found is None:
        raise PlanError(
            f"shard={_named(shard)} returned {_named(returned)}; it has to return the model, or a tuple that has it."
        )
    return found


def _inner(whole: nn.Module, given: nn.Module, shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Return the module that names the parameters as `build` did: what was given, or its like.

    Raises:
        PlanError: neither is in the model.
    """
    if any(each is given for each in whole.modules()):
        return given
    inner = next(
        (each for each in whole.modules() if shapes.keys() <= {name for name, _ in each.named_parameters()}), None
    )
    if inner is None:
        absent = [name for name in shapes if name not in dict(whole.named_parameters())]
        raise PlanError(
            f"shard= returned another model, a {type(whole).__name__} without {len(absent)} of the {len(shapes)} "
            f"parameters that build= has, {', '.join(absent[:3])} among them. Return the model that shard= was given, "
            "or what wraps it."
        )
    return inner


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _batch(example: Any, watch: Watch, shape: MeshShape) -> Any:
    made = example() if callable(example) and not isinstance(example, torch.Tensor) else example
    data = watch.grid.of_axes(shape.data_axes)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty(tensor.shape, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)
        watch.marks.write(found, data)
        return found

    return pytree.tree_map_only(torch.Tensor, fake, made)


def _step(model: nn.Module, batch: Any, loss: Loss) -> torch.Tensor:
    value = loss(model, batch)
    if not isinstance(value, torch.Tensor) or value.ndim or not value.requires_grad:
        raise PlanError(
            f"The loss is {_named(value)}, which trains nothing; loss= has to return a scalar tensor that is computed "
            "from what the model returns."
        )
    value.backward()
    return value


@contextmanager
def _watching(watch: Watch) -> Iterator[None]:
    with _torch.watch_dtensors(watch.made, watch.taken):
        yield


@contextmanager
def _implicitly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _work(watch: Watch) -> tuple[DryWork, ...]:
    return tuple(
        DryWork(work.module, work.phase, watch.grid.whole_axes(work.alike), flops) for work, flops in watch.work.items()
    )


def _notes(sharded: Sharded, loss: torch.Tensor, shape: MeshShape, rank: int) -> Iterator[str]:
    place = ", ".join(f"{axis} {index}" for axis, index in shape.coordinate(rank).items())
    if shape.pipeline_axes:
        yield f"Rank {rank} stands for its stage alone ({place}); run the others with rank=."
    elif uneven := _uneven(sharded, shape):
        yield f"Rank {rank} ({place}) has the larger shards: {uneven} do not divide evenly."
    if sharded.by_hand:
        by = (
            f'over "{sharded.grid.axes(sharded.axis_by_hand)[0]}"'
            if sharded.axis_by_hand
            else "over an axis that nothing tells"
        )
        names = folded(name for name in sharded.names if name in sharded.by_hand)
        yield f"Plain tensors of another shape than before, taken to be split {by}: {names}."
    local = sharded.watch.marks.read(_torch.local_of(loss) if isinstance(loss, DTensor) else loss)
    if over := [axis for axis in sharded.grid.axes(local) if axis in shape.model_axes]:
        yield f"The loss differs over {', '.join(over)}: each rank has that of its own part."
    idle = (name for name, each in sharded.names.items() if each.requires_grad and each.grad is None)
    if unused := [name for name in idle if name not in sharded.withheld]:
        yield f"Parameters that get no gradient from this loss: {folded(unused)}."
    if sharded.watch.unknown:
        yield "Some collectives are over groups that do not follow the axes of the mesh; what they change is not known."


def _uneven(sharded: Sharded, shape: MeshShape) -> str:
    def is_uneven(each: Kept) -> bool:
        count = math.prod(shape[axis] for axis in each.sharded if axis not in each.replicated)
        local = torch.Size(each.local_shape).numel()
        return local * count != torch.Size(each.global_shape).numel() and each.name not in sharded.by_hand

    names = [each.name for each in sharded.kept() if is_uneven(each)]
    return folded(names)


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return getattr(value, "__qualname__", None) or f"a {type(value).__name__}"


@contextmanager
def _explained(what: str, shape: MeshShape) -> Iterator[None]:
    """Raise an error that says what stopped a dry audit, and where."""
    try:
        yield
    except ShardlibError:
        raise
    except (Exception, SystemExit) as error:
        raise PlanError(f"{what} stopped the dry audit on {shape} {_place_of(error)}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    if why := not_on_cpus(said):
        return why
    if isinstance(error, _torch.fake_tensor_errors()) or "is not supported for tensor subclasses" in said:
        return (
            f"it reads the value of a tensor, which a dry audit does not have ({said}). Compute it on the device, take "
            "it from a shape, or audit with ranks."
        )
    if isinstance(error, _torch.no_fake_kernel_errors()) or _lacks_a_fake(str(error)):
        return (
            f"it calls a kernel that does not say the shape of its result ({said}). Register one with "
            "torch.library.register_fake, choose another kernel, or audit with ranks."
        )
    return f"it raised {said}"


def _lacks_a_fake(text: str) -> bool:
    signs = "no fake impl", "fake kernel", "data pointer", "data is not allocated yet", "Cannot access data"
    return any(sign in text for sign in signs)


def _place_of(error: BaseException) -> str:
    """Return the innermost line that is neither torch's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if "/torch/" not in frame.filename and "/shardlib/" not in frame.filename]
    return f"at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else "within torch"
