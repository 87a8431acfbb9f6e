"""The objects that move parameters, gradients and optimizer state between the phases of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shardlib._plan import units_of, update_buckets
from shardlib.engine import _torch, ops
from shardlib.engine.apply.check import input_check
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.apply.root import Root
from shardlib.engine.apply.shard import ShardedTensors
from shardlib.engine.data import offload
from shardlib.engine.data.executor.gather import UpdateBucket
from shardlib.engine.data.gradients import GradientReducer
from shardlib.engine.data.params import MutableState, ParamState
from shardlib.engine.data.schedule import Updates, wait_in_model
from shardlib.engine.data.units import Units, make_units
from shardlib.engine.feature.comparison import Check, StepComparison
from shardlib.engine.model.casting import Casting
from shardlib.engine.undo import Undo
from shardlib.layout import shard_spec

__all__ = ["ParamRuntime", "casting", "install_param_runtime"]


@dataclass(frozen=True, eq=False)
class ParamRuntime:
    """The objects that move the parameters of a model and their gradients.

    Attributes:
        reducer: reduces gradients; it has the states of all parameters.
        units: unshards parameters; None if none is stored in shards.
        updates: all-gathers parameters after a step; None if no state is sharded without its parameter.
        comparison: what ranks compare in every step; None without `check="always"`.
        root: the hooks of the model.
    """

    reducer: GradientReducer
    units: Units | None
    updates: Updates | None
    comparison: StepComparison | None
    root: Root


def install_param_runtime(
    model: nn.Module,
    rank_plan: RankPlan,
    sharded: ShardedTensors,
    installed: Undo,
    undo: Undo,
    *,
    end_step: Callable[[], None] | None,
    check: Check,
    batch_norm_is_global: bool,
) -> ParamRuntime:
    """Install the hooks that move tensors in forward, backward and step, where the phases have different layouts.

    `installed` removes the hooks of modules, `undo` those of parameters. `end_step` is called after the last backward
    pass of a step.
    """
    param_states = [
        _param_state(rank_plan, name, param, sharded.masters.get(name)) for name, param in sharded.parameters.items()
    ]
    for one in param_states:
        if one.grad_dtype != one.param.dtype:
            _torch.set_grad_dtype(one.param, one.grad_dtype)
            undo.callback(_torch.set_grad_dtype, one.param, one.param.dtype)
    step = rank_plan.plan.step
    # Every mesh on which this model has DTensors, as for `float(p.grad.norm())` and `p[0].zero_()`. Another model may
    # have enabled it, which ranks free at different times.
    if any(one.shard_spec is not None or rank_plan.is_spread(one.name) for one in param_states):
        ops.enable(rank_plan.mesh, stored=True)
        if rank_plan.expert_mesh is not None:
            ops.enable(rank_plan.expert_mesh, stored=True)
    movements = [one.named(movement) for one in param_states for movement in one.movements.values()]
    units = None
    if any(one.is_stored_sharded for one in param_states):
        planned = units_of(movements, rank_plan.plan.units, rank_plan.shape, step)
        units = make_units(model, param_states, planned, rank_plan.executor)
    reducer = GradientReducer(
        param_states,
        rank_plan.executor,
        rank_plan.data_axes,
        step,
        everyone=rank_plan.everyone,
        end_pass=None if units is None else units.reshard_all,
        end_step=end_step,
    )
    undo.callback(reducer.remove)
    by_name, deferred = {one.name: one for one in param_states}, rank_plan.deferred
    buckets = [
        UpdateBucket(rank_plan.executor, [by_name[name] for name in bucket.names], deferred)
        for bucket in update_buckets(movements, rank_plan.shape, step, rank_plan.plan.repeated)
    ]
    updates = Updates(buckets, deferred) if buckets else None
    if units is not None:
        units.set_reducer(reducer)
    comparison = None
    if check == "always" and rank_plan.everyone is not None:
        comparison = StepComparison(
            model,
            param_states,
            rank_plan.everyone,
            rank_plan.executor,
            rank_plan.data_axes,
            rank_plan.model_axes,
            updates,
            batch_norm_is_global=batch_norm_is_global,
        )
        rank_plan.executor.compare_calls(comparison.before_call)
    in_calls = comparison if rank_plan.pipeline_group is None else None  # else `pipeline_step` calls it
    if in_calls is not None:
        reducer.compare = in_calls.before_backward
    inputs = input_check(rank_plan, compare=bool(check), comparison=in_calls)
    root = Root(reducer, inputs, units, casting(rank_plan))
    for handle in root.install(model):
        installed.callback(handle.remove)
    if updates is not None:
        for handle in wait_in_model(updates, model):
            installed.callback(handle.remove)
    return ParamRuntime(reducer, units, updates, comparison, root)


def _param_state(rank_plan: RankPlan, name: str, param: nn.Parameter, master: torch.Tensor | None) -> ParamState:
    row = rank_plan.rows[name]
    compute = rank_plan.on_compute_axes(row.compute)
    layout = rank_plan.on_active_axes(row.stored if row.state is None else row.state)
    sharding = shard_spec(compute, layout, row.global_shape, rank_plan.shape, rank_plan.coordinate)
    axes = rank_plan.added(compute, layout) if sharding is not None else ()
    spec = None
    if (compute_mesh := rank_plan.mesh_for(name, param)) is not None:
        placements = tuple(compute.placements(compute_mesh))
        spec = _torch.spec(compute_mesh, placements, tuple(row.global_shape), param.dtype)
    return ParamState(
        names=row.tied,
        param=param,
        axes=axes,
        shard_spec=sharding,
        compute=compute,
        layout=layout,
        mutable=MutableState(row, master=master),
        unit=rank_plan.plan.unit(row),
        list_movements=rank_plan.movements,
        executor=rank_plan.executor,
        transport=rank_plan.executor.transport(axes) if axes else None,
        compute_spec=spec,
        master_dtype=(row.state.dtype or row.dtype) if row.state is not None and row.has_master else None,
        offloaded=offload.offloaded_phases(row, rank_plan.device),
        pipeline_group=rank_plan.pipeline_group,
        is_counted=rank_plan.stages is None or rank_plan.stages.is_counted(name),
    )


def casting(rank_plan: RankPlan) -> Casting:
    """Return the dtypes that the model computes in."""
    computed = {row.compute.dtype or row.dtype for row in rank_plan.plan.rows if row.kind == "parameter"}
    low = {dtype for dtype in computed if dtype in (torch.bfloat16, torch.float16)}
    changed = any(row.compute.dtype not in (None, row.dtype) for row in rank_plan.plan.rows)
    inputs = low.pop() if len(low) == 1 and changed else None
    mixed = inputs if inputs is not None and len(computed) > 1 else None
    return Casting(rank_plan.device.type, rank_plan.plan.step.autocast or mixed, None if mixed else inputs)
