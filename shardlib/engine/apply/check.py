"""Checks before a model changes, and comparisons between ranks before they communicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._log import is_first_rank
from shardlib._plan import Row, say_absent_axes
from shardlib.engine import _torch
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.data import offload
from shardlib.engine.feature.comparison import SameBatches, StepComparison
from shardlib.engine.ranks import agree, lost, transport
from shardlib.engine.sharded import is_sharded, record_of
from shardlib.errors import InputError, PlanError, ShardingError, warn
from shardlib.layout import Dim, Layout

__all__ = ["input_check", "ranks_agree", "refuse_model", "refuse_modules", "refuse_plan", "warn_of_idle_axes"]


def refuse_model(model: nn.Module) -> None:
    """Refuse a model that is already sharded, or that has tensors without a global shape.

    Raises:
        ShardingError: the model is one of these.
    """
    if is_sharded(model):
        raise ShardingError(
            f"This {type(model).__name__} is sharded already, on mesh "
            f'"{record_of(model).plan.mesh}". Build a new model to shard it otherwise.'
        )
    for name, tensor in agree.named_tensors(model).items():
        if isinstance(tensor, DTensor):
            raise ShardingError(
                f'"{name}" is a DTensor already ({tensor.placements}); shard_model takes a model of plain tensors. '
                "Give it the model as it was before parallelize_module, fully_shard or distribute_tensor."
            )
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ShardingError(
                f'"{name}" has no shape yet (a lazy module). Run the model once on an example before sharding it.'
            )


def refuse_plan(rank_plan: RankPlan) -> None:
    """Refuse plans that are valid but not supported by the engine.

    Raises:
        PlanError: the plan is not supported.
    """
    first: dict[object, Row] = {}
    for row in rank_plan.plan.rows:
        first.setdefault(row.form, row)
    for row in first.values():
        _refuse_phases_apart(rank_plan, row)
        for layout in row.layouts.values():
            _refuse_what_torch_gathers_wrongly(rank_plan, row.name, layout)
        _refuse_what_ops_cut_otherwise(rank_plan, row)
    for border in rank_plan.plan.borders:
        if border.layout is not None:
            _refuse_what_torch_gathers_wrongly(rank_plan, f"{border.module}.{border.side}", border.layout)


def refuse_modules(model: nn.Module, rank_plan: RankPlan) -> None:
    """Refuse modules whose forward writes this data rank's part of the batch into their weights, and modules of
    TorchScript whose weights would be replaced.

    Raises:
        ShardingError: an embedding has `max_norm`, and the mesh has several data ranks; a module of TorchScript has
            tensors that are stored in shards, or is in a region.
    """
    _refuse_scripted(model, rank_plan)
    for name, module in model.named_modules() if rank_plan.data_axes else ():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ShardingError(
                f'"{name}" has max_norm={module.max_norm}: in forward it scales the rows of its weight that the batch '
                "names, and each data rank has other examples, so that replicas diverge. Scale the rows after the "
                "optimizer's step instead, and leave max_norm out; or use a mesh without data axes."
            )


def _refuse_scripted(model: nn.Module, rank_plan: RankPlan) -> None:
    for prefix, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        for name, tensor in module.state_dict(prefix=f"{prefix}." if prefix else "", keep_vars=True).items():
            if rank_plan.is_stored_sharded(name) or rank_plan.mesh_for(name, tensor) is not None:
                raise ShardingError(
                    f'"{prefix}" is a module of TorchScript ({type(module).__name__}), which computes with tensors of '
                    f'its own, and "{name}" would be {_as_placed(rank_plan, name)}. Shard the model before '
                    "torch.jit.script or torch.jit.trace, or without it; or keep these tensors replicated: data axes "
                    f'with zero(2) or a lower stage, or sl.zero(3) | sl.replicate("{prefix}").'
                )


def _as_placed(rank_plan: RankPlan, name: str) -> str:
    row = rank_plan.rows.get(name)
    return f'stored as "{row.stored}"' if row is not None and rank_plan.is_stored_sharded(name) else "a DTensor"


def _refuse_phases_apart(rank_plan: RankPlan, row: Row) -> None:
    """Refuse rows that a plan may have and the engine has no transition for."""
    stored, data = rank_plan.on_active_axes(row.stored), {*rank_plan.data_axes} - row.compute.axes
    for what, layout in (("gradient", row.grad), ("state", row.state)):
        if layout is not None and stored.axes & data and (layout.axes & data) != (stored.axes & data):
            raise PlanError(
                f'The plan stores "{row.name}" as "{row.stored}" and its {what} as "{layout}": these differ in their '
                "data axes, which can be planned but not run yet. Give stage 3 all of these axes, as in zero(3, "
                "axis=...), or keep the parameter replicated with zero(2)."
            )
    if (row.compute.dtype or row.dtype) != (row.stored.dtype or row.dtype):
        raise PlanError(
            f'The plan stores "{row.name}" as "{row.stored}" and computes with it as "{row.compute}": a parameter '
            "is computed with in the dtype that it is stored in. precision(...) keeps a wider copy with the state."
        )
    in_parts = bool(stored.axes & data)
    offload.refuse_what_does_not_run(row, rank_plan.device, stored_in_parts=in_parts)


def _refuse_what_torch_gathers_wrongly(rank_plan: RankPlan, name: str, layout: Layout) -> None:
    """Refuse a fused dim that is split over several axes: DTensor gathers its shards in a wrong order."""
    for dim in rank_plan.on_active_axes(layout).dims:
        if isinstance(dim, Dim) and len(dim.axes) > 1 and any(factor.axes for factor in dim.factors[1:]):
            raise PlanError(
                f'"{name}" has the layout "{layout}": a fused dim sharded over several axes can be planned but not '
                "run, since torch all-gathers such a DTensor in the wrong order. Shard it over one axis, and another "
                "dim over the other."
            )


def _refuse_what_ops_cut_otherwise(rank_plan: RankPlan, row: Row) -> None:
    """Refuse an uneven dim whose axes are not in the mesh's order, in which DTensor's ops split.

    Even splits in another order are fused splits, and supported; uneven ones would have other shards. Layouts of
    activations are checked when they are known, in `borders.py`.
    """
    layout = rank_plan.on_compute_axes(row.compute)
    for dim in layout.uneven_dims(row.global_shape, rank_plan.shape):
        given = layout.axes_of(dim)
        ordered = [axis for axis in rank_plan.compute_axes if axis in given]
        if list(given) != ordered:
            raise PlanError(
                f'"{row.name}", of global shape {row.global_shape}, has the layout "{row.compute}": dim {dim} is '
                f'sharded unevenly over {" and ".join(given)}, in another order than that of mesh "{rank_plan.shape}", '
                f"which can be planned but not run. Write @({','.join(ordered)}) there, or give the dim a size "
                f"that {math.prod(rank_plan.shape[axis] for axis in given)} divides."
            )


def warn_of_idle_axes(rank_plan: RankPlan) -> None:
    """Warn on the first rank of a model axis that splits no tensor: its ranks all compute the same."""
    lacking = say_absent_axes(rank_plan.plan.rules, rank_plan.shape)
    for axis in rank_plan.plan.idle_axes if is_first_rank() else ():
        warn(
            f'No rule shards anything over the model axis "{axis}" of mesh "{rank_plan.shape}": its '
            f"{rank_plan.shape[axis]} ranks compute the same. Name it in a rule, or make it a data axis.{lacking}",
        )


def ranks_agree(
    tensors: Mapping[str, torch.Tensor], lines: Sequence[str], group: dist.ProcessGroup | None, *, exact_random: bool
) -> None:
    """Exchange the processes of a group's ranks, and compare what these must have in common. Collective over the group.

    Raises:
        PlanError, ShardingError: ranks have different plans or weights.
    """
    lost.meet(group)
    settings = ['rng="exact"'] if exact_random else []
    if (chosen := transport.chosen()) is not None:
        settings.append(f'{transport.VARIABLE}="{chosen}"')
    agree.plans_agree([*lines, *settings], group)
    agree.weights_agree(tensors, group)


def input_check(rank_plan: RankPlan, *, compare: bool, comparison: StepComparison | None = None) -> Callable[..., None]:
    """Return a hook that checks the inputs of each forward.

    With `compare`, ranks with the same examples compare their first batch, with gradients and without, and data ranks
    that train on the same batches are warned of; with a `comparison`, they compare all that it has before every
    forward.
    """
    pending = {True, False} if compare and rank_plan.model_axes else set[bool]()
    data = rank_plan.group(rank_plan.data_axes) if compare and rank_plan.pipeline_group is None else None
    same = None if data is None else SameBatches(data, ", ".join(rank_plan.data_axes))
    device, group, axes = rank_plan.device, rank_plan.group(rank_plan.model_axes), ", ".join(rank_plan.model_axes)

    def check(_model: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in _torch.leaves_of(*args, *kwargs.values()):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type:
                raise InputError(_wrong_device(leaf, device))
        if comparison is not None:
            comparison.before_forward(args, kwargs)
        elif (trains := torch.is_grad_enabled()) in pending:
            pending.remove(trains)
            agree.batches_agree(args, kwargs, group, axes)
        if same is not None:
            same.before_forward(args, kwargs)

    return check


def _wrong_device(leaf: torch.Tensor, device: torch.device) -> str:
    return (
        f"An input of shape {tuple(leaf.shape)} is on {leaf.device}, but the model's mesh is on {device}. "
        f'Move the batch first: batch.to("{device.type}").'
    )
