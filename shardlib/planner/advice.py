"""Advice for a plan that does not fit: the cheapest changes that make it fit, with their price in time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from os import PathLike
from typing import Any

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Cluster, Plan, StepTime
from shardlib._plan.quantities import spell_quantity
from shardlib._plan.readable import human_bytes
from shardlib.engine import dryrun
from shardlib.engine.pipeline.batch import rows as rows_of
from shardlib.errors import ShardlibError, TooLargeError
from shardlib.planner.space import MARGIN, budget_of, with_rows
from shardlib.transforms import Transform, parse

__all__ = ["Change", "changes_that_fit", "check_memory", "memory_advice"]

_SHARDED = ("zero", "fsdp", "hsdp")
_COUNT = 3


@dataclass(frozen=True)
class Change:
    """A plan that fits, and what it changes.

    Attributes:
        what: the change, in the words of its code.
        mesh: the mesh.
        transforms: all transforms, in order.
        time: the predicted step.
    """

    what: str
    mesh: MeshShape
    transforms: tuple[str, ...]
    time: StepTime


def check_memory(
    model: nn.Module,
    plan: Plan,
    cluster: Cluster | str | PathLike[str],
    *,
    example: Any,
    memory: str | float | None = None,
    margin: float = MARGIN,
) -> StepTime:
    """Return the predicted step of a plan, or raise if it does not fit a device.

    Args:
        model: the single-device model of the plan; on `meta` will do.
        plan: its plan.
        cluster: the machines.
        example: as for `Plan.time`.
        memory: bytes of a device; by default the cluster's.
        margin: the part of it that is left free.

    Raises:
        TooLargeError: it does not fit; the message has the three cheapest changes that make it fit, with their price.
        PlanError: as `Plan.time` does.

    >>> import shardlib as sl
    >>> model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048))
    >>> plan = sl.plan(model, "dp=4", {"**": None})
    >>> batch = torch.empty(64, 2048, device="meta")
    >>> try:
    ...     check_memory(model, plan, "h100", example=batch, memory="150MB")
    ... except sl.errors.TooLargeError as error:
    ...     "zero(3)" in str(error)
    True
    """
    machines = Cluster.of(cluster)
    budget = budget_of(machines, memory, margin)
    time = plan.time(machines, example=example)
    if time.memory.total <= budget:
        return time
    raise TooLargeError(_said(time, budget, changes_that_fit(model, plan, machines, example=example, budget=budget)))


@contextmanager
def memory_advice(
    model: nn.Module, plan: Plan, cluster: Cluster | str | PathLike[str], *, example: Any, margin: float = MARGIN
) -> Iterator[None]:
    """Add the cheapest changes that make a plan fit to an out-of-memory error that is raised inside.

    Args:
        model: the model on one device, as on `meta`: that which is trained is sharded already.
        plan: its plan.
        cluster: the machines; their memory is the budget.
        example: as for `Plan.time`.
        margin: the part of the memory that is left free.

    Raises:
        PlanError: the cluster cannot be read, or the margin is no part; before anything runs inside.

    >>> import shardlib as sl
    >>> single = nn.Linear(64, 64)
    >>> with memory_advice(single, sl.plan(single, "dp=2", {"**": None}), "h100", example=torch.empty(8, 64)):
    ...     pass
    """
    machines = Cluster.of(cluster)
    budget = budget_of(machines, None, margin)
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            try:
                time = plan.time(machines, example=example)
                less = min(budget, time.memory.total - 1)  # it did not fit, whatever was predicted
                note = _said(time, less, changes_that_fit(model, plan, machines, example=example, budget=less))
            except ShardlibError as reason:
                note = f"There is no advice on memory: {reason}"
            error.add_note(note)
        raise


def changes_that_fit(
    model: nn.Module, plan: Plan, cluster: Cluster | str | PathLike[str], *, example: Any, budget: int
) -> list[Change]:
    """Return the three fastest changes that make a plan fit, the fastest first: one setting, else two, else more.

    Args:
        model: the single-device model of the plan.
        plan: its plan.
        cluster: the machines.
        example: as for `Plan.time`.
        budget: bytes that a device may hold.
    """
    machines, rows = Cluster.of(cluster), rows_of(example)
    found: list[Change] = []
    options = [*_options(plan, rows, machines)]
    for size in (1, 2, 3):
        for chosen in combinations(options, size):
            if len({one.setting for one in chosen}) == size:
                found += _priced(model, plan, machines, example, chosen, budget)
        if len(found) >= _COUNT:
            break
    return sorted(found, key=lambda change: change.time.seconds)[:_COUNT]


@dataclass(frozen=True)
class _Option:
    """A change of one setting: transforms that are put in the place of others, fewer rows in a pass, another mesh.

    Attributes:
        setting: of two changes of one setting, a plan takes one.
        what: the change, in the words of its code.
        added: a transform.
        dropped: names of transforms that it replaces.
        passes: into so many the rows of a pass are divided.
        mesh: the mesh, if it is another one.
        gathered: so many data ranks become one, which takes the rows of all of them.
    """

    setting: str
    what: str
    added: str = ""
    dropped: tuple[str, ...] = ()
    passes: int = 1
    mesh: MeshShape | None = None
    gathered: int = 1


def _options(plan: Plan, rows: int, cluster: Cluster) -> Iterator[_Option]:
    names = [text.partition("(")[0] for text in plan.transforms]
    stage = _stage_of(plan.transforms)
    if plan.mesh.data_ranks > 1 and "hsdp" not in names:
        for text, rank in (("zero(1)", 1), ("zero(2)", 2), ("zero(3)", 3)):
            if rank > stage:
                yield _Option("sharding", f"transforms={text}", text, _SHARDED)
    if plan.repeated and "checkpoint_activations" not in names:
        yield _Option("recompute", "transforms=checkpoint_activations()", "checkpoint_activations()")
    if not plan.stages:
        for passes in (2, 4, 8):
            if rows % passes == 0:
                count = passes * plan.step.accumulate
                yield _Option("passes", "", f"accumulate({count})", ("accumulate",), passes=passes)
    if plan.rules is not None and not plan.idle_axes:
        yield from _meshes(plan.mesh, cluster)
    if "offload" not in names and cluster.host_bandwidth is not cluster.memory_bandwidth:
        yield _Option("offload", 'transforms=offload("state")', 'offload("state")')
    if "precision" not in names and "bfloat16" in dict(cluster.products):
        yield _Option("precision", 'transforms=precision("bf16")', 'precision("bf16")')


def _meshes(mesh: MeshShape, cluster: Cluster) -> Iterator[_Option]:
    """Iterate over meshes of as many ranks, of which more share each tensor: data ranks become ranks of `tp`."""
    sizes = dict(mesh.items())
    for data in mesh.data_axes[-1:]:
        for by in (2, 4, 8):
            tp = sizes.get("tp", 1) * by
            if sizes[data] % by == 0 and tp <= cluster.devices:
                made = MeshShape({**sizes, data: sizes[data] // by, "tp": tp})
                yield _Option("mesh", f'mesh="{made}"', mesh=made, gathered=by)


def _stage_of(transforms: Sequence[str]) -> int:
    """Return how far data ranks share what they hold already."""
    stages = [
        3 if text.startswith(("fsdp", "hsdp")) else int(text[5:6]) for text in transforms if text.startswith(_SHARDED)
    ]
    return max(stages, default=0)


def _priced(
    model: nn.Module, plan: Plan, cluster: Cluster, example: Any, chosen: Sequence[_Option], budget: int
) -> list[Change]:
    dropped = {name for one in chosen for name in one.dropped}
    kept = [text for text in plan.transforms if text.partition("(")[0] not in dropped]
    texts = (*kept, *(one.added for one in chosen if one.added))
    mesh = next((one.mesh for one in chosen if one.mesh is not None), plan.mesh)
    passes, gathered = (math.prod(getattr(one, name) for one in chosen) for name in ("passes", "gathered"))
    rows = rows_of(example) * gathered // passes
    batch = example if rows == rows_of(example) else with_rows(example, rows)
    try:
        made = dryrun.plan(model, mesh, plan.rules, transforms=_parsed(texts))
        time = made.time(cluster, example=batch)
    except ShardlibError:
        return []  # settings that this plan cannot have
    if time.memory.total > budget or made.idle_axes:
        return []
    what = [one.what for one in chosen if one.passes == 1]
    if passes > 1:
        count = passes * plan.step.accumulate
        what.append(f"accumulate({count}), with {rows} rows in each pass")
    elif gathered > 1:
        what.append(f"{rows} rows for each data rank")
    return [Change(" and ".join(what), mesh, texts, time)]


def _parsed(texts: Sequence[str]) -> list[Transform]:
    return [parse(text) for text in texts]


def _said(time: StepTime, budget: int, changes: Sequence[Change]) -> str:
    head = (
        f"The plan holds {time.memory}, and {human_bytes(budget)} of a device may be used: it lacks "
        f"{human_bytes(time.memory.total - budget)}."
    )
    if not changes:
        return f"{head} No change of its transforms or of tp makes it fit: use more ranks, or a pp axis (best_plans)."
    lines = [
        f"  {each.what}: {human_bytes(each.time.memory.total)}, a step of "
        f"{spell_quantity(each.time.seconds, 's', digits=3)} ({each.time.seconds / time.seconds - 1:+.1%})"
        for each in changes
    ]
    return "\n".join([f"{head} The cheapest changes that make it fit:", *lines])
