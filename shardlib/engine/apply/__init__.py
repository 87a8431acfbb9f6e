"""`shard_model`: carry out a plan on a model, completely or not at all.

`apply_plan` calls the steps in order. Each step is a function in its own file. It gets what is fixed about this rank
(`RankPlan`) and registers its undo, so that an error in any step leaves the model unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib import layouts
from shardlib._log import timed
from shardlib._mesh import device_here
from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan import Plan, make_plan, transformed
from shardlib.engine import _torch
from shardlib.engine.apply.additions import refuse_additions
from shardlib.engine.apply.calls import compile_calls, wrap_calls
from shardlib.engine.apply.check import ranks_agree, refuse_model, refuse_modules, refuse_plan, warn_of_idle_axes
from shardlib.engine.apply.copies import allow_copies
from shardlib.engine.apply.initialize import initial_values
from shardlib.engine.apply.install import install_modules
from shardlib.engine.apply.parameters import casting, install_param_runtime
from shardlib.engine.apply.pretrained import generate_together
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.apply.shard import shard_tensors
from shardlib.engine.apply.wrappers import refuse_wrappers
from shardlib.engine.data import optimizer
from shardlib.engine.data.params import local_of
from shardlib.engine.feature import exact, fp8
from shardlib.engine.feature.comparison import Check, check_choice
from shardlib.engine.feature.compile import check_backend
from shardlib.engine.feature.randomness import agree_on_random_state, share_random_state
from shardlib.engine.feature.recompute import modules_to_recompute
from shardlib.engine.pipeline import weigh
from shardlib.engine.pipeline.record import install_pipeline
from shardlib.engine.ranks import agree
from shardlib.engine.ranks.lost import naming_lost_ranks
from shardlib.engine.sharded import Sharded, is_sharded, keep, record_of
from shardlib.engine.undo import Undo
from shardlib.errors import InputError, PlanError, check_flags, short_traceback
from shardlib.rules import Rules

__all__ = [
    "Sharded",
    "apply_plan",
    "checked",
    "get_plan",
    "is_sharded",
    "names_here",
    "no_sync",
    "planned",
    "record_of",
    "shard_model",
]

M = TypeVar("M", bound=nn.Module)


@short_traceback
def shard_model(
    model: M,
    mesh: MeshLike,
    rules: Rules | Mapping[str, Any] | Plan | str | Path | None = None,
    *,
    transforms: Callable[[Plan], Plan] | Sequence[Callable[[Plan], Plan]] = (),
    init: Any = None,
    compile: str | None = "auto",
    check: Check = True,
    rng: str = "fast",
    global_batch_norm: bool = True,
    bucket_mb: float | None = None,
    example: Any = None,
) -> M:
    """Shard a model by rules, in place; the training loop does not change.

    Afterwards each data rank passes its own plain tensors (or nested structures of them) and gets plain tensors.
    When `loss.backward()` returns, `p.grad` is the gradient of the mean loss over the data axes. Build the optimizer
    from `model.parameters()` after this call; any `torch.optim` optimizer works.

    Args:
        model: a single-device model; on that device, on CPU, or on `meta`. Every rank passes the same model.
        mesh: "dp=2,tp=4", a `MeshShape`, or a `DeviceMesh` with named axes.
        rules: `Rules`, a mapping from patterns to layouts, the name or path of a layout file, or a `Plan`; by default
            the layout that `layouts.for_model` finds for this class.
        transforms: a function from plan to plan, or several, applied in order; also to a `Plan` given as rules.
        init: the source of the values of a model on `meta`: a safetensors file or folder, a mapping from names to full
            tensors, a function that initialises one module's own tensors, "reset_parameters", or several of these in
            order. None for a model that was built in a `LazyInitContext`. Each rank keeps only its local shards, and
            reads only its slices of a file.
        compile: the backend that compiles repeated blocks, once for all of them: "auto", "aot_eager", "inductor" or
            None. A block that cannot be compiled runs eagerly. Nothing is compiled without a model axis of several
            ranks, or if torch's compiler is disabled (TORCHDYNAMO_DISABLE=1).
        check: compare plans, initial weights and the first batch between the ranks that must agree, and give each
            data rank its own random stream. "always" compares in every step too, at some cost: where ranks are, each
            collective of the data axes, every batch, the tensors that ranks have in common, and which gradients are
            missing. Turn it on where numbers look odd, or ranks wait for each other.
        rng: "exact" draws dropout masks and the random values of `init` by global element index. They are then bit for
            bit the same on every mesh, and the same as on one device inside `exact_random`. All ranks share one state
            of the default CPU generator: draw your data from a separate generator, and give each data rank the same
            number of examples. "fast" uses PyTorch's generators, with a different stream for each data rank.
        global_batch_norm: in training, BatchNorm uses the statistics of all data ranks' examples, as one device would.
        bucket_mb: the size of a bucket for collectives over the data axes, in megabytes; by default that of the plan,
            25.
        example: the batch of one data rank, used only to weigh modules for `Balanced(by="flops")` and
            `Balanced(by="time")`. Its values do not matter.

    Returns:
        The same model. On an error it is unchanged.

    Raises:
        RuleError, LayoutError, PlanError: the rules are not unambiguous for this model and mesh.
        MeshError: the mesh size is not the number of processes.
        ShardingError: the model is already sharded, or ranks pass different models.
        CheckpointError: `init` does not fit the model.
        LostRankError: another rank has ended, or did not answer in time.
        InputError: `check` is none of these, `global_batch_norm` is no bool.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> model = shard_model(model, "dp=1,tp=1", {"0": "colwise", "2": "rowwise"})
        >>> model(torch.zeros(2, 8)).shape
        torch.Size([2, 8])
    """
    check_backend(compile)
    check_choice(check)
    check_flags("shard_model", InputError, global_batch_norm=global_batch_norm)
    exact.check_mode(rng)
    device_mesh = make_mesh(mesh)
    refuse_model(model)
    with timed(f"shard_model: plan of {type(model).__name__}"):
        the_plan = planned(model, device_mesh, rules, transforms, example)
    if bucket_mb is not None:
        the_plan = the_plan.replace(step=the_plan.step.replace(bucket_mb=bucket_mb))
    with timed(f"shard_model: {type(model).__name__} on {the_plan.mesh}"):
        return apply_plan(
            model,
            the_plan,
            device_mesh,
            init=init,
            compile=compile,
            check=check,
            rng=rng,
            global_batch_norm=global_batch_norm,
        )


def get_plan(model: nn.Module) -> Plan:
    """Return the plan that a model was sharded by.

    Its notes list the blocks that are compiled and the modules that multiply in float8, and the reasons of the others.
    After the first backward pass, its movements include the sums of gradients over model axes.

    Raises:
        ShardingError: the model was not sharded by shardlib.

    >>> model = shard_model(nn.Linear(4, 8), "dp=1,tp=1", {"**": "colwise"})
    >>> get_plan(model).mesh
    MeshShape("dp=1,tp=1")
    """
    record = record_of(model)
    plan_ = record.plan if record.pipeline is None else record.pipeline.stages.plan
    return dataclasses.replace(
        with_partial(plan_, partial_gradients(model)), notes=plan_.notes + record.compiled.notes()
    )


def partial_gradients(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the model axes over which the last gradients were partial sums, by canonical name of the parameter.

    On a pipeline these are the parameters of this rank's stages.
    """
    record = record_of(model)
    names = {} if record.pipeline is None else record.pipeline.stages.names
    return {names.get(one.name, one.name): one.row.partial for one in record.reducer.param_states}


def with_partial(plan_: Plan, partial: Mapping[str, tuple[str, ...]]) -> Plan:
    """Return a plan whose movements sum gradients over model axes too."""
    return plan_.map_rows(lambda row: row.replace(partial=partial.get(row.name, row.partial)) if row.grad else row)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward only accumulates; the first one outside reduces the sum over the data axes.

    Until then `p.grad` is the gradient of this rank's own examples, of the size of the unsharded parameter. If the plan
    stores a parameter in shards (ZeRO stage 3, FSDP), this rank cannot keep a full gradient: it is reduced in each
    pass, also inside the context, and `p.grad` is the mean over data ranks. `zero_grad()` clears both.

    >>> with no_sync(model):  # doctest: +SKIP
    ...     loss_fn(model(first), targets).backward()
    >>> loss_fn(model(second), targets).backward()  # doctest: +SKIP
    """
    return record_of(model).reducer.no_sync()


@naming_lost_ranks("sharding")
def apply_plan(
    model: M,
    plan_: Plan,
    device_mesh: DeviceMesh,
    *,
    init: Any = None,
    compile: str | None = None,
    check: Check = True,
    rng: str = "fast",
    global_batch_norm: bool = True,
    values: Mapping[str, torch.Tensor] | None = None,
    agreed: bool = False,
) -> M:
    """Carry out a plan on a model, in place; on an error the model is unchanged.

    For arguments see `shard_model`. `values` are this rank's local shards of a model on `meta`, by name. `agreed`: the
    ranks have sharded another model by this plan, so that they agree on it and on their random numbers.
    """
    exact_random = rng == "exact"
    rank_plan = checked(model, plan_, device_mesh, exact_random=exact_random)
    stages, everyone = rank_plan.stages, rank_plan.everyone
    recomputed = modules_to_recompute(model, rank_plan.plan.step.recompute)
    float8 = fp8.choose(model, rank_plan.plan, rank_plan.device, rank_plan.regions)
    warn_of_idle_axes(rank_plan)
    _torch.set_timeouts(rank_plan.mesh if stages is None else stages.mesh)
    tensors = agree.named_tensors(model)
    if check and not agreed:
        ranks_agree(tensors, plan_.lines(), everyone, exact_random=exact_random)
    if exact_random and not agreed:
        share_random_state(everyone)
    with Undo() as undo:
        undo.callback(_torch.hold_patches(model))
        if values is None:
            given = init is not None or any(tensor.is_meta for tensor in tensors.values())
            values = initial_values(model, rank_plan, init, check=bool(check)) if given else {}
        if stages is not None:
            stages.cut(model, undo)
        sharded = shard_tensors(model, rank_plan, values, undo)
        installed = Undo()
        undo.callback(installed.run)
        install_modules(model, rank_plan, installed, global_batch_norm=global_batch_norm)
        runtime = install_param_runtime(
            model,
            rank_plan,
            sharded,
            installed,
            undo,
            end_step=float8.end_step(rank_plan.mesh_group),
            check=check,
            batch_norm_is_global=global_batch_norm,
        )
        installed.callback(fp8.install(model, float8))
        backend = None if stages is not None and stages.splits_backward else compile
        compiled = compile_calls(model, rank_plan, backend, installed)
        pipeline = None
        if stages is not None:
            by_name = {name: one for one in runtime.reducer.param_states for name in one.names}
            cast = casting(rank_plan)
            pipeline = install_pipeline(model, stages, by_name, cast, rank_plan.root_mesh, installed)
        wrap_calls(
            model,
            rank_plan,
            runtime.units,
            runtime.updates,
            runtime.root,
            recomputed,
            installed,
            route=None if pipeline is None else pipeline.route,
            check=bool(check),
        )
        if rank_plan.meets_in_modules:
            generate_together(model, installed)
        if check and not agreed and not exact_random:
            share_random_state(rank_plan.pipeline_group)
            agree_on_random_state(rank_plan.group(rank_plan.model_axes), rank_plan.random_stream)
        record = Sharded(
            plan=dataclasses.replace(rank_plan.plan, notes=rank_plan.plan.notes + float8.notes()),
            mesh=rank_plan.mesh,
            reducer=runtime.reducer,
            compiled=compiled,
            stateful=float8.stateful,
            units=runtime.units,
            updates=runtime.updates,
            pipeline=pipeline,
            meets_in_modules=rank_plan.meets_in_modules,
            comparison=runtime.comparison,
            has_values=all(map(_torch.has_values, map(local_of, sharded.parameters.values()))),
            installed=installed,
            options={"compile": compile, "check": check, "rng": rng, "global_batch_norm": global_batch_norm},
        )
        shard_again = functools.partial(apply_plan, plan_=plan_, device_mesh=device_mesh, agreed=True, **record.options)
        allow_copies(model, shard_again, installed)
        refuse_wrappers(model, installed)
    optimizer.watch_optimizers(sharded.replaced)
    keep(model, record, installed)
    refuse_additions(model, record)
    return model


def checked(model: nn.Module, plan_: Plan, device_mesh: DeviceMesh, *, exact_random: bool) -> RankPlan:
    """Return a plan on this rank, once it is known that the engine can carry it out on this model."""
    rank_plan = RankPlan.of(model, plan_, device_mesh, exact_random=exact_random)
    refuse_plan(rank_plan)
    refuse_modules(model, rank_plan)
    return rank_plan


def planned(model: nn.Module, device_mesh: DeviceMesh, rules: Any, transforms: Any = (), example: Any = None) -> Plan:
    """Return the plan for a model on a mesh, by rules or from a plan; for arguments see `shard_model`."""
    weigh.refuse_idle_example(rules, example)
    if isinstance(rules, Plan):
        if rules.mesh != MeshShape.of(device_mesh):
            raise PlanError(
                f'The plan was made for mesh "{rules.mesh}", but the model is to be sharded on mesh '
                f'"{MeshShape.of(device_mesh)}". Make the plan again for this mesh: shardlib.plan(model, mesh, rules).'
            )
        return transformed(rules, transforms)
    return make_plan(
        model,
        device_mesh,
        layouts.for_model(model) if rules is None else rules,
        transforms=transforms,
        weigh=weigh.weighing(example, device_here(device_mesh.device_type), device_mesh),
    )


def names_here(model: nn.Module) -> dict[str, str]:
    """Map canonical parameter names, those of the unsplit model, to the names on this rank."""
    pipeline = record_of(model).pipeline
    return {name: name for name, _ in model.named_parameters()} if pipeline is None else pipeline.stages.names_here
