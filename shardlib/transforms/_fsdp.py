"""Fully sharded data parallelism: ZeRO stage 3 with the options of PyTorch's `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardlib._plan import Plan, Row, join_small
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.transforms._choose import Names, as_names, axes_of, quoted
from shardlib.transforms._transform import Transform
from shardlib.transforms._zero import split_plan

__all__ = ["Fsdp", "Hsdp", "fsdp", "hsdp"]


def fsdp(axis: Names = None, *, reshard_after_forward: bool | None = None, only: Names = None) -> Transform:
    """Shard as `zero(3)` does, and choose whether parameters are resharded between forward and backward.

    Args:
        axis: a data axis, several, outermost first, or None for all.
        reshard_after_forward: True: parameters of every unit are resharded after forward and unsharded again for
            backward; False: they stay unsharded; None, as `fully_shard` does for its root: those of repeated blocks are
            resharded, others stay unsharded. Blocks so small that two buckets hold all of them stay unsharded too:
            the buckets need this memory anyway.
        only: patterns of parameters, or of modules, as in rules; None is all.

    Raises:
        PlanError: applied to a plan, an axis that is not a data axis, a pattern that matches nothing.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> sharded = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"}) | fsdp()
    >>> str(sharded["weight"].stored), str(sharded["weight"].compute), sharded["weight"].reshard
    ('out@dp in', 'out in', False)
    """
    return Fsdp(as_names(axis), reshard_after_forward, as_names(only))


def hsdp(*, shard: Names, replicate: str, only: Names = None) -> Transform:
    """Shard as `fsdp` does over one data axis and replicate over another (hybrid sharding).

    Args:
        shard: the data axis, or axes, over which parameters are sharded.
        replicate: the data axis over which they are replicated; gradients are reduced over both.
        only: patterns of parameters, or of modules, as in rules; None is all.

    Raises:
        PlanError: applied to a plan, an axis that is not a data axis, one named twice, or a `replicate` axis that
            shards a tensor already.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> made = sl.plan(nn.Linear(64, 64, bias=False), "dp=2,fsdp=4", {"weight": "out in"})
    >>> str((made | hsdp(shard="fsdp", replicate="dp"))["weight"].state)
    'out@fsdp in'
    """
    return Hsdp(as_names(shard), replicate, as_names(only))


@dataclass(frozen=True, repr=False)
class Fsdp(Transform):
    """The transform that `fsdp` returns."""

    call: ClassVar[str] = "fsdp"
    axis: str | tuple[str, ...] | None = None
    reshard_after_forward: bool | None = None
    only: str | tuple[str, ...] | None = None

    def __call__(self, plan: Plan) -> Plan:
        return _sharded(plan, self.axis, self.reshard_after_forward, self.only, self)


@dataclass(frozen=True, repr=False)
class Hsdp(Transform):
    """The transform that `hsdp` returns."""

    call: ClassVar[str] = "hsdp"
    leading: ClassVar[int] = 0
    shard: str | tuple[str, ...] | None
    replicate: str
    only: str | tuple[str, ...] | None = None

    def __call__(self, plan: Plan) -> Plan:
        axes_of(plan, self.shard, self), axes_of(plan, self.replicate, self)
        shard = (self.shard,) if isinstance(self.shard, str) else self.shard or ()
        if not shard or self.replicate in shard:
            raise PlanError(
                f"{self}: name different data axes, one to shard over and one to replicate over; "
                f'mesh "{plan.mesh}" has {quoted(plan.mesh.data_axes)}.'
            )
        if split := [row.name for row in plan.rows if self.replicate in row.stored.axes]:
            raise PlanError(
                f'{self}: "{self.replicate}" shards {split[0]} already (of {len(split)} tensors). Take the axis out of '
                "the rule or the transform that shards them, or replicate over another."
            )
        return _sharded(plan, self.shard, None, self.only, self)


def _sharded(plan: Plan, axis: Names, reshard_after_forward: bool | None, only: Names, who: object) -> Plan:
    units = {*plan.units} if reshard_after_forward else set()
    if reshard_after_forward is None:
        units = _large_blocks(plan)
    data = frozenset(plan.mesh.data_axes)

    def reshards(row: Row, stored: Layout) -> bool:
        return row.reshard if data.isdisjoint(stored.axes - row.compute.axes) else plan.unit(row) in units

    return split_plan(plan, ("stored", "grad", "state"), axis, only, who, reshards)


def _large_blocks(plan: Plan) -> set[str]:
    """Return the repeated blocks, unless they are unsharded in two buckets or less: these are never freed."""
    sizes = dict.fromkeys(plan.repeated, 0)
    for row in plan.rows:
        if (unit := plan.unit(row)) in sizes:
            sizes[unit] += row.compute.local_bytes(row.global_shape, row.dtype, plan.mesh)
    joined = join_small(sizes, lambda unit: None, plan.step.joined_bytes)
    return {*plan.repeated} if len(joined) > 2 else set()
