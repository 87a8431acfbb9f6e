"""What is refused before a model changes, and what ranks must agree on before they wait for each other."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import Row
from shardlib.engine import _torch, agree, lost, offload, transport
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.apply.shard import named_tensors
from shardlib.engine.sharded import is_sharded, record_of
from shardlib.errors import InputError, PlanError, ShardingError
from shardlib.layout import Dim, Layout

__all__ = ["input_check", "ranks_agree", "refuse_model", "refuse_plan", "warn_of_idle_axes"]


def refuse_model(model: nn.Module) -> None:
    """Refuse a model that is sharded, or that has tensors without a global shape.

    Raises:
        ShardingError: it is one.
    """
    if is_sharded(model):
        raise ShardingError(
            f"This {type(model).__name__} is sharded already, on mesh "
            f'"{record_of(model).plan.mesh}". Build a new model to shard it otherwise.'
        )
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, DTensor):
            raise ShardingError(
                f'"{name}" is a DTensor already ({tensor.placements}); shard_model takes a model of plain tensors. '
                "Give it the model as it was before parallelize_module, fully_shard or distribute_tensor."
            )
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ShardingError(
                f'"{name}" has no shape yet (a lazy module). Run the model once on an example before sharding it.'
            )


def refuse_plan(here: RankPlan) -> None:
    """Refuse what a plan may say and the engine does not carry out.

    Raises:
        PlanError: the plan says such a thing.
    """
    for row in here.plan.rows:
        _refuse_phases_apart(here, row)
        for layout in row.layouts.values():
            _refuse_what_torch_gathers_wrongly(here, row.name, layout)
        _refuse_what_ops_cut_otherwise(here, row)
    for border in here.plan.borders:
        if border.layout is not None:
            _refuse_what_torch_gathers_wrongly(here, f"{border.module}.{border.side}", border.layout)


def _refuse_phases_apart(here: RankPlan, row: Row) -> None:
    """Refuse rows that a plan may have and the engine has no transition for."""
    stored, data = here.on_active_axes(row.stored), {*here.data_axes} - row.compute.axes
    for what, layout in (("gradient", row.grad), ("state", row.state)):
        if layout is not None and stored.axes & data and (layout.axes & data) != (stored.axes & data):
            raise PlanError(
                f'The plan stores "{row.name}" as "{row.stored}" and its {what} as "{layout}": over other data '
                "axes, which can be planned but not run yet. Give stage 3 all of these axes, as in "
                "zero(3, axis=...), or keep the parameter whole with zero(2)."
            )
    if (row.compute.dtype or row.dtype) != (row.stored.dtype or row.dtype):
        raise PlanError(
            f'The plan stores "{row.name}" as "{row.stored}" and computes with it as "{row.compute}": a parameter '
            "is computed with in the dtype that it is stored in. precision(...) keeps a wider copy with the state."
        )
    in_parts = bool(stored.axes & data)
    offload.refuse_what_does_not_run(row, here.device, stored_in_parts=in_parts)


def _refuse_what_torch_gathers_wrongly(here: RankPlan, name: str, layout: Layout) -> None:
    """Refuse a fused dim that is split over two axes: DTensor's shards are right, but not what it gathers from them."""
    for dim in here.on_active_axes(layout).dims:
        if isinstance(dim, Dim) and len(dim.axes) > 1 and any(factor.axes for factor in dim.factors[1:]):
            raise PlanError(
                f'"{name}" is laid out as "{layout}": a fused dim split over more than one axis can '
                "be planned but not run, since torch gathers such a DTensor in the wrong order. Split it over one "
                "axis, and another dim over the other."
            )


def _refuse_what_ops_cut_otherwise(here: RankPlan, row: Row) -> None:
    """Refuse an uneven dim whose axes stand in another order than the mesh's: ops cut and join in the mesh's order.

    Where the split is even that is a fused split; of uneven pieces it would make others. Activations are looked at
    when they come, in `borders.py`.
    """
    layout = here.on_compute_axes(row.compute)
    for dim in layout.uneven_dims(row.global_shape, here.shape):
        given = layout.axes_of(dim)
        ordered = [axis for axis in here.compute_axes if axis in given]
        if list(given) != ordered:
            raise PlanError(
                f'"{row.name}", of global shape {row.global_shape}, is laid out as "{row.compute}": dim {dim} is '
                f'split unevenly over {" and ".join(given)}, in another order than that of mesh "{here.shape}", '
                f"which can be planned but not run. Write @({','.join(ordered)}) there, or give the dim a size "
                f"that {math.prod(here.shape[axis] for axis in given)} divides."
            )


def warn_of_idle_axes(here: RankPlan) -> None:
    """Warn of a model axis that splits nothing: its ranks compute the same, each for itself."""
    used = {axis for row in here.plan.rows for axis in row.compute.axes}
    used |= {axis for border in here.plan.borders if border.layout is not None for axis in border.layout.axes}
    for axis in here.model_axes:
        if axis not in used:
            warnings.warn(
                f'No rule splits anything over the model axis "{axis}" of mesh "{here.shape}": its '
                f"{here.shape[axis]} ranks compute the same. Name it in a rule, or make it a data axis.",
                stacklevel=4,
            )


def ranks_agree(model: nn.Module, lines: Sequence[str], group: dist.ProcessGroup | None, *, exact_random: bool) -> None:
    """Compare what all ranks of a group must have alike, and learn how to find each other. Collective over the group.

    Args:
        model: before it changes.
        lines: of the plan.
        group: all ranks that train the model, of all stages.
        exact_random: whether random numbers are drawn by global element.

    Raises:
        PlanError, ShardingError: ranks have different plans or weights.
    """
    settings = ['rng="exact"'] if exact_random else []
    if (chosen := transport.chosen()) is not None:
        settings.append(f'{transport.VARIABLE}="{chosen}"')
    agree.plans_agree([*lines, *settings], group)
    agree.weights_agree(agree.all_tensors(model), group)
    lost.meet(group)


def input_check(here: RankPlan, *, compare: bool) -> Callable[..., None]:
    """Return what looks at the inputs of each forward.

    Args:
        here: the plan on this rank.
        compare: whether ranks with the same examples compare their first batch.
    """
    pending = [compare and bool(here.model_axes)]
    device, group, axes = here.device, here.group(here.model_axes), ", ".join(here.model_axes)

    def look(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in _torch.leaves_of(*args, *kwargs.values()):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type:
                raise InputError(_wrong_device(leaf, device))
        if pending[0]:
            pending[0] = False
            agree.batches_agree(args, kwargs, group, axes)

    return look


def _wrong_device(leaf: torch.Tensor, device: torch.device) -> str:
    return (
        f"An input of shape {tuple(leaf.shape)} is on {leaf.device}, but the model's mesh is on {device}. "
        f'Move the batch first: batch.to("{device.type}").'
    )
