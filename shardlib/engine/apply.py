"""`shard_model`: a plan carried out on a model, all of it or nothing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib import layouts
from shardlib._mesh import MeshLike, MeshShape, device_here, mesh
from shardlib._plan import Movement, Plan, Purpose, Row, lets_go, plan
from shardlib.engine import (
    _torch,
    agree,
    balance,
    batchnorm,
    borders,
    exact,
    experts,
    fp8,
    lost,
    materialize,
    offload,
    ops,
    optimizer,
    state,
    transport,
)
from shardlib.engine.compile import CompileReport, check_backend, compile_blocks
from shardlib.engine.conversion import refuse_conversions
from shardlib.engine.executor import Executor
from shardlib.engine.executor.gather import update_buckets
from shardlib.engine.gradients import GradientReducer
from shardlib.engine.held import Held, local_of, remember
from shardlib.engine.linear import compute_locally, is_linear
from shardlib.engine.pipeline import stages, weigh
from shardlib.engine.randomness import agree_on_random_state, share_random_state
from shardlib.engine.recompute import modules_to_recompute, recompute
from shardlib.engine.region import Casting, Root, install_region
from shardlib.engine.regions import find_regions, inside
from shardlib.engine.schedule import Updates, wait_in_modules
from shardlib.engine.units import Units, install, lend
from shardlib.errors import InputError, PlanError, ShardingError
from shardlib.layout import Dim, Layout, cut
from shardlib.rules import Rules

__all__ = ["Sharded", "apply_plan", "is_sharded", "names_here", "no_sync", "plan_of", "record_of", "shard_model"]


@dataclass(eq=False)
class Sharded:
    """What shardlib keeps of a sharded model.

    Where the mesh has a pipeline axis, `plan` and `mesh` are those of this rank's stages. `meets_in_modules`: whether
    some wait for other data ranks while they compute.
    """

    plan: Plan
    mesh: DeviceMesh
    model_mesh: DeviceMesh | None
    reducer: GradientReducer
    compiled: CompileReport
    fp8_history: fp8.History | None = None
    units: Units | None = None
    pipeline: stages.Pipeline | None = None
    meets_in_modules: bool = False


_TRAVELLING = "how many tokens come to the experts of a rank is known when they do, and a graph has to know it before"

_sharded: WeakKeyDictionary[nn.Module, Sharded] = WeakKeyDictionary()


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
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> model = shard_model(model, "dp=1,tp=1", {"0": "colwise", "2": "rowwise"})
        >>> model(torch.zeros(2, 8)).shape
        torch.Size([2, 8])
    """
    check_backend(compile)
    exact.check_mode(rng)
    device_mesh = mesh(mesh_)
    _refuse_unfit(model)
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

    >>> model = shard_model(torch.nn.Linear(4, 8), "dp=1,tp=1", {"**": "colwise"})
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
    exact_random = rng == "exact"
    if not stages.has_pipeline(plan_):
        build = _Build(model, plan_, device_mesh, exact_random=exact_random)
        with ExitStack() as undo:
            record = build.carry_out(undo, init=init, compile=compile, check=check, global_batch_norm=global_batch_norm)
            _sharded[model] = record
            undo.pop_all()
        return model
    whole = stages.prepare(model, plan_, device_mesh, exact_random=exact_random, check=check)
    build = _Build(model, whole.stage_plan, whole.stage_mesh)
    with ExitStack() as undo:
        build.kept = {first: name for name, first in whole.names.items()}
        build.values = build.initial_values(init, check=check)
        build.streams_before = whole.place.index * build.shape.data_ranks
        whole.cut(model, undo)
        record = build.carry_out(
            undo,
            init=None,
            compile=None if whole.place.splits_backward else compile,
            check=check,
            global_batch_norm=global_batch_norm,
        )
        record.pipeline = whole.install(model, record.reducer, build.casting(), undo)
        record.pipeline.route.region = build.model_mesh if "" in build.regions else None
        _sharded[model] = record
        undo.pop_all()
    return model


class _Build:
    """The steps of `apply_plan`; each leaves an undo on the stack it is given."""

    def __init__(self, model: nn.Module, plan_: Plan, device_mesh: DeviceMesh, *, exact_random: bool = False) -> None:
        self.model, self.plan, self.mesh, self.exact_random = model, plan_, device_mesh, exact_random
        self.shape = MeshShape.of(device_mesh)
        self.model_axes = _active(self.shape, self.shape.model_axes)
        self.data_axes = _active(self.shape, self.shape.data_axes)
        self.model_mesh = device_mesh[self.model_axes] if self.model_axes else None
        self.expert_axes = _active(self.shape, self.shape.expert_axes)
        self.compute_axes = tuple(axis for axis in self.shape.names if axis in self.model_axes + self.expert_axes)
        self.expert_mesh = device_mesh[self.compute_axes] if self.expert_axes else None
        self.device = device_here(device_mesh.device_type)
        self.executor = Executor(device_mesh, self.device)
        self.coordinate = self.shape.at(_position(device_mesh))
        self.rows = {name: row for row in plan_.rows for name in (row.name, *row.tied)}
        self.regions = self._find_regions()
        self._masters: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] | None = None  # of tensors on meta, where they are known already
        self.kept: dict[str, str] | None = None  # what is not another stage's: its name in the whole model, and here
        self.streams_before = 0  # random streams of the stages before this one
        self.units: Units | None = None
        self.updates: Updates | None = None

    def carry_out(
        self, undo: ExitStack, *, init: Any, compile: str | None, check: bool, global_batch_norm: bool
    ) -> Sharded:
        """All of it, in order."""
        model, plan_ = self.model, self.plan
        self.refuse_what_is_not_built()
        again = modules_to_recompute(model, plan_.step.recompute)
        float8 = fp8.choose(model, plan_, self.device, self.regions)
        self.warn_of_idle_axes()
        _torch.set_timeouts(self.mesh)
        if check:
            self.check_ranks_agree()
        if self.exact_random:
            share_random_state(self.group_of_all())
        self.replace_tensors(init, undo, check=check)
        reducer = self.install(undo, check=check, global_batch_norm=global_batch_norm)
        history = self.fp8_history(float8, reducer)
        undo.callback(fp8.install(model, float8, history))
        mode = compile if self.model_mesh is not None else None
        report, uncompile = compile_blocks(model, mode, self.place(), eager=dict.fromkeys(self.spread, _TRAVELLING))
        undo.callback(uncompile)
        if self.units is not None:
            undo.callback(install(self.units, model))
        if self.updates is not None and plan_.step.overlap:
            undo.callback(wait_in_modules(self.updates, model, plan_.repeated))
        undo.callback(recompute(model, again, self.units))
        if check:
            undo.callback(lost.watch_forward(model))
        if check and not self.exact_random:
            self.share_random_state()
        told = dataclasses.replace(plan_, notes=plan_.notes + float8.notes())
        waiting = any(map(batchnorm.is_batch_norm, model.modules()))
        stored = any(row.stored.axes & {*self.data_axes} for row in plan_.rows)
        meets = waiting or stored
        return Sharded(told, self.mesh, self.model_mesh, reducer, report, history, self.units, meets_in_modules=meets)

    def refuse_what_is_not_built(self) -> None:
        for row in self.plan.rows:
            self._refuse_phases_apart(row)
            for layout in row.layouts.values():
                self._refuse_what_torch_gathers_wrongly(row.name, layout)
            self._refuse_what_ops_cut_otherwise(row)
        for border in self.plan.borders:
            if border.layout is not None:
                self._refuse_what_torch_gathers_wrongly(f"{border.module}.{border.side}", border.layout)

    def _refuse_phases_apart(self, row: Row) -> None:
        """Rows that a plan may have and the engine has no transition for."""
        stored, data = self._on_active_axes(row.stored), {*self.data_axes} - row.compute.axes
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
        offload.refuse_what_does_not_run(row, self.device, stored_in_parts=in_parts)

    def warn_of_idle_axes(self) -> None:
        """A model axis that splits nothing makes its ranks compute the same thing, each for itself."""
        used = {axis for row in self.plan.rows for axis in row.compute.axes}
        used |= {axis for border in self.plan.borders if border.layout is not None for axis in border.layout.axes}
        for axis in self.model_axes:
            if axis not in used:
                warnings.warn(
                    f'No rule splits anything over the model axis "{axis}" of mesh "{self.shape}": its '
                    f"{self.shape[axis]} ranks compute the same. Name it in a rule, or make it a data axis.",
                    stacklevel=4,
                )

    def _refuse_what_torch_gathers_wrongly(self, name: str, layout: Layout) -> None:
        """A fused dim split over two axes: DTensor's shards are right, but what it gathers from them is not."""
        for dim in self._on_active_axes(layout).dims:
            if isinstance(dim, Dim) and len(dim.axes) > 1 and any(factor.axes for factor in dim.factors[1:]):
                raise PlanError(
                    f'"{name}" is laid out as "{layout}": a fused dim split over more than one axis can '
                    "be planned but not run, since torch gathers such a DTensor in the wrong order. Split it over one "
                    "axis, and another dim over the other."
                )

    def _refuse_what_ops_cut_otherwise(self, row: Row) -> None:
        """An uneven dim whose axes stand in another order than the mesh's: our ops cut and join in the mesh's order.

        Where the split is even that is a fused split; of uneven pieces it would make others. Activations are looked at
        when they come, in `borders.py`.
        """
        layout = self._on_compute_axes(row.compute)
        for dim in layout.uneven_dims(row.global_shape, self.shape):
            given = layout.axes_of(dim)
            ordered = [axis for axis in self.compute_axes if axis in given]
            if list(given) != ordered:
                raise PlanError(
                    f'"{row.name}", of global shape {row.global_shape}, is laid out as "{row.compute}": dim {dim} is '
                    f'split unevenly over {" and ".join(given)}, in another order than that of mesh "{self.shape}", '
                    f"which can be planned but not run. Write @({','.join(ordered)}) there, or give the dim a size "
                    f"that {math.prod(self.shape[axis] for axis in given)} divides."
                )

    def check_ranks_agree(self) -> None:
        group = self._group(self.shape.names)
        said = ['rng="exact"'] if self.exact_random else []
        if (chosen := transport.chosen()) is not None:
            said.append(f'{transport.VARIABLE}="{chosen}"')
        agree.plans_agree([*self.plan.lines(), *said], group)
        agree.weights_agree(agree.all_tensors(self.model), group)
        lost.meet(group)

    def share_random_state(self) -> None:
        index, _ = self.shape.data_place(self.coordinate)
        agree_on_random_state(self._group(self.model_axes), self.streams_before + index)

    def group_of_all(self) -> dist.ProcessGroup | None:
        return self._group(self.shape.names)

    def place(self) -> exact.Place | None:
        """Where this rank stands on the data axes, if random numbers are drawn by that."""
        return exact.Place(*self.shape.data_place(self.coordinate)) if self.exact_random else None

    def replace_tensors(self, init: Any, undo: ExitStack, *, check: bool) -> None:
        """Every parameter and buffer becomes this rank's part of it, on this rank's device."""
        before = _named_tensors(self.model)
        values = self.initial_values(init, check=check) if self.values is None else self.values
        after = {
            id(tensor): self._rounded(name, self._placed(name, tensor, values.get(name)))
            for name, tensor in before.items()
        }
        for name, tensor in before.items():
            new = after[id(tensor)]
            if isinstance(tensor, nn.Parameter) and isinstance(new, nn.Parameter) and new is not tensor:
                optimizer.adopt(name, tensor, new)
        for module in self.model.modules():
            undo.callback(_torch.find_weights_again, module)
            for held in _torch.own_tensors(module):
                _swap(held, after, undo)
            _torch.find_weights_again(module)

    def initial_values(self, init: Any, *, check: bool) -> dict[str, torch.Tensor]:
        """This rank's parts of tensors on meta. Those of other stages are made too, and let go: so that all are drawn
        in the order of one device."""
        if init is None and not any(tensor.is_meta for tensor in _named_tensors(self.model).values()):
            return {}
        drawn: dict[str, int] = {}

        def cut(name: str, whole: Any) -> torch.Tensor:
            if self.kept is not None:
                if name not in self.kept:
                    return torch.empty(0)
                name = self.kept[name]
            if isinstance(whole, DTensor):
                return _torch.local_of(whole)
            if check and isinstance(whole, torch.Tensor):
                drawn[name] = agree.fingerprint(whole)
            return self._cut(name, whole)

        if self.exact_random:
            with exact.ExactMode(exact.Place()), _torch.implicit_replication():
                values = materialize.initial_values(self.model, init, cut, self._own_part)
        else:
            values = materialize.initial_values(self.model, init, cut)
        if check:
            agree.draws_agree(drawn, self._group(self.shape.names))
            if marks := materialize.checkpoints(init):
                agree.checkpoints_agree(marks, self._group(self.shape.names))
        if self.kept is None:
            return values
        return {self.kept[name]: value for name, value in values.items() if name in self.kept}

    def _own_part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor: of this rank's part of it where it is split and DTensor cuts it as the layout does."""
        layout = self._layout(name, tensor)
        if self.model_mesh is None or not self._is_split(layout) or self._is_spread(name):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        ops.enable(self.model_mesh)
        placements = tuple(layout.placements(self.model_mesh))
        slices = layout.local_slices(tuple(tensor.shape), self.shape, self.coordinate)
        if not exact.is_cut_so(tuple(tensor.shape), self.model_mesh, placements, slices):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        shape = layout.local_shape(tensor.shape, self.shape, self.coordinate)
        local = torch.empty(shape, dtype=tensor.dtype, device=self.device)
        return _torch.wrap(local, _torch.spec(self.model_mesh, placements, tensor.shape, tensor.dtype))

    def install(self, undo: ExitStack, *, check: bool, global_batch_norm: bool) -> GradientReducer:
        """Hooks on the model: regions, borders, gradients, state dicts, inputs."""
        optimizer.watch_optimizers()
        if len(self.model_axes + self.data_axes) > 1:
            _torch.gather_uneven_splits_in_turn()
        if self.model_mesh is not None:
            ops.enable(self.model_mesh)
            self._install_regions(self.model_mesh, undo)
            self._install_borders(self.model_mesh, undo)
            self._install_linears(self.model_mesh, undo)
        self._install_experts(undo)
        if self.model_axes or self.data_axes:
            undo.callback(refuse_conversions(self.model))
        if (data_group := self._group(self.data_axes)) is not None:
            for handle in balance.install(self.model, data_group):
                undo.callback(handle.remove)
        if global_batch_norm and self.data_axes:
            self._install_batch_norm(undo)
        held = self._held()
        if any(one.cut is not None for one in held):
            ops.read_global_values(self.mesh)  # as in `float(p.grad.norm())`
        bucket_bytes = int(self.plan.step.bucket_mb * 2**20)
        units = self.units = self._lend(held, bucket_bytes)
        reducer = GradientReducer(
            held,
            self.executor,
            self.data_axes,
            bucket_bytes=bucket_bytes,
            passes=self.plan.step.accumulate,
            dtype=self.plan.step.reduce_dtype,
        )
        undo.callback(reducer.remove)
        scaled = self.plan.step.scaler is not None
        special = any(one.master_dtype or one.hosted for one in held)
        asked_of_optimizers = scaled or self.plan.step.accumulate > 1 or special
        if self.model_axes or self.data_axes or asked_of_optimizers or self.kept is not None:
            optimizer.look_after(self.model.parameters(), self.shape.data_ranks, reducer, scaled=scaled)
        late = self.plan.repeated if self.plan.step.overlap else ()
        self.updates = self._update(held, bucket_bytes, late)
        if units is not None:
            units.give_gradients_to(reducer)
            reducer.at_the_end.append(units.let_go)
        root = Root(reducer, self._input_check(check), units, self.casting())
        place = self.place()
        drawing = exact.draw_exactly(self.model, place) if place is not None else []
        for handle in (*drawing, *root.install(self.model), state.accept_plain_state(self.model)):
            undo.callback(handle.remove)
        return reducer

    def fp8_history(self, linears: fp8.Linears, reducer: GradientReducer) -> fp8.History | None:
        """What float8 is scaled by, if by earlier steps; a step ends with its last backward pass."""
        steps = self.plan.step.fp8_history
        if not steps or not linears.names:
            return None
        history = fp8.History(linears, steps, self.device)
        reducer.at_the_end_of_steps.append(functools.partial(history.end_step, self.group_of_all()))
        return history

    def _held(self) -> list[Held]:
        """Each parameter once, with how its gradient and state lie."""
        held = [self._held_one(name, param) for name, param in self.model.named_parameters()]
        for one in held:
            remember(one)
        return held

    def _update(self, held: list[Held], bucket_bytes: int, late: Sequence[str]) -> Updates | None:
        """Let optimizers step on this rank's shards of parameters whose state is split and that are not stored so."""
        buckets = update_buckets(self.executor, held, bucket_bytes=bucket_bytes, late=late)
        updates = Updates(buckets, late)
        for one in (one for bucket in buckets for one in bucket.held):
            one.updates = updates
        return updates if buckets else None

    def _lend(self, held: list[Held], bucket_bytes: int) -> Units | None:
        """Where parameters are stored in parts, memory in which they are whole while modules compute with them."""
        if not any(one.is_stored_in_parts for one in held):
            return None
        return lend(
            self.model,
            held,
            self.plan.units,
            lambda name: not lets_go(self.rows[name], self.plan.step),
            self.executor,
            bucket_bytes=bucket_bytes,
        )

    def _held_one(self, name: str, param: nn.Parameter) -> Held:
        row = self.rows[name]
        first = dict.fromkeys(self.shape.names, 0)
        compute = self._on_compute_axes(row.compute)
        room = math.prod(compute.local_shape(row.global_shape, self.shape, first))
        state = row.stored if row.state is None else row.state
        division = cut(compute, self._on_active_axes(state), row.global_shape, self.shape, self.coordinate)
        axes = self._added(compute, state) if division is not None else ()
        spec = None
        if (compute_mesh := self._mesh_for(name, param)) is not None:
            places = tuple(compute.placements(compute_mesh))
            spec = _torch.spec(compute_mesh, places, tuple(row.global_shape), param.dtype)
        layout = self._on_active_axes(state)
        movements = self._movements.get(row.name, {})
        over = self.executor.transport(axes) if axes else None
        held = Held(row.tied, param, axes, division, compute, layout, self.mesh, room, movements, over, spec)
        held.device, held.hosted = self.device, offload.hosted(row, self.device)
        if row.state is not None and row.has_master:
            held.master_dtype = row.state.dtype or row.dtype
            held.first_master = self._masters.pop(name, None)
        return held

    @functools.cached_property
    def _movements(self) -> dict[str, dict[Purpose, Movement]]:
        """What a step moves of each row, by purpose."""
        found: dict[str, dict[Purpose, Movement]] = {}
        with _torch.no_modes():  # a dry run has no values, and sizes are counted with tensors
            movements = self.plan.movements()
        for one in movements:
            found.setdefault(one.name, {})[one.purpose] = one
        return found

    def casting(self) -> Casting:
        """In which dtypes the model computes."""
        computed = {row.compute.dtype or row.dtype for row in self.plan.rows if row.kind == "parameter"}
        low = {dtype for dtype in computed if dtype in (torch.bfloat16, torch.float16)}
        changed = any(row.compute.dtype not in (None, row.dtype) for row in self.plan.rows)
        inputs = low.pop() if len(low) == 1 and changed else None
        mixed = inputs if inputs is not None and len(computed) > 1 else None
        return Casting(self.device.type, self.plan.step.autocast or mixed, None if mixed else inputs)

    def _install_regions(self, model_mesh: DeviceMesh, undo: ExitStack) -> None:
        for region in self.regions:
            for handle in install_region(self.model.get_submodule(region), model_mesh):
                undo.callback(handle.remove)

    def _install_borders(self, model_mesh: DeviceMesh, undo: ExitStack) -> None:
        for border in self.plan.borders:
            if not inside(border.module, self.regions):
                continue
            module = self.model.get_submodule(border.module)
            if border.layout is None:
                handle = borders.install_gradient_border(module)
            else:
                layout = self._on_model_axes(border.layout)
                install = borders.install_input_border if border.side == "input" else borders.install_output_border
                handle = install(module, layout, model_mesh)
            undo.callback(handle.remove)

    def _install_linears(self, model_mesh: DeviceMesh, undo: ExitStack) -> None:
        layouts_out = {b.module: b.layout for b in self.plan.borders if b.side == "output" and b.layout is not None}
        for name, module in self.model.named_modules():
            if is_linear(module) and self._is_global_weight(name, module) and inside(name, self.regions):
                layout = layouts_out.get(name)
                place = borders.border_placements
                border = None if layout is None else place(self._on_model_axes(layout), model_mesh)
                undo.callback(compute_locally(module, border))

    def _is_global_weight(self, name: str, module: nn.Module) -> bool:
        weight: Any = module.weight
        return self.model_mesh is not None and self._is_global(f"{name}.weight".lstrip("."), weight)

    @functools.cached_property
    def spread(self) -> dict[str, list[str]]:
        """Modules whose experts lie on several ranks, each with the names of their parameters."""
        found: dict[str, list[str]] = {}
        for name, _ in self.model.named_parameters():
            if self._is_spread(name):
                found.setdefault(_owner(name), []).append(name)
        return found

    def _install_experts(self, undo: ExitStack) -> None:
        for owner, names in self.spread.items():
            module = self.model.get_submodule(owner)
            if self.exact_random:
                experts.refuse_dropout(owner, module)
            undo.callback(experts.install(module, self._spread(owner, names)))

    def _spread(self, owner: str, names: list[str]) -> experts.Spread:
        """How the experts lie that a module's parameters are."""
        row = self.rows[names[0]]
        (axis,) = (axis for axis in row.compute.axes if axis in self.expert_axes)
        group = self._group((axis,))
        assert group is not None
        places = [dict(self.coordinate, **{axis: at}) for at in range(self.shape[axis])]
        sizes = [row.compute.local_shape(row.global_shape, self.shape, place)[0] for place in places]
        inner = self.model_mesh if any(self._is_split(self.rows[name].compute) for name in names) else None
        keys = tuple(name.rpartition(".")[2] for name in names)
        bounds = tuple(itertools.accumulate(sizes, initial=0))
        return experts.Spread(owner, keys, bounds, group, self.coordinate[axis], inner, self.plan.step.capacity_factor)

    def _install_batch_norm(self, undo: ExitStack) -> None:
        group = self._group(self.data_axes)
        assert group is not None
        for module in self.model.modules():
            if batchnorm.is_batch_norm(module):
                undo.callback(batchnorm.use_global_batch(module, group))

    def _input_check(self, check: bool) -> Callable[..., None]:
        pending = [check and bool(self.model_axes)]

        def look(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for leaf in _torch.leaves_of(*args, *kwargs.values()):
                if isinstance(leaf, torch.Tensor) and leaf.device.type != self.device.type:
                    raise InputError(_wrong_device(leaf, self.device))
            if pending[0]:
                pending[0] = False
                agree.batches_agree(args, kwargs, self._group(self.model_axes), ", ".join(self.model_axes))

        return look

    def _find_regions(self) -> list[str]:
        """See `regions.py`; the plan's rows and borders say what is split and where it is summed."""
        if self.model_mesh is None:
            return []
        split = list(dict.fromkeys(_owner(name) for name, row in self._by_any_name() if self._is_split(row.compute)))
        whole = {b.module for b in self.plan.borders if b.side == "output" and b.layout is not None}
        laid_out = {b.module for b in self.plan.borders if b.layout is not None and self._is_split(b.layout)}
        tied = [[_owner(name) for name in row.tied] for row in self.plan.rows if len(row.tied) > 1]
        look_ups = [
            name for name in split if isinstance(self.model.get_submodule(name), nn.Embedding | nn.EmbeddingBag)
        ]
        asked = [b.module for b in self.plan.borders if b.layout is not None and b.rule is not None]
        uncalled = {name for name, module in self.model.named_modules() if not _has_forward(module)}
        return find_regions(split, whole, laid_out, tied, alone=look_ups, asked=asked, uncalled=uncalled)

    def _by_any_name(self) -> Iterator[tuple[str, Row]]:
        for name, _ in (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()):
            if name in self.rows:
                yield name, self.rows[name]

    def _is_split(self, layout: Layout) -> bool:
        return any(axis in self.model_axes for axis in layout.axes)

    def _placed(self, name: str, tensor: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
        """What a tensor becomes: a DTensor inside a region or of experts, else a plain tensor on this rank's device."""
        if self._is_stored_in_parts(name):
            return self._stored(name, tensor, local)
        compute_mesh = self._mesh_for(name, tensor)
        if compute_mesh is None:
            return self._moved(tensor, local)
        layout = self._layout(name, tensor)
        local = self._cut(name, tensor) if local is None else local
        stride = torch.empty(tensor.shape, device="meta").stride()
        placements = layout.placements(compute_mesh)
        after = DTensor.from_local(
            local.to(self.device), compute_mesh, placements, run_check=False, shape=tensor.shape, stride=stride
        )
        return _as_parameter(after, tensor) if isinstance(tensor, nn.Parameter) else after

    def _rounded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter in the dtype that it is stored in. What rounding takes away stays in the optimizer's copy."""
        row = self.rows.get(name)
        if not isinstance(tensor, nn.Parameter) or row is None or row.stored.dtype in (None, tensor.dtype):
            return tensor
        wide, dtype = local_of(tensor), row.stored.dtype
        if row.state is not None and row.has_master:
            stored, state = self._on_active_axes(row.stored), self._on_active_axes(row.state)
            parts = cut(stored, state, row.global_shape, self.shape, self.coordinate)
            part = (
                wide if parts is None else parts.take(wide, self.executor.transport(self._added(stored, state)).index)
            )
            away = "state" in offload.hosted(row, self.device)
            home = offload.HOST if away else part.device
            self._masters[name] = part.to(home, row.state.dtype or row.dtype, copy=True)
        assert dtype is not None
        low = self._at_home(row, wide.to(dtype))
        if not isinstance(tensor, DTensor):
            return _as_parameter(low, tensor)
        spec = _torch.spec(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), dtype)
        return _as_parameter(_torch.wrap(low, spec), tensor)

    def _added(self, src: Layout, dst: Layout) -> tuple[str, ...]:
        return tuple(axis for axis in self.data_axes if axis in dst.axes - src.axes)

    def _is_stored_in_parts(self, name: str) -> bool:
        return name in self.rows and bool(self.rows[name].added("stored") & {*self.data_axes})

    def _stored(self, name: str, tensor: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
        """A parameter as it is kept between steps: a DTensor on the whole mesh."""
        row = self.rows[name]
        placements = tuple(self._on_active_axes(row.stored).placements(self.mesh))
        local = self._at_home(row, self._cut(name, tensor) if local is None else local)
        after = _torch.wrap(local, _torch.spec(self.mesh, placements, tuple(row.global_shape), local.dtype))
        return _as_parameter(after, tensor)

    def _at_home(self, row: Row, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter in the memory that it is stored in."""
        if "stored" in offload.hosted(row, self.device):
            return offload.on_host(local, self.device)
        return local.to(self.device)

    def _mesh_for(self, name: str, tensor: torch.Tensor) -> DeviceMesh | None:
        """The mesh on which a tensor is computed with; None where it is plain there."""
        if self._is_spread(name):
            return self.expert_mesh
        return self.model_mesh if self.model_mesh is not None and self._is_global(name, tensor) else None

    def _is_spread(self, name: str) -> bool:
        """Whether ranks have different experts of a tensor."""
        return name in self.rows and not self.rows[name].compute.axes.isdisjoint(self.expert_axes)

    def _is_global(self, name: str, tensor: torch.Tensor) -> bool:
        """In a region, parameters are DTensors, and buffers that are split or that BatchNorm updates from some."""
        owners = [_owner(n) for n in self._names(name)]
        if not any(inside(owner, self.regions) for owner in owners):
            return False
        norm = batchnorm.is_batch_norm(self.model.get_submodule(owners[0])) and tensor.ndim > 0
        return isinstance(tensor, nn.Parameter) or norm or self._is_split(self._layout(name, tensor))

    def _names(self, name: str) -> tuple[str, ...]:
        row = self.rows.get(name)
        return row.tied if row is not None and row.tied else (name,)

    def _moved(self, tensor: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        if value is None and tensor.device.type == self.device.type:
            return tensor
        moved = (tensor.detach() if value is None else value).to(self.device)
        return _as_parameter(moved, tensor) if isinstance(tensor, nn.Parameter) else moved

    def _cut(self, name: str, whole: Any) -> torch.Tensor:
        """This rank's part of a whole tensor, or of a slice of a safetensors file, which is then read in part only."""
        shape = tuple(whole.shape) if isinstance(whole, torch.Tensor) else tuple(whole.get_shape())
        layout = self.rows[name].stored if name in self.rows else Layout.replicate(len(shape))
        layout = self._on_active_axes(layout)
        if isinstance(whole, torch.Tensor):
            return layout.take(whole.detach(), self.shape, self.coordinate).clone()
        return _read(whole, layout.local_slices(shape, self.shape, self.coordinate))

    def _layout(self, name: str, tensor: torch.Tensor) -> Layout:
        row = self.rows.get(name)
        return self._on_compute_axes(row.compute) if row is not None else Layout.replicate(tensor.ndim)

    def _on_compute_axes(self, layout: Layout) -> Layout:
        return layout.with_axes_dropped([axis for axis in layout.axes if axis not in self.compute_axes])

    def _on_model_axes(self, layout: Layout) -> Layout:
        return layout.with_axes_dropped([axis for axis in layout.axes if axis not in self.model_axes])

    def _on_active_axes(self, layout: Layout) -> Layout:
        return layout.with_axes_dropped([axis for axis in layout.axes if axis not in self.model_axes + self.data_axes])

    def _group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        axes = _active(self.shape, axes)
        return _torch.flattened(self.mesh, axes).get_group() if axes else None


def _read(source: Any, slices: tuple[tuple[slice, ...], ...]) -> torch.Tensor:
    """The product of the dims' slices, read from a file piece by piece.

    Copied: what safetensors gives is a view of the mapped file, which keeps the whole tensor alive.
    """

    def read(chosen: tuple[slice, ...]) -> torch.Tensor:
        dim = len(chosen)
        if dim == len(slices):
            return (source[chosen] if chosen else source[:]).clone(memory_format=torch.contiguous_format)
        parts = [read((*chosen, part)) for part in slices[dim]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return read(())


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


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard_model` has sharded this model."""
    return model in _sharded


def _refuse_unfit(model: nn.Module) -> None:
    if model in _sharded:
        raise ShardingError(
            f"This {type(model).__name__} is sharded already, on mesh "
            f'"{_sharded[model].plan.mesh}". Build a new model to shard it otherwise.'
        )
    for name, tensor in _named_tensors(model).items():
        if isinstance(tensor, DTensor):
            raise ShardingError(
                f'"{name}" is a DTensor already ({tensor.placements}); shard_model takes a model of plain tensors. '
                "Give it the model as it was before parallelize_module, fully_shard or distribute_tensor."
            )
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise ShardingError(
                f'"{name}" has no shape yet (a lazy module). Run the model once on an example before sharding it.'
            )


def names_here(model: nn.Module) -> dict[str, str]:
    """Of a sharded model's parameters on this rank: what the whole model calls them first, and their names here."""
    return stages.names_here(model, record_of(model).pipeline)


def record_of(model: nn.Module) -> Sharded:
    if model not in _sharded:
        raise ShardingError(
            f"This {type(model).__name__} was not sharded by shardlib; "
            "call shardlib.shard_model(model, mesh, rules) first."
        )
    return _sharded[model]


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by their first name, each tensor once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _swap(held: dict[str, Any], after: dict[int, torch.Tensor], undo: ExitStack) -> None:
    for key, tensor in held.items():
        if tensor is not None and after[id(tensor)] is not tensor:
            undo.callback(held.__setitem__, key, tensor)
            held[key] = after[id(tensor)]


def _as_parameter(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _active(shape: MeshShape, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if shape[axis] > 1)


def _position(device_mesh: DeviceMesh) -> int:
    """This rank's place in the mesh, counted with the last axis fastest."""
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(f"Rank {dist.get_rank()} is not part of the mesh {device_mesh}; call on its ranks only.")
    position = 0
    for index, size in zip(coordinate, device_mesh.shape, strict=True):
        position = position * size + index
    return position


def _wrong_device(leaf: torch.Tensor, device: torch.device) -> str:
    return (
        f"An input of shape {tuple(leaf.shape)} is on {leaf.device}, but the model's mesh is on {device}. "
        f'Move the batch first: batch.to("{device.type}").'
    )
