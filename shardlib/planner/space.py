"""Plans, records and prices of a model whose blocks are cut, each made once in a search."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from shardlib._mesh_shape import MeshShape
from shardlib._plan import (
    Cluster,
    Kernel,
    Part,
    Parts,
    Pass,
    Plan,
    StageShape,
    Work,
    blocks_per_stage,
    make_plan,
    parts_of,
    stacked_experts,
    stages_of_counts,
)
from shardlib._plan.quantities import parse_quantity
from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.pipeline.batch import rows as rows_of
from shardlib.engine.work import Cut, cut_of, record_work, tokens_of
from shardlib.errors import PlanError, RuleError
from shardlib.planner.candidates import Grid, Schedule, Sharding
from shardlib.rules import Rules
from shardlib.transforms import Transform, checkpoint_activations

__all__ = ["MARGIN", "Space", "budget_of", "with_rows"]

MARGIN = 0.1
"""The part of a device's memory that is left free."""

_KEPT = 3  # blocks: transforms look at whether there are more than two


F = TypeVar("F", bound=Callable[..., Any])


def _kept(method: F) -> F:
    """Let a method of `Space` keep what it has returned, in the object."""

    @functools.wraps(method)
    def asked(self: Any, *args: Any, **kwargs: Any) -> Any:
        key = (method.__name__, args, tuple(sorted(kwargs.items())))
        if key not in self.known:
            self.known[key] = method(self, *args, **kwargs)
        return self.known[key]

    return cast(F, asked)


class Space:
    """A model, its rules and a cluster.

    Args:
        model: a single-device module, on any device.
        rules: its rules, without a mode.
        cluster: the machines.
        example: the inputs of one example or of several: dim 0 of its tensors is that of examples.
        base: transforms that every candidate has.
        state_tensors: tensors of optimizer state for each parameter.
        compiled: whether ops that follow each other are fused.
    """

    def __init__(
        self,
        model: nn.Module,
        rules: Rules,
        cluster: Cluster,
        example: Any,
        base: Sequence[Transform],
        state_tensors: int,
        *,
        compiled: bool = False,
    ) -> None:
        self.compiled = compiled
        self.rules, self.cluster, self.base, self.state_tensors = rules, cluster, tuple(base), state_tensors
        self.example = example
        self.known: dict[Any, Any] = {}
        whole = make_plan(model, "dp=1", rules)
        self.blocks = whole.blocks.count if whole.blocks else 0
        self.experts = next((count for module in model.modules() if (count := stacked_experts(module))), 0)
        self.tokens = tokens_of(with_rows(example, 1))
        cut = cut_of(model, whole, least=_KEPT)
        meta = _torch.copied_with(model, lambda t: torch.empty_like(t, device="meta"), without=cut.dropped(model))
        self.model = cut.applied(meta)
        self.order = cut.order
        try:
            self._plan(MeshShape("dp=1"), None, ())
        except RuleError:  # rules that name blocks which are left out
            self.model, self.order = model, cut_of(model, whole, least=len(cut.order)).order

    @_kept
    def in_mode(self, mode: str | None) -> Rules:
        """Return the rules in a mode."""
        return self.rules if mode is None else self.rules.mode(mode)

    @_kept
    def _plan(self, mesh: MeshShape, mode: str | None, transforms: tuple[Transform, ...]) -> Plan:
        return make_plan(self.model, mesh, self.in_mode(mode), transforms=[*self.base, *transforms])

    @_kept
    def _cut(self, recompute: bool) -> Cut:
        return cut_of(self.model, self._plan(MeshShape("dp=1"), None, _recompute(recompute)))

    @_kept
    def work(self, axes: MeshShape, mode: str | None, rows: int, *, recompute: bool) -> Work:
        """Return the record of a microbatch of so many rows. From records of two and three rows, more are extrapolated:
        the operations and the bytes of an op are linear in rows. One row runs other ops: its dims fold."""
        if rows > 3:
            two, three = (self.work(axes, mode, count, recompute=recompute) for count in (2, 3))
            if (more := _extrapolated(two, three, rows)) is not None:
                return more
        plan, cut = self._plan(axes, mode, _recompute(recompute)), self._cut(recompute)
        known = None if (rows, recompute) == (1, False) else dict(self.work(axes, mode, 1, recompute=False).partial)
        found = record_work(self.model, plan, with_rows(self.example, rows), cut, known)
        return replace(found, order=self.order)

    @_kept
    def parts(self, mesh: MeshShape, grid: Grid, sharding: Sharding) -> tuple[Plan, Parts]:
        """Return the plan of a candidate on the cut model, and its parts."""
        plan = self._plan(mesh, grid.mode, (sharding.transform,) if sharding.transform else ())
        work = self.work(grid.model_axes, grid.mode, 1, recompute=False)
        return plan, parts_of(plan, work, self._cut(False).examples, state_tensors=self.state_tensors)

    def counts(self, grid: Grid, schedule: Schedule) -> list[int]:
        """Return the number of blocks on each stage."""
        return blocks_per_stage(len(self.order), grid.stages * schedule.per_rank)

    def shapes(self, grid: Grid, schedule: Schedule) -> tuple[StageShape, ...]:
        """Return the stages of a candidate."""
        if grid.stages == 1:
            return (StageShape(self.order),)
        return stages_of_counts(self.order, self.counts(grid, schedule), grid.stages, schedule.name)


def budget_of(cluster: Cluster, memory: str | float | None, margin: float) -> int:
    """Return the bytes that a device may hold.

    Args:
        cluster: the machines.
        memory: bytes of a device, as a number or in words; None is the cluster's.
        margin: the part of it that is left free.

    Raises:
        PlanError: a memory that cannot be read, or a margin that is no part.

    >>> budget_of(Cluster.preset("h100"), "50GB", 0.1)
    45000000000
    """
    if not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise PlanError(f"margin={margin!r} was given; give the part of the memory to leave free, from 0 to below 1.")
    budget = int((cluster.memory if memory is None else parse_quantity(memory, "B")) * (1 - margin))
    if budget < 1:
        shown = f"memory={memory!r} and margin={margin!r}"
        raise PlanError(f'{shown} leave nothing of a device to use; give its memory, such as "80GB".')
    return budget


def _recompute(wanted: bool) -> tuple[Transform, ...]:
    return (checkpoint_activations(),) if wanted else ()


def with_rows(example: Any, rows: int) -> Any:
    """Return an example with another number of rows, on `meta`.

    >>> with_rows(torch.zeros(2, 8), 5).shape
    torch.Size([5, 8])
    """
    count = rows_of(example)

    def sized(tensor: torch.Tensor) -> torch.Tensor:
        shape = (rows, *tensor.shape[1:]) if tensor.ndim and len(tensor) == count else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return pytree.tree_map_only(torch.Tensor, sized, example)


def _extrapolated(one: Work, two: Work, rows: int) -> Work | None:
    """Return the work of more rows than two and three, where these differ in sizes only."""
    try:
        return Work(
            before=_part(one.before, two.before, rows),
            after=_part(one.after, two.after, rows),
            kinds=tuple(_part(a, b, rows) for a, b in zip(one.kinds, two.kinds, strict=True)),
            order=one.order,
            partial=one.partial,
            boundary=_line(one.boundary, two.boundary, rows),
            tokens=_line(one.tokens, two.tokens, rows),
        )
    except ValueError:  # another number of ops
        return None


def _part(one: Part, two: Part, rows: int) -> Part:
    return Part(_pass(one.forward, two.forward, rows), _pass(one.backward, two.backward, rows))


def _pass(one: Pass, two: Pass, rows: int) -> Pass:
    kernels, fused = (
        tuple(_kernel(a, b, rows) for a, b in zip(some, others, strict=True))
        for some, others in ((one.kernels, two.kernels), (one.fused, two.fused))
    )
    collectives = tuple(
        replace(a, bytes=_line(a.bytes, b.bytes, rows)) for a, b in zip(one.collectives, two.collectives, strict=True)
    )
    return Pass(kernels, fused, collectives, _line(one.left, two.left, rows), max(_line(one.peak, two.peak, rows), 0))


def _kernel(one: Kernel, two: Kernel, rows: int) -> Kernel:
    if (one.op, one.dtype) != (two.op, two.dtype):
        raise ValueError(one.op)
    return replace(one, flops=_line(one.flops, two.flops, rows), bytes=_line(one.bytes, two.bytes, rows))


def _line(one: int, two: int, rows: int) -> int:
    """Return the value at `rows` of a line through its values at two and three."""
    return one + (two - one) * (rows - 2)
