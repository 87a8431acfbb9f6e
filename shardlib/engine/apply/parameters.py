"""What moves parameters, gradients and state between the phases of the plan, and is told of by optimizers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shardlib._plan import reshards_after_forward
from shardlib.engine import _torch, fp8, offload, ops, optimizer
from shardlib.engine.apply.check import input_check
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.apply.shard import Replaced
from shardlib.engine.executor.gather import update_buckets
from shardlib.engine.gradients import GradientReducer
from shardlib.engine.held import Held, remember
from shardlib.engine.region import Casting, Root
from shardlib.engine.schedule import Updates, wait_in_model
from shardlib.engine.units import Units, lend
from shardlib.layout import cut

__all__ = ["Movers", "casting", "install_fp8", "install_movers", "tell_optimizers"]


@dataclass(frozen=True, eq=False)
class Movers:
    """What moves the parameters of a model, their gradients and their state.

    Attributes:
        held: each parameter, and how its gradient and state lie.
        reducer: of gradients.
        units: parameters that are unsharded together; None where none is stored in shards.
        updates: what gathers parameters after a step; None where no state is split alone.
        late: modules that wait for their own updated parameters when they run.
    """

    held: Sequence[Held]
    reducer: GradientReducer
    units: Units | None
    updates: Updates | None
    late: tuple[str, ...]

    def by_name(self) -> dict[str, Held]:
        """Return each parameter by all its names."""
        return {name: one for one in self.held for name in one.names}


def install_movers(
    model: nn.Module,
    here: RankPlan,
    masters: Mapping[str, torch.Tensor],
    undo: ExitStack,
    *,
    everyone: dist.ProcessGroup | None,
    check: bool,
) -> Movers:
    """Let forwards, backward passes and steps move what the plan has in other layouts in between.

    Args:
        model: of local shards.
        here: the plan on this rank.
        masters: wide copies of parameters that were rounded, by name.
        undo: takes the hooks away.
        everyone: all ranks that train the model, of all stages.
        check: compare the first batch.
    """
    held = [_held_one(here, name, param, masters.get(name)) for name, param in model.named_parameters()]
    step = here.plan.step
    if any(one.cut is not None for one in held):
        ops.read_global_values(here.mesh)  # as in `float(p.grad.norm())`
    bucket_bytes = int(step.bucket_mb * 2**20)
    units = _lend(model, here, held, bucket_bytes)
    reducer = GradientReducer(
        held,
        here.executor,
        here.data_axes,
        bucket_bytes=bucket_bytes,
        passes=step.accumulate,
        dtype=step.reduce_dtype,
    )
    reducer.everyone = everyone
    undo.callback(reducer.remove)
    late = here.plan.repeated if step.overlap else ()
    updates = _update(here, held, bucket_bytes, late)
    if units is not None:
        units.give_gradients_to(reducer)
        reducer.at_the_end.append(units.let_go)
    root = Root(reducer, input_check(here, compare=check), units, casting(here))
    for handle in root.install(model):
        undo.callback(handle.remove)
    if updates is not None and late:
        for handle in wait_in_model(updates, model):
            undo.callback(handle.remove)
    return Movers(held, reducer, units, updates, late)


def _held_one(here: RankPlan, name: str, param: nn.Parameter, master: torch.Tensor | None) -> Held:
    row = here.rows[name]
    first = dict.fromkeys(here.shape.names, 0)
    compute = here.on_compute_axes(row.compute)
    state = row.stored if row.state is None else row.state
    division = cut(compute, here.on_active_axes(state), row.global_shape, here.shape, here.coordinate)
    axes = here.added(compute, state) if division is not None else ()
    spec = None
    if (compute_mesh := here.mesh_for(name, param)) is not None:
        places = tuple(compute.placements(compute_mesh))
        spec = _torch.spec(compute_mesh, places, tuple(row.global_shape), param.dtype)
    return Held(
        names=row.tied,
        param=param,
        axes=axes,
        cut=division,
        compute=compute,
        layout=here.on_active_axes(state),
        mesh=here.mesh,
        room=math.prod(compute.local_shape(row.global_shape, here.shape, first)),
        movements=here.movements.get(row.name, {}),
        transport=here.executor.transport(axes) if axes else None,
        compute_spec=spec,
        master_dtype=(row.state.dtype or row.dtype) if row.state is not None and row.has_master else None,
        first_master=master,
        device=here.device,
        hosted=offload.hosted(row, here.device),
        beyond=here.pipeline_group,
        counted=name not in here.counted_elsewhere,
    )


def _update(here: RankPlan, held: list[Held], bucket_bytes: int, late: Sequence[str]) -> Updates | None:
    """Let optimizers step on this rank's shards of parameters whose state is split and that are not stored so."""
    buckets = update_buckets(here.executor, held, bucket_bytes=bucket_bytes, late=late)
    updates = Updates(buckets, late)
    for one in (one for bucket in buckets for one in bucket.held):
        one.updates = updates
    return updates if buckets else None


def _lend(model: nn.Module, here: RankPlan, held: list[Held], bucket_bytes: int) -> Units | None:
    """Give parameters that are stored in shards memory in which they are whole while modules compute with them."""
    if not any(one.is_stored_in_parts for one in held):
        return None
    return lend(
        model,
        held,
        here.plan.units,
        lambda name: not reshards_after_forward(here.rows[name], here.plan.step),
        here.executor,
        bucket_bytes=bucket_bytes,
    )


def casting(here: RankPlan) -> Casting:
    """Return in which dtypes the model computes."""
    computed = {row.compute.dtype or row.dtype for row in here.plan.rows if row.kind == "parameter"}
    low = {dtype for dtype in computed if dtype in (torch.bfloat16, torch.float16)}
    changed = any(row.compute.dtype not in (None, row.dtype) for row in here.plan.rows)
    inputs = low.pop() if len(low) == 1 and changed else None
    mixed = inputs if inputs is not None and len(computed) > 1 else None
    return Casting(here.device.type, here.plan.step.autocast or mixed, None if mixed else inputs)


def install_fp8(
    model: nn.Module, here: RankPlan, linears: fp8.Linears, reducer: GradientReducer, undo: ExitStack
) -> fp8.History | None:
    """Let linear modules multiply in float8; return what they are scaled by, if by earlier steps.

    A step ends with its last backward pass.
    """
    steps, history = here.plan.step.fp8_history, None
    if steps and linears.names:
        history = fp8.History(linears, steps, here.device)
        reducer.at_the_end_of_steps.append(functools.partial(history.end_step, here.everyone))
    undo.callback(fp8.install(model, linears, history))
    return history


def tell_optimizers(model: nn.Module, here: RankPlan, movers: Movers, replaced: Replaced) -> None:
    """Let optimizers know the model's parameters. The last step, since nothing takes it back."""
    optimizer.watch_optimizers()
    for name, (before, after) in replaced.parameters.items():
        optimizer.adopt(name, before, after)
    for one in movers.held:
        remember(one)
    scaled = here.plan.step.scaler is not None
    special = any(one.master_dtype or one.hosted for one in movers.held)
    asked_of_optimizers = scaled or here.plan.step.accumulate > 1 or special
    if here.model_axes or here.data_axes or asked_of_optimizers or here.pipeline_group is not None:
        optimizer.look_after(model.parameters(), here.shape.data_ranks, movers.reducer, scaled=scaled)
