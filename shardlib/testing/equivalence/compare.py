"""Train a case both ways and measure every difference; one exchange between ranks, at the end."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardlib._mesh_shape import MeshShape
from shardlib._progress import Progress
from shardlib.engine import _torch, get_plan, ops
from shardlib.engine._torch import flatten_with_path, pytree
from shardlib.engine.ranks import agree
from shardlib.engine.sharded import is_sharded, wait_for_updates
from shardlib.errors import InputError
from shardlib.layout import Layout
from shardlib.testing.equivalence import measure, parts
from shardlib.testing.equivalence.case import Case
from shardlib.testing.equivalence.paths import Paths, paths_of
from shardlib.testing.equivalence.precision import Coarsest
from shardlib.testing.equivalence.train import Run, cast, elsewhere, is_pipeline, named_tensors
from shardlib.testing.equivalence.twins import Twins, all_twins, single_device

__all__ = ["KINDS", "START", "Key", "Measured", "Notes", "compare", "in_order", "limits", "wrong"]

# In the order in which a training step makes them: the first that differs is nearest to the cause.
KINDS = ("output", "loss", "buffer", "gradient", "norm", "state", "parameter")
START = -1  # the "step" of the values that training starts from

Key = tuple[int, str, str]  # step, kind, name
T = TypeVar("T")


@dataclass
class Measured:
    """The measurements of ranks, equal on all of them after `compare`.

    Attributes:
        errors: the largest distance on any rank.
        alone: the single device's distance from float64, where it is not float64 itself.
        ranks: the ranks whose distance is above zero, for each key.
        replicas: elements that ranks hold with different bits: a sentence each.
        layouts: layouts that differ from the plan's: a sentence each.
        units: one unit of rounding of the value's own dtype on the single device.
        gathered: names of the ops that ranks computed on unsharded tensors, for lack of a sharding rule.
        tensors: the number of compared parameters and buffers.
        coarsest: the coarsest dtype that the model computes in; None where no limit had to be measured.
        paths: the paths of the engine that the sharded run has taken; None without a plan.
    """

    errors: dict[Key, float] = field(default_factory=dict)
    alone: dict[Key, float] = field(default_factory=dict)
    ranks: dict[Key, list[int]] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    units: dict[Key, float] = field(default_factory=dict)
    gathered: set[str] = field(default_factory=set)
    tensors: int = 0
    coarsest: torch.dtype | None = None
    paths: Paths | None = None


def compare(case: Case) -> list[tuple[Case, Measured]]:
    """Compare the runs of a case at each of its scales, on every rank of its mesh; return the same on all."""
    with Progress(f"proving on {case.mesh}", unit="passes") as progress:
        each = all_twins(case)
        progress.total = each[0].case.steps * each[0].case.accumulate
        with ops.record() as gathered:
            of_each = _train(each, progress.advance)
        for notes in of_each:
            notes.measured.gathered = {one.op for one in gathered}
            notes.layouts()
            notes.paths()
        return [(dataclasses.replace(case, scales=notes.both.case.scales), notes.exchanged()) for notes in of_each]


def _train(each: list[Twins], advance: Callable[[], None]) -> list[Notes]:
    """Train the runs side by side: those of one device once, which all sharded runs are compared with."""
    case = each[0].case
    runs = list(dict.fromkeys(run for both in each for run in both.runs))
    of_each = [Notes(both) for both in each]
    for notes in of_each:
        notes.tensors(START)
    for step in range(case.steps):
        for run in runs:
            run.begin(step)
        for micro in range(case.accumulate):
            losses = {run: run.forward_backward(step, micro) for run in runs}
            suffix = f" of pass {micro}" if case.accumulate > 1 else ""
            for notes in of_each:
                notes.batch(step * case.accumulate + micro)
                notes.loss(step, f"loss{suffix}", [losses[run] for run in notes.both.runs])
                notes.outputs(step, suffix)
            advance()
        for notes in of_each:
            notes.gradients(step)
        norms = {run: run.clip() for run in runs}
        for notes in of_each:
            notes.norms(step, [norms[run] for run in notes.both.runs])
        for run in runs:
            run.step()
        for notes in of_each:
            notes.state(step)
            plan = notes.both.sharded.plan
            if step == case.steps - 1 or plan is None or not plan.step.overlap:
                notes.tensors(step)
            # Else they arrive while the next forward runs, and what comes of it is compared. Reading them would wait.
    return of_each


class Notes:
    """The measurements of one rank."""

    def __init__(self, both: Twins) -> None:
        self.both, self.rank_coordinate = both, both.rank_coordinate
        self.measured = Measured()
        # What is a mean over data ranks: here, on the single device, and what the difference is divided by.
        self.means: dict[Key, tuple[float, float, float]] = {}
        self.prints: dict[Key, tuple[Any, int]] = {}
        self.batches: dict[int, int] = {}  # fingerprints of what has to be the same on every rank
        self.references: dict[Key, int] = {}
        self.placed = _placements(both.sharded.model)
        self.elsewhere = elsewhere(both.sharded.model)
        self.in_stages = is_pipeline(both.sharded.model)

    def batch(self, index: int) -> None:
        leaves = pytree.tree_leaves(self.both.single.batch)
        prints = [agree.fingerprint(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.batches[index] = hash(tuple(prints))

    def tensors(self, step: int) -> None:
        both = self.both
        for run in both.runs:
            wait_for_updates(run.model.parameters())
        trees = [run.tensors() for run in both.runs]
        if step == START:
            self.measured.tensors = len(trees[0][0]) + len(trees[0][1])
        for i, kind in enumerate(("parameter", "buffer")):
            self._all(step, kind, *(tree[i] for tree in trees))

    def gradients(self, step: int) -> None:
        self._all(step, "gradient", *(run.gradients() for run in self.both.runs))

    def state(self, step: int) -> None:
        self._all(step, "state", *(run.state() for run in self.both.runs))

    def outputs(self, step: int, suffix: str) -> None:
        trees = [_named_leaves(run.output, suffix) for run in self.both.runs]
        scalars = {name for name, leaf in trees[0].items() if not leaf.ndim}
        for name in scalars:
            if name in trees[-1] and not self.in_stages:
                self.loss(step, name, [tree[name] for tree in trees], kind="output")
        self._all(step, "output", *({k: v for k, v in t.items() if k not in scalars} for t in trees))

    def loss(self, step: int, name: str, values: list[torch.Tensor], *, kind: str = "loss") -> None:
        single, sharded = values[0], values[-1]
        key = (step, kind, name)
        self.references[key] = agree.fingerprint(single)
        sharded = sharded.full_tensor() if isinstance(sharded, DTensor) else sharded
        if sharded.is_floating_point():
            want = values[-2].item()
            scale = measure.scale_of(measure.size(values[-2].detach()), self._largest_output())
            self.measured.units[key] = torch.finfo(single.dtype).eps
            self.means[key] = (sharded.item(), want, scale)
            self.prints[key] = (self.rank_coordinate.data[0], agree.fingerprint(sharded))
            if len(values) > 2:
                self.measured.alone[key] = _relative(single.item(), want, scale)

    def _largest_output(self) -> float:
        """Return the largest output of the single device's last forward."""
        leaves = pytree.tree_leaves((self.both.exact or self.both.single).output)
        return max((measure.size(leaf.detach()) for leaf in leaves if isinstance(leaf, torch.Tensor)), default=0.0)

    def norms(self, step: int, values: list[torch.Tensor | None]) -> None:
        present = [value for value in values if value is not None]
        if len(present) == len(values):
            self._all(step, "norm", *({"all gradients": value.detach()} for value in present))

    def _all(
        self,
        step: int,
        kind: str,
        single: Mapping[str, torch.Tensor | None],
        *others: Mapping[str, torch.Tensor | None],
    ) -> None:
        sharded = others[-1]
        truth = others[0] if len(others) > 1 else single
        sizes = {name: measure.size(t.detach()) for name, t in truth.items() if t is not None}
        largest = max(sizes.values(), default=0.0)
        for name, want in truth.items():
            key = (step, kind, name)
            if name.split(": ")[0] in self.elsewhere:
                continue
            got = sharded.get(name)
            if kind == "output" and got is None and self.in_stages:
                continue  # the last stage's ranks have it, if any has
            if want is None or got is None:
                self.measured.errors[key] = 0.0 if want is got else math.inf
                continue
            scale = measure.scale_of(sizes[name], largest)
            mine, part = parts.pair(got, want, self.rank_coordinate)
            low = single[name]
            if low is not None and low.is_floating_point():
                self.measured.units[key] = torch.finfo(low.dtype).eps
            if len(others) > 1 and low is not None:
                self.measured.alone[key] = measure.distance(low.detach().to(want.dtype), want.detach(), scale)
                if mine.dtype == low.dtype:
                    mine = mine.to(want.dtype)
            self.measured.errors[key] = measure.distance(mine, part, scale)
            if kind != "output":
                self.prints[key] = (parts.shard_key(got), agree.fingerprint(mine.clone()))  # numpy pins a storage

    def paths(self) -> None:
        """Record the paths that the sharded run has taken."""
        run = self.both.sharded
        if isinstance(run, Run) and is_sharded(run.model):
            self.measured.paths = paths_of(run.model, at_scale=self.both.case.scales[0])

    def layouts(self) -> None:
        """Record layouts that differ from the plan; without a plan, from those at the start of training."""
        run = self.both.sharded
        if not isinstance(run, Run):
            self.measured.layouts, self.measured.replicas = run.off_plan(), run.unlike_replicas()  # type: ignore[attr-defined]
            return
        if is_sharded(run.model):
            self.measured.layouts = _off_plan(run, self.both)
            return
        for name, placements in _placements(run.model).items():
            if (before := self.placed[name]) != placements:
                self.measured.layouts[name] = f"has the placements {placements} after training, and had {before} before"

    def exchanged(self) -> Measured:
        """Exchange measurements, so that every rank has the largest distances and the disagreements of replicas."""
        mine = (self.measured, self.means, self.prints, self.batches, self.references)
        every = agree.exchange(mine, classes=[Measured, Paths])
        ranks, means, prints, batches, references = map(list, zip(*every, strict=True))
        _batches_agree(batches)
        _references_agree(references)
        merged = Measured(tensors=self.measured.tensors, paths=self.measured.paths)
        for rank, measured in enumerate(ranks):
            for key, error in measured.errors.items():
                merged.errors[key] = max(merged.errors.get(key, 0.0), error)
                if error > 0:
                    merged.ranks.setdefault(key, []).append(rank)
            merged.alone |= measured.alone
            merged.units |= measured.units
            merged.gathered |= measured.gathered
            merged.layouts |= {name: f"rank {rank}: {text}" for name, text in measured.layouts.items()}
        for key, (_mine, want, scale) in self.means.items():
            merged.errors[key] = _relative(math.fsum(other[key][0] for other in means) / len(means), want, scale)
            merged.ranks[key] = list(range(len(every)))
        merged.replicas = self.measured.replicas | _unlike_replicas(prints)
        return merged


def _batches_agree(by_rank: list[dict[int, int]]) -> None:
    if (index := _first_unlike(by_rank)) is not None:
        raise InputError(
            f"batch({index}) made other values on some ranks than on others. It must make the same global batch on "
            "every rank; each data rank then takes its rows. Draw it from a generator of its own, "
            "torch.Generator().manual_seed(step), on every rank alike."
        )


def _references_agree(by_rank: list[dict[Key, int]]) -> None:
    if (key := _first_unlike(by_rank)) is not None:
        raise InputError(
            f"The single device's {key[2]} at step {key[0]} is another one on some ranks than on others. model=, "
            "loss= and before_step= have to do the same on every rank: let them not depend on the rank, and draw "
            "random numbers from the default generator of torch or one of their own."
        )


def _first_unlike(by_rank: list[dict[T, int]]) -> T | None:
    """Return the first key under which ranks have different fingerprints."""
    return next((key for key in by_rank[0] if len({prints.get(key) for prints in by_rank}) > 1), None)


def _relative(got: float, want: float, scale: float) -> float:
    if not (math.isfinite(got) and math.isfinite(want)):
        return 0.0 if got == want else math.inf
    return abs(got - want) / scale if scale else abs(got)


def _named_leaves(output: Any, suffix: str) -> dict[str, torch.Tensor]:
    flat = flatten_with_path(output)[0]
    return {f"output{pytree.keystr(path)}{suffix}": leaf for path, leaf in flat if isinstance(leaf, torch.Tensor)}


def _unlike_replicas(by_rank: list[dict[Key, tuple[Any, int]]]) -> dict[str, str]:
    """Return tensors whose equal elements have different bits on ranks, with the first step of each."""
    unlike: dict[str, str] = {}
    for key in by_rank[0]:
        step, kind, name = key
        marks: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, prints in enumerate(by_rank):
            if key in prints:
                where, mark = prints[key]
                marks[where][mark].append(rank)
        groups = next((list(found.values()) for found in marks.values() if len(found) > 1), None)
        if groups is not None:
            sides = " and ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in groups)
            when = "before the first step" if step == START else f"at step {step}"
            unlike.setdefault(f"{kind} {name}", f"{sides} hold the same elements with different bits, {when}")
    return unlike


def _placements(model: nn.Module) -> dict[str, Any]:
    params, buffers = named_tensors(model)
    tensors = {**params, **buffers}.items()
    return {name: t.placements if isinstance(t, DTensor) else "a plain tensor" for name, t in tensors}


def _off_plan(run: Run, both: Twins) -> dict[str, str]:
    """Return parameters, gradients, buffers and optimizer state whose layout differs from the plan's rows."""
    plan, shape = get_plan(run.model), both.rank_coordinate.mesh
    params, buffers = named_tensors(run.model)
    found = {}
    for name, tensor in {**params, **buffers}.items():
        row = plan[name]
        planned_tensors: dict[str, Any] = {name: (tensor, row.stored)}
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            planned_tensors[f"gradient of {name}"] = (tensor.grad, row.state)  # the layout after the reduction
        for key, value in run.optimizer.state.get(tensor, {}).items() if isinstance(tensor, nn.Parameter) else ():
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.ndim:
                planned_tensors[f"{key} of {name}"] = (value, row.state)
        for what, (value, layout) in planned_tensors.items():
            if layout is not None and (problem := _unlike(value, layout.resolve(row.global_shape, shape), shape)):
                found[what] = problem
    return found


def _unlike(value: torch.Tensor, planned: Layout, shape: MeshShape) -> str | None:
    """Describe axes over which a tensor is sharded and the plan does not shard it, or the reverse."""
    due = dict(zip(shape.names, planned.placements(shape), strict=True))
    have = {}
    if isinstance(value, DTensor):
        have = dict(zip(value.device_mesh.mesh_dim_names or (), value.placements, strict=True))
    axes = [axis for axis in shape.names if shape[axis] > 1]
    if all(have.get(axis, Replicate()) == due[axis] for axis in axes):
        return None
    actual = str(parts.layout_of(value)[0]) if isinstance(value, DTensor) else "replicated on every rank"
    return f'has the layout "{actual}", where the plan has "{planned}"'


# --- how far is too far -------------------------------------------------------------------------------------------


def limits(case: Case, measured: Measured) -> dict[Key, float]:
    """Return the limit of each difference; `measure.py` derives them."""
    if case.dtype is not torch.float64:
        return _low_precision(case, measured)
    units = _units(measured.errors, measured, 0.0)
    limit = {key: max(measure.FLOAT64_LIMIT, min(measure.RATIO * unit, measure.CEILING)) for key, unit in units.items()}
    if any(limit[key] < error < measure.CEILING for key, error in measured.errors.items()):
        measured.coarsest, rounding = _errors_of_rounding(case)
        beside = _beside({key: rounding.get(key, 0.0) for key in limit}, units)
        limit = {key: max(least, min(beside[key], measure.CEILING)) for key, least in limit.items()}
    return limit


def _low_precision(case: Case, measured: Measured) -> dict[Key, float]:
    """Return limits relative to the single device's own error; where exceeded, to the larger of two draws of it."""
    alone = {key: measured.alone.get(key, 0.0) for key in measured.errors}
    units = _units(alone, measured, torch.finfo(case.dtype).eps)
    limit = _beside(alone, units)
    if any(measured.errors[key] > limit[key] for key in limit):
        _, rounding = _errors_of_rounding(case)
        limit = _beside({key: max(error, rounding.get(key, 0.0)) for key, error in alone.items()}, units)
    return limit


def _units(keys: Iterable[Key], measured: Measured, least: float) -> dict[Key, float]:
    return {key: max(least, measured.units.get(key, 0.0)) for key in keys}


def _beside(errors: Mapping[Key, float], units: Mapping[Key, float]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for kind in KINDS:
        of_kind = {key: error for key, error in errors.items() if key[1] == kind}
        found |= measure.limits_beside(of_kind, units, together=kind not in ("output", "gradient"))
    return found


def wrong(measured: Measured, limit: Mapping[Key, float]) -> list[Key]:
    """Return the differences beyond their limits, in the order of a training step."""
    return [key for key in in_order(measured.errors) if not measured.errors[key] <= limit[key]]


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Sort keys in the order of a training step: forward, backward, norm, update."""
    return sorted(keys, key=lambda key: (key[0], KINDS.index(key[1])))


def _errors_of_rounding(case: Case) -> tuple[torch.dtype, dict[Key, float]]:
    """Return the coarsest dtype that the model computes in, and how far each value moves on one device if every
    parameter moves by one unit of it, up or down: the farthest of a few draws.

    The ranks share the draws. Called on all of them, since all have measured the same.
    """
    first = cast(case.batch(0), case.dtype)  # made before: its own dtype is not the model's
    single = Run(dataclasses.replace(case, batch=lambda _index: first), single_device(case))
    with Coarsest() as seen:
        single.forward_backward(0, 0)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    unit = torch.finfo(seen.dtype).eps
    draws = range(rank, measure.DRAWS, ranks)
    with Progress("measuring rounding", unit="passes", total=len(draws) * case.steps * case.accumulate) as progress:
        mine = [_errors_of_a_draw(case, unit, progress.advance, seed=case.seed + 1 + draw) for draw in draws]
    farthest: dict[Key, float] = {}
    for errors in itertools.chain(*(agree.exchange(mine) if ranks > 1 else [mine])):
        for key, error in errors.items():
            farthest[key] = max(error, farthest.get(key, 0.0))
    return seen.dtype, farthest


def _errors_of_a_draw(case: Case, unit: float, advance: Callable[[], None], *, seed: int) -> dict[Key, float]:
    model = single_device(case)
    perturbed = _torch.copied(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in perturbed.parameters():
            sign = torch.randint(0, 2, p.shape, generator=generator).to(p.dtype) * 2 - 1
            p.mul_(1 + sign * unit)
    both = Twins(case, Run(case, model), Run(case, perturbed), None, parts.RankCoordinate(case.mesh, {}))
    (notes,) = _train([both], advance)
    means = {key: _relative(*mean) for key, mean in notes.means.items()}
    return notes.measured.errors | means
