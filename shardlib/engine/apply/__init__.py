"""`shard_model`: a plan carried out on a model, all of it or nothing.

`apply_plan` is the steps in order. Each is a function in a file of its own, is given what is fixed about this rank
(`RankPlan`), and leaves its undo, so that an error in any of them leaves the model as it was:

    rank_plan.py    what the plan means on this rank
    check.py        what is refused, and what ranks must have alike
    initialize.py   the values that tensors on `meta` begin with
    shard.py        every tensor becomes this rank's local shard: parameters become DTensors
    install.py      hooks and forwards of modules: regions, borders, linears, experts, BatchNorm
    parameters.py   gradients, unsharded parameters, updates, optimizers
    calls.py        what stands around the calls of modules

What is kept of a sharded model is its record, `engine/sharded.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib import layouts
from shardlib._mesh import MeshLike, MeshShape, device_here, mesh
from shardlib._plan import Plan, plan
from shardlib.engine import _torch, exact, fp8
from shardlib.engine.apply.calls import compile_calls, wrap_calls
from shardlib.engine.apply.check import ranks_agree, refuse_model, refuse_plan, warn_of_idle_axes
from shardlib.engine.apply.initialize import initial_values
from shardlib.engine.apply.install import install_modules
from shardlib.engine.apply.parameters import casting, install_fp8, install_movers, tell_optimizers
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.apply.shard import shard_tensors
from shardlib.engine.compile import check_backend
from shardlib.engine.held import local_of
from shardlib.engine.pipeline import stages, weigh
from shardlib.engine.randomness import agree_on_random_state, share_random_state
from shardlib.engine.recompute import modules_to_recompute
from shardlib.engine.sharded import Sharded, is_sharded, keep, record_of
from shardlib.errors import PlanError
from shardlib.rules import Rules

__all__ = ["Sharded", "apply_plan", "is_sharded", "names_here", "no_sync", "plan_of", "record_of", "shard_model"]


def shard_model(
    model: nn.Module,
    mesh_: MeshLike,
    rules: Rules | Mapping[str, Any] | Plan | str | Path | None = None,
    *,
    transforms: Sequence[Callable[[Plan], Plan]] = (),
    init: Any = None,
    compile: str | None = "auto",
    check: bool = True,
    rng: str = "fast",
    global_batch_norm: bool = True,
    bucket_mb: float | None = None,
    example: Any = None,
) -> nn.Module:
    """Shard a model by rules, in place; the training loop stays as it is.

    Afterwards each data rank passes its own plain tensors (or nested structures of them) and gets plain tensors back.
    When `loss.backward()` returns, gradients are those of the mean loss over the data axes. Build the optimizer from
    `model.parameters()` after this call; any `torch.optim` optimizer works.

    Args:
        model: written for one device; on that device, on CPU, or on `meta`. Every rank holds the same one.
        mesh_: "dp=2,tp=4", a `MeshShape`, or a `DeviceMesh` with named axes.
        rules: `Rules`, a mapping from patterns to layouts, the name or path of a layout file, or a `Plan`; by default
            the layout that `layouts.for_model` finds for this class.
        transforms: functions from plan to plan, applied in order.
        init: where the values of a model on `meta` come from: a safetensors file or folder, a mapping from names to
            whole tensors, a function that initialises one module's own tensors, "reset_parameters", or several of
            these in order. None for what was built in a `LazyInitContext`. Each rank keeps only its shards, and reads
            only its slices of a file.
        compile: "auto", "aot_eager", "inductor" or None: how repeated blocks are compiled, once for all of them. A
            block that cannot be compiled runs eagerly. Without a split model axis nothing is compiled, nor where
            torch's compiler is switched off (TORCHDYNAMO_DISABLE=1).
        check: compare plans, first weights and the first batch between the ranks that must agree, and give each data
            rank a random stream of its own.
        rng: "exact" draws dropout, and what `init` draws, by global element index, so that they are bit for bit the
            same on every mesh, and those of one device inside `exact_random`. All ranks then share one state of the
            default CPU generator: draw your data from a generator of its own, and give each data rank as many
            examples as any other. "fast" is PyTorch's own: another stream for each data rank.
        global_batch_norm: in training, BatchNorm uses the statistics of all data ranks' examples, as one device would.
        bucket_mb: megabytes that travel in one collective over the data axes; by default what the plan says, 25.
        example: the batch of one data rank, only for stages that are weighed with it: `Balanced(by="flops")` and
            `Balanced(by="time")`. Its values do not matter.

    Returns:
        The same model. On an error it is as it was before.

    Raises:
        RuleError, LayoutError, PlanError: rules that do not say one clear thing about this model and mesh.
        MeshError: a mesh of another size than the number of processes.
        ShardingError: a model that is sharded already, or that ranks disagree on.
        CheckpointError: `init` does not fit the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> model = shard_model(model, "dp=1,tp=1", {"0": "colwise", "2": "rowwise"})
        >>> model(torch.zeros(2, 8)).shape
        torch.Size([2, 8])
    """
    check_backend(compile)
    exact.check_mode(rng)
    device_mesh = mesh(mesh_)
    refuse_model(model)
    the_plan = _planned(model, device_mesh, rules, transforms, example)
    if bucket_mb is not None:
        the_plan = the_plan.replace(step=the_plan.step.replace(bucket_mb=bucket_mb))
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


def plan_of(model: nn.Module) -> Plan:
    """The plan that a model was sharded by; its notes say which blocks are compiled and which modules multiply
    in float8, and why others do not.

    Raises:
        ShardingError: the model was not sharded by shardlib.

    >>> model = shard_model(nn.Linear(4, 8), "dp=1,tp=1", {"**": "colwise"})
    >>> plan_of(model).mesh
    MeshShape("dp=1,tp=1")
    """
    record = record_of(model)
    whole = record.plan if record.pipeline is None else record.pipeline.plan
    return dataclasses.replace(whole, notes=whole.notes + record.compiled.notes())


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Let backward passes inside only accumulate; the first one outside reduces the sum over the data axes.

    Until then `p.grad` is that of this rank's own examples, as large as the unsharded parameter. Where the plan stores
    a parameter in shards (stage 3 of ZeRO, FSDP), a full gradient has no place to stay: it is reduced in each pass,
    inside too, and `p.grad` is the mean over data ranks. `zero_grad()` clears either.

    >>> with no_sync(model):  # doctest: +SKIP
    ...     loss_fn(model(first), targets).backward()
    >>> loss_fn(model(second), targets).backward()  # doctest: +SKIP
    """
    return record_of(model).reducer.no_sync()


def apply_plan(
    model: nn.Module,
    plan_: Plan,
    device_mesh: DeviceMesh,
    *,
    init: Any = None,
    compile: str | None = None,
    check: bool = True,
    rng: str = "fast",
    global_batch_norm: bool = True,
) -> nn.Module:
    """Carry out a plan on a model, in place; on an error the model is as it was. Arguments as in `shard_model`."""
    exact_random, whole = rng == "exact", None
    if stages.has_pipeline(plan_):
        whole = stages.prepare(model, plan_, device_mesh, exact_random=exact_random)
        here = RankPlan.of_stages(model, whole)
    else:
        here = RankPlan.of(model, plan_, device_mesh, exact_random=exact_random)
    everyone = here.everyone if whole is None else whole.everyone

    refuse_plan(here)
    recomputed = modules_to_recompute(model, here.plan.step.recompute)
    float8 = fp8.choose(model, here.plan, here.device, here.regions)
    warn_of_idle_axes(here)
    _torch.set_timeouts(here.mesh if whole is None else whole.mesh)
    if check:
        ranks_agree(model, plan_.lines(), everyone, exact_random=exact_random)
    if exact_random:
        share_random_state(everyone)
    values = initial_values(model, here, init, check=check, names=None if whole is None else whole.names_here)

    with ExitStack() as undo:
        if whole is not None:
            whole.cut(model, undo)
        replaced = shard_tensors(model, here, values, undo)
        install_modules(model, here, undo, global_batch_norm=global_batch_norm)
        movers = install_movers(model, here, replaced.masters, undo, everyone=everyone, check=check)
        history = install_fp8(model, here, float8, movers.reducer, undo)
        backend = None if whole is not None and whole.place.splits_backward else compile
        compiled = compile_calls(model, here, backend, undo)
        pipeline = None
        if whole is not None:
            pipeline = whole.install(model, movers.by_name(), casting(here), here.root_mesh, undo)
        wrap_calls(model, movers, recomputed, undo, route=None if pipeline is None else pipeline.route, check=check)
        if check and not exact_random:
            agree_on_random_state(here.group(here.model_axes), here.random_stream)
        record = Sharded(
            plan=dataclasses.replace(here.plan, notes=here.plan.notes + float8.notes()),
            mesh=here.mesh,
            model_mesh=here.model_mesh,
            reducer=movers.reducer,
            compiled=compiled,
            fp8_history=history,
            units=movers.units,
            pipeline=pipeline,
            meets_in_modules=here.meets_in_modules,
            has_values=all(map(_torch.has_values, map(local_of, model.parameters()))),
        )
        undo.pop_all()
    tell_optimizers(model, here, movers, replaced)
    keep(model, record)
    return model


def _planned(
    model: nn.Module, device_mesh: DeviceMesh, rules: Any, transforms: Sequence[Any], example: Any = None
) -> Plan:
    weigh.refuse_idle_example(rules, example)
    if isinstance(rules, Plan):
        if rules.mesh != MeshShape.of(device_mesh):
            raise PlanError(
                f'The plan was made for mesh "{rules.mesh}", but the model is to be sharded on mesh '
                f'"{MeshShape.of(device_mesh)}". Make the plan again for this mesh: shardlib.plan(model, mesh, rules).'
            )
        return rules
    return plan(
        model,
        device_mesh,
        layouts.for_model(model) if rules is None else rules,
        transforms=transforms,
        weigh=weigh.measuring(example, device_here(device_mesh.device_type), device_mesh),
    )


def names_here(model: nn.Module) -> dict[str, str]:
    """Map what the whole model calls the parameters that this rank has to their names here."""
    return stages.names_here(model, record_of(model).pipeline)
