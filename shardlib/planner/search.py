"""`best_plans`: factor a world into axes, refuse what cannot be, prune by memory, price the rest, and say why."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shardlib import layouts
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan import (
    Cluster,
    Parts,
    Peak,
    Plan,
    RulesLike,
    StepTime,
    as_rules,
    check_model,
    listed_transforms,
    peak_of,
    price,
)
from shardlib._plan.readable import human_bytes
from shardlib.errors import LayoutError, PlanError, RuleError, ShardlibError, short_traceback
from shardlib.planner.candidates import Grid, Refusals, Schedule, Sharding, grids, microbatches, schedules, shardings
from shardlib.planner.choices import BestPlans, Choice, difference
from shardlib.planner.space import MARGIN, Space, budget_of
from shardlib.transforms import Transform, accumulate, checkpoint_activations, pipeline, precision

__all__ = ["best_plans"]

_LONG = 32768  # tokens of an example from which they are divided among ranks
_EQUAL = 0.01  # of a time: a plainer plan is worth it


@short_traceback
def best_plans(
    model: nn.Module,
    cluster: Cluster | str | Path,
    *,
    world: int,
    batch: int,
    memory: str | float | None = None,
    top: int = 5,
    example: Any = None,
    seq: int | None = None,
    rules: RulesLike | None = None,
    transforms: Transform | Sequence[Transform] | None = None,
    axes: MeshLike | None = None,
    margin: float = MARGIN,
    state_tensors: int = 2,
    compiled: bool = False,
) -> BestPlans:
    """Find the fastest plans for a model on a cluster: the mesh, the mode of the rules, the ZeRO stage, recomputation,
    microbatches and the schedule of a pipeline.

    Nothing runs on devices. One block of each kind is recorded on fake tensors for each division of activations; the
    rest is arithmetic, so that the time of a search hardly depends on the depth of the model or on the ranks.

    Args:
        model: a single-device module, on any device; a model on `meta` will do.
        cluster: the machines, the name of a preset such as "h100", or the path of a cluster file.
        world: the number of ranks.
        batch: examples in a training step, of all ranks.
        memory: bytes of a device, as a number or in words such as "80GB"; by default the cluster's.
        top: how many plans are returned, each on another mesh.
        example: inputs of the model: a tuple of arguments, a mapping of keyword arguments or one tensor, whose dim 0 is
            that of examples. Values do not matter. By default, for a language model of transformers, token ids and
            labels of `seq` tokens.
        seq: tokens of an example, where `example` is not given.
        rules: as `sl.plan` takes them; modes that they have are tried.
        transforms: what every plan has, without `accumulate` and `pipeline`; by default `precision("bf16")` where the
            cluster computes faster in it.
        axes: sizes that are wanted, such as "tp=8,pp=16"; the others, and a size of -1, are chosen.
        margin: the part of the memory that is left free, for fragmentation and what other libraries take.
        state_tensors: tensors of optimizer state for each parameter: 2 for Adam, 1 for SGD with momentum.
        compiled: whether ops without products that follow each other run as one kernel, as `torch.compile` makes them.

    Raises:
        PlanError: no example, or one that forward does not take; numbers that are not positive; transforms that a
            search chooses, as `accumulate`; a world or a batch that cannot be divided as asked; or no plan fits: the
            message has the one that is closest and what it lacks.

    >>> class Mlp(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(4))
    ...     def forward(self, x):
    ...         for block in self.blocks:
    ...             x = block(x).relu()
    ...         return x
    >>> found = best_plans(Mlp(), "h100", world=8, batch=65536, example=torch.empty(1, 4096), rules={"**": None})
    >>> str(found[0].mesh), found[0].time.seconds <= found[-1].time.seconds
    ('dp=8', True)
    """
    check_model(model)
    machines = Cluster.of(cluster)
    _check_numbers(world=world, batch=batch, top=top)
    budget = budget_of(machines, memory, margin)
    given = _example(model, example, seq)
    base = _base(machines, model) if transforms is None else _own(transforms)
    own = layouts.for_model(model) if rules is None else as_rules(rules)
    space = Space(model, own, machines, given, base, state_tensors, compiled=compiled)
    wanted = dict(MeshShape.of(axes).items()) if axes is not None else {}
    fixed = {axis: size for axis, size in wanted.items() if size != -1}  # an open size is chosen like any other
    search = _Search(space, world, batch, budget, fixed, _expression(rules))
    search.run()
    if not search.fitting:
        search.run(offloaded=True)
    return search.result(top)


@dataclass(frozen=True)
class _Candidate:
    """All settings of a plan."""

    grid: Grid
    mesh: MeshShape
    sharding: Sharding
    recompute: bool
    rows: int
    count: int
    schedule: Schedule

    @property
    def effort(self) -> tuple[int, ...]:
        """The more a plan asks for, the larger; of equally fast ones the plainest counts."""
        return (
            len([size for size in self.mesh.sizes if size > 1]),
            self.grid.mode is not None,
            self.sharding.rank,
            self.recompute,
            self.schedule.per_rank,
            -self.rows,
        )


class _Search:
    def __init__(
        self, space: Space, world: int, batch: int, budget: int, fixed: Mapping[str, int], rules: str = ""
    ) -> None:
        self.space, self.world, self.batch, self.budget = space, world, batch, budget
        self.fixed, self.rules = fixed, rules
        self.tried, self.failed = 0, list[ShardlibError]()  # grids, and why some have no plan
        self.refused = Refusals()
        self.fitting: dict[_Candidate, StepTime] = {}
        self.too_large: dict[_Candidate, Peak] = {}

    def run(self, *, offloaded: bool = False) -> None:
        """Price every candidate that fits."""
        rules, space = self.space.rules, self.space
        known = ("dp", *rules.axis_names, "pp", "cp")
        unknown = [axis for axis, size in self.fixed.items() if size > 1 and axis not in known]
        if unknown:
            raise PlanError(
                f'axes= asks for "{unknown[0]}", which neither the rules name nor a transform uses; give sizes of '
                f"{', '.join(map(repr, ('dp', 'pp', *rules.axis_names)))}."
            )
        self.refused, self.tried, self.failed = Refusals(), 0, []
        for grid in grids(
            self.world,
            node=space.cluster.devices,
            blocks=space.blocks,
            experts=space.experts,
            axes=rules.axis_names,
            modes=tuple(rules.modes),
            fixed=self.fixed,
            long=space.tokens >= _LONG,
            refused=self.refused,
        ):
            self.tried += 1
            try:
                self._mesh(grid, offloaded)
            except ShardlibError as error:
                self.failed.append(error)
                self.refused.add(_reason(error), f"{grid}: {str(error).partition('. ')[0]}")

    def _mesh(self, grid: Grid, offloaded: bool) -> None:
        pairs = microbatches(self.batch, grid, self.refused)
        if not pairs:
            return
        for mesh, sharding in shardings(grid, self.space.cluster.devices):
            used = sharding.offloaded() if offloaded else sharding
            plan, parts = self.space.parts(mesh, grid, used)
            kept = sum(_kept(part) for part in self._least(parts, grid))
            if kept > self.budget:
                self.refused.add(
                    "parameters, gradients and state alone take too much memory",
                    f"{mesh}, {_named(used)}: {human_bytes(int(kept))}",
                )
            self._of_sharding(grid, mesh, used, pairs, plan, parts, hopeless=kept > self.budget)

    def _of_sharding(self, grid: Grid, mesh: MeshShape, sharding: Sharding, pairs: Sequence[tuple[int, int]],
                     plan: Plan, parts: Parts, *, hopeless: bool) -> None:  # fmt: skip
        """Price all microbatches and schedules, until a microbatch of fewer rows does not fit already."""
        full: set[tuple[Schedule, bool]] = set()
        for rows, count in pairs:
            for schedule in schedules(grid, self.space.blocks, count, self.refused):
                for recompute in (False, True) if self.space.blocks else (False,):
                    if (recompute and schedule.name == "zbv") or (schedule, recompute) in full:
                        continue
                    one = _Candidate(grid, mesh, sharding, recompute, rows, count, schedule)
                    if not self._one(one, plan, parts, hopeless=hopeless):
                        full.add((schedule, recompute))
            if hopeless:
                break

    def _least(self, parts: Parts, grid: Grid) -> list[Any]:
        """Return the parts of the smallest stage that is sure: its blocks."""
        counts = self.space.counts(grid, Schedule("1f1b")) if grid.stages > 1 else [len(self.space.order)]
        kinds = parts[2] if parts[2] else (parts[1],)
        return [kinds[0]] * max(min(counts), 1)

    def _one(self, one: _Candidate, plan: Plan, parts: Parts, *, hopeless: bool) -> bool:
        """Price a candidate, and return whether it fits."""
        rows = 1 if hopeless else one.rows
        work = self.space.work(one.grid.model_axes, one.grid.mode, rows, recompute=one.recompute)
        made = _with_step(plan, one)
        shapes = self.space.shapes(one.grid, one.schedule)
        peak = peak_of(made, work, parts, shapes)
        if peak.total <= self.budget:
            self.fitting[one] = price(made, work, self.space.cluster, parts, shapes, peak, compiled=self.space.compiled)
            return True
        self.too_large[one] = peak
        if not hopeless:
            shown = f"{one.mesh}, {_named(one.sharding)}: {human_bytes(peak.total)}"
            self.refused.add("more memory than a device has", shown)
        return False

    def result(self, top: int) -> BestPlans:
        """Return the best plan of each mesh, the fastest first."""
        if not self.fitting:
            raise self._nothing_fits()
        by_mesh: dict[MeshShape, list[_Candidate]] = {}
        for one in self.fitting:
            by_mesh.setdefault(one.grid.mesh, []).append(one)
        chosen = sorted(map(self._plainest, by_mesh.values()), key=lambda one: self.fitting[one].seconds)[:top]
        best = self.fitting[chosen[0]]
        choices = [
            replace(
                self._choice(one),
                reasons=tuple(self._reasons(one)),
                behind="" if one is chosen[0] else difference(best, self.fitting[one]),
            )
            for one in chosen
        ]
        return BestPlans(
            choices,
            cluster=self.space.cluster,
            world=self.world,
            batch=self.batch,
            budget=self.budget,
            refused=self.refused.lines(),
            priced=len(self.fitting),
        )

    def _plainest(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """Return the candidate that asks for least, of those that are as fast as the fastest."""
        fastest = min(self.fitting[one].seconds for one in candidates)
        equal = [one for one in candidates if self.fitting[one].seconds <= (1 + _EQUAL) * fastest]
        return min(equal, key=lambda one: (one.effort, self.fitting[one].seconds))

    def _choice(self, one: _Candidate) -> Choice:
        staged = one.grid.stages > 1
        return Choice(
            mesh=one.mesh,
            mode=one.grid.mode,
            transforms=self._transforms(one),
            stages=tuple(self.space.counts(one.grid, one.schedule)) if staged else (),
            rows=one.rows,
            microbatches=one.count,
            time=self.fitting[one],
            rules=self.rules,
        )

    def _transforms(self, one: _Candidate) -> Transform:
        parts: list[Transform | None] = [*self.space.base, one.sharding.transform]
        parts.append(checkpoint_activations() if one.recompute else None)
        if one.grid.stages > 1:
            parts.append(pipeline(one.schedule.name, one.count))
        elif one.count > 1:
            parts.append(accumulate(one.count))
        made = _joined(*parts)
        return made if made is not None else accumulate(1)

    def _reasons(self, one: _Candidate) -> list[str]:
        """Say of each setting what its neighbours would cost."""
        time = self.fitting[one]
        said = [f"memory: {time.memory} of {human_bytes(self.budget)}"]
        turned: list[tuple[str, Callable[[_Candidate], bool]]] = [
            ("recomputation", lambda other: replace(other, recompute=one.recompute) == one),
            ("ZeRO stage", lambda other: replace(other, sharding=one.sharding, mesh=one.mesh) == one),
            ("rows of a microbatch", lambda other: replace(other, rows=one.rows, count=one.count) == one),
            ("schedule", lambda other: replace(other, schedule=one.schedule) == one),
            ("mode", lambda other: replace(other, grid=replace(other.grid, mode=one.grid.mode)) == one),
        ]
        for what, differs in turned:
            priced = [each for each in self.fitting if each != one and differs(each)]
            large = [each for each in self.too_large if differs(each)]
            words = [f"{_setting(what, each)} {difference(time, self.fitting[each])}"
                     for each in sorted(priced, key=lambda each: self.fitting[each].seconds)[:2]]  # fmt: skip
            words += [
                f"{_setting(what, each)} needs {human_bytes(self.too_large[each].total)}"
                for each in sorted(large, key=lambda each: self.too_large[each].total)[:1]
            ]
            if words:
                said.append(f"{what}: {_setting(what, one)}; {'; '.join(words)}")
        return said

    def _nothing_fits(self) -> ShardlibError:
        if self.failed and len(self.failed) == self.tried:  # for one reason, that no mesh can mend
            return self.failed[0]
        lines = "".join(f"\n  {line}" for line in self.refused.lines())
        if not self.too_large:
            asked = ", or axes=," if self.fixed else ""
            return PlanError(
                f"No plan is possible for {self.world} ranks and {self.batch} examples a step.{lines}\n"
                f"Change the number of ranks or of examples{asked} so that they divide."
            )
        one, peak = min(self.too_large.items(), key=lambda item: item[1].total)
        lacks = peak.total - self.budget
        largest = max(
            ("parameters", "gradients", "state", "activations", "workspace"), key=lambda name: getattr(peak, name)
        )
        more = math.ceil(self.world * peak.total / self.budget)
        return PlanError(
            f"No plan of {self.world} ranks fits {human_bytes(self.budget)} of a device. The closest is {one.grid} "
            f"with {self._transforms(one)!r}, {one.rows} x {one.count} examples: {peak}. It lacks "
            f"{human_bytes(lacks)}; most of it are {largest}. Give more ranks (about {more}, if all of it can be "
            f"divided), devices with more memory, or shorter examples.{lines}"
        )


def _kept(part: Any) -> int:
    held = part.held
    return int(held.parameters + held.gradients + held.state + held.buffers)


def _with_step(plan: Plan, one: _Candidate) -> Plan:
    staged = one.grid.stages > 1
    step = plan.step.replace(
        accumulate=1 if staged else one.count,
        microbatches=one.count if staged else 0,
        schedule=one.schedule.name,
    )
    return plan.replace(step=step)


def _named(sharding: Sharding) -> str:
    return repr(sharding.transform) if sharding.transform is not None else "replicated"


def _setting(what: str, one: _Candidate) -> str:
    stages = f" with {one.schedule.per_rank} stages on each rank" if one.schedule.per_rank > 1 else ""
    return {
        "recomputation": "blocks are recomputed" if one.recompute else "nothing is recomputed",
        "ZeRO stage": _named(one.sharding),
        "rows of a microbatch": f"{one.rows} x {one.count}",
        "schedule": one.schedule.name + stages,
        "mode": f'mode "{one.grid.mode}"' if one.grid.mode else "no mode",
    }[what]


def _joined(*parts: Transform | None) -> Transform | None:
    made: Transform | None = None
    for part in parts:
        if part is not None:
            made = part if made is None else made | part
    return made


def _reason(error: ShardlibError) -> str:
    return "the rules do not fit the mesh" if isinstance(error, RuleError | LayoutError) else "no plan can be made"


def _expression(rules: RulesLike | None) -> str:
    """Return how a script gets rules: by the name or path of their file, or from a variable."""
    if rules is None:
        return ""
    return f'sl.layouts.load("{rules}")' if isinstance(rules, str | Path) else "sl.Rules.of(rules)"


def _own(transforms: Transform | Sequence[Transform]) -> list[Transform]:
    """Return the transforms that the caller gives, without those that a search chooses."""
    given = listed_transforms(transforms)
    chosen = [repr(part) for one in given for part in getattr(one, "parts", (one,))]
    for text in chosen:
        if text.startswith(("accumulate(", "pipeline(")):
            raise PlanError(
                f"transforms= has {text}, and a search chooses passes and schedules itself. Leave it out; "
                "plan.time prices one plan."
            )
    return cast("list[Transform]", given)


def _base(cluster: Cluster, model: nn.Module) -> list[Transform]:
    """Return `precision("bf16")` where products are faster in it, and the model is not in it already."""
    rates = {name: rate.sustained for name, rate in cluster.products}
    faster = rates.get("bfloat16", 0.0) > rates.get("float32", 0.0)
    wide = any(parameter.dtype == torch.float32 for parameter in model.parameters())
    return [precision("bf16")] if faster and wide else []


def _example(model: nn.Module, example: Any, seq: int | None) -> Any:
    if example is not None:
        if seq is not None:
            raise PlanError(f"seq={seq!r} and example= were given; an example has its length: give one of them.")
        return example
    config = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) == "input_ids" and hasattr(config, "vocab_size"):
        if seq is None:
            raise PlanError("Time depends on the length of examples: give seq=, the tokens of one, such as seq=8192.")
        _check_numbers(seq=seq)
        _check_positions(model, seq)
        ids = torch.empty(1, seq, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}
    raise PlanError(
        f"{type(model).__name__} does not say what it takes, and time depends on it. Give example=, the inputs of one "
        'example: a tensor, a tuple, or a mapping by name, as in example={"x": torch.empty(1, 3, 224, 224)}.'
    )


def _check_positions(model: Any, seq: int) -> None:
    """Check that a table of learned positions has so many: fake tensors have no values that would not be in it."""
    longest, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not words]
    if longest and seq > longest and any(0 <= table.num_embeddings - longest <= 2 for table in tables):
        raise PlanError(
            f"seq={seq} was given, and {type(model).__name__} has a table of {longest} positions: give a seq up to it, "
            "or a model with a larger max_position_embeddings."
        )


def _check_numbers(**numbers: Any) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PlanError(f"{name}={number!r} was given; give a number of 1 or more.")
