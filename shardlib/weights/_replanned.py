"""The plan of a model that changes its mesh, and what forbids the change; before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan, Row, make_plan
from shardlib.checkpoint._items import first_names
from shardlib.checkpoint._peers import Peers
from shardlib.engine import _torch
from shardlib.engine.apply import checked, planned
from shardlib.engine.apply.copies import on_meta_again
from shardlib.engine.sharded import Sharded, is_sharded, record_of
from shardlib.engine.torn import refuse_torn
from shardlib.errors import InputError, MeshError, PlanError, ShardingError
from shardlib.layout import Layout
from shardlib.transforms import parse
from shardlib.weights._lying import check_sizes, refuse_in_backward

__all__ = ["check", "let_train", "ranks_of", "refuse_part", "replanned", "splits", "training"]


def check(model: Any, optimizers: Iterable[Any], mesh: Any, bucket_mb: float, node: int) -> None:
    """Check the arguments of `reshard`, and that the model is between two steps."""
    if not isinstance(mesh, DeviceMesh):  # one that a rank alone cannot make would let the others wait for it
        MeshShape.of(mesh).resolve(dist.get_world_size() if dist.is_initialized() else 1)
    refuse_torn("reshard", model)
    if not isinstance(model, nn.Module) or not is_sharded(model):
        inner = (
            [name for name, each in model.named_modules() if is_sharded(each)] if isinstance(model, nn.Module) else ()
        )
        do = (
            f"Give the sharded model in it, .{inner[0]}"
            if inner
            else "Shard it first: sl.shard_model(model, mesh, rules)"
        )
        raise ShardingError(f"reshard() was given a {type(model).__name__} that is not sharded. {do}.")
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise InputError(
                f"reshard(optimizer=...) was given a {type(each).__name__}; give a torch optimizer, or several."
            )
    check_sizes("reshard", node, bucket_mb=bucket_mb)
    refuse_in_backward("reshard", model)
    reducer = record_of(model).reducer
    if not reducer.enabled:
        raise ShardingError("reshard() was called inside no_sync(). Call it after optimizer.step(), outside.")
    graded = [name for name, param in model.named_parameters() if param.grad is not None]
    if graded or reducer.is_between_passes():
        what = f'{len(graded)} parameters have gradients, such as "{graded[0]}"' if graded else "a step has begun"
        raise ShardingError(
            f"{what}, and gradients are not moved. Call reshard() after optimizer.step() and "
            "optimizer.zero_grad(set_to_none=True)."
        )


def refuse_part(model: Any) -> None:
    """Refuse a model on a part of the job: the ranks without it do not call `reshard`."""
    if isinstance(model, nn.Module) and is_sharded(model) and dist.is_initialized():
        _check_ranks("a model", _torch.root_mesh(record_of(model).mesh))


def ranks_of(device_mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh in its order; it has all ranks of the job."""
    _check_ranks("a mesh", device_mesh)
    return tuple(_torch.ranks_of_mesh(device_mesh))


def _check_ranks(what: str, device_mesh: DeviceMesh) -> None:
    ranks = list(_torch.ranks_of_mesh(device_mesh))
    if dist.is_initialized() and len(ranks) != dist.get_world_size():
        raise MeshError(
            f"reshard() was given {what} on ranks {ranks}, in a job of {dist.get_world_size()} ranks; it changes the "
            "mesh of all of them. To train on others, shard a second model there, and copy the weights by "
            "sl.transfer(model, second), which all ranks call."
        )


def training(everyone: Peers, model: nn.Module) -> dict[str, bool]:
    """Return which parameters require gradients, by first name, those of other stages too. Collective."""
    first = first_names(model)
    told = everyone.gather(
        "tell what trains", lambda: {first.get(name, name): p.requires_grad for name, p in model.named_parameters()}
    )
    return {name: trains for of_rank in reversed(told) for name, trains in of_rank.items()}


def let_train(model: nn.Module, trains: Mapping[str, bool]) -> None:
    """Let parameters of a full model require gradients, or not."""
    for name, param in model.named_parameters():
        param.requires_grad_(trains[name])


def replanned(model: nn.Module, given: Any, device_mesh: DeviceMesh, trains: Mapping[str, bool]) -> Plan:
    """Return the new plan of a sharded model, checked: it can be carried out."""
    record, plain = record_of(model), on_meta_again(model)
    let_train(plain, trains)
    made = planned(plain, device_mesh, given) if isinstance(given, Plan) else _again(plain, record, device_mesh)
    checked(plain, made, device_mesh, exact_random=record.options["rng"] == "exact")
    _refuse_settings(record, made)
    return made


def _again(plain: nn.Module, record: Sharded, device_mesh: DeviceMesh) -> Plan:
    """Return the plan that the model's rules and transforms make on another mesh."""
    old = record.full_plan
    if old.rules is None:
        raise PlanError("This model was sharded by a plan without rules, from JSON. Give reshard() a Plan.")
    transforms = [_read(name) for name in old.transforms]
    made = planned(plain, device_mesh, old.rules, transforms)
    made = made.replace(step=made.step.replace(bucket_mb=old.step.bucket_mb))
    before = made if made.mesh == old.mesh else make_plan(plain, old.mesh, old.rules, transforms=transforms)
    edited = [row.name for row in old.rows if _differ(row, before[row.name])]
    if edited or before.step.replace(bucket_mb=old.step.bucket_mb) != old.step:
        what = f'as that of "{edited[0]}"' if edited else f"as {old.step}"
        raise PlanError(
            f"The plan that this model was sharded by has layouts or settings that its rules and transforms do not "
            f"make, {what}. Give reshard() a Plan that has them: sl.plan(model, mesh, rules, transforms=...)."
        )
    return made


def _differ(old: Row, new: Row) -> bool:
    return old.requires_grad == new.requires_grad and old.layouts != new.layouts


def _read(name: str) -> Any:
    try:
        return parse(name)
    except PlanError as error:
        raise PlanError(
            f"This model was sharded with the transform {name}, which is none of shardlib's. Give reshard() a Plan: "
            "sl.plan(model, mesh, rules, transforms=...)."
        ) from error


def _refuse_settings(record: Sharded, made: Plan) -> None:
    if made.step.scaler != record.plan.step.scaler:
        raise PlanError(
            f"The loss scale is {record.plan.step.scaler} now and {made.step.scaler} in the new plan, and optimizers "
            "keep the one that they began with. Give reshard() a Plan with the same precision."
        )
    apart = [row.name for row in made.rows if row.grad is not None and splits(row, made.mesh) > _split(row, made.mesh)]
    if record.reducer.reductions.registered is not None and apart:
        raise PlanError(
            f"register_gradient_reduction was called for this model, and the new plan shards gradient or state of "
            f'"{apart[0]}" over data axes. Call register_gradient_reduction(model, None) first, or give reshard() a '
            "Plan without zero, fsdp and hsdp."
        )


def splits(row: Row, mesh: MeshShape) -> int:
    """Return among how many ranks a tensor is split in the phase that splits it most."""
    return _ranks(row.layouts.values(), mesh)


def _split(row: Row, mesh: MeshShape) -> int:
    return _ranks([row.compute], mesh)


def _ranks(layouts: Iterable[Layout], mesh: MeshShape) -> int:
    return math.prod(mesh[axis] for axis in {axis for layout in layouts for axis in layout.axes})
