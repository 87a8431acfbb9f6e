"""What one rank sends in a training step over the data axes, from the table alone.

Between two phases of a parameter stands a transition (`shardlib.layout.transition`), and each has its time: gradients
go compute -> state, a pending sum over the data axes; where state is split further than what is stored, updated
parameters go state -> stored; where what is stored is split further than what is computed with, parameters go
stored -> compute before forward, and before backward too if they were let go. Rajbhandari et al. 2020, section 7,
count the same: 2 P (n-1)/n elements of P parameters without splits and at stages 1 and 2, 3 P (n-1)/n at stage 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch

from shardlib._mesh import MeshShape
from shardlib._plan.borrowed import lets_go
from shardlib._plan.memory import Blocks, of_ranks
from shardlib._plan.rows import Row
from shardlib._plan.step import Step
from shardlib.layout import Layout, transition
from shardlib.rules import Stage

__all__ = ["Traffic", "data_traffic"]

What: TypeAlias = Literal["parameters, forward", "parameters, backward", "gradients", "updated parameters"]
_ORDER: tuple[What, ...] = get_args(What)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind for one purpose, in a training step.

    Attributes:
        what: "parameters, forward", "parameters, backward", "gradients" or "updated parameters".
        kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
        axes: over which they run, in mesh order.
        bytes: what one rank sends in all of them, averaged over ranks.
        tensors: how many take part.
        times: how often in a step each is sent; `bytes` counts all.
    """

    what: What
    kind: str
    axes: tuple[str, ...]
    bytes: int
    tensors: int
    times: int = 1


def data_traffic(
    rows: Sequence[Row], mesh: MeshShape, blocks: Blocks | None, stages: Sequence[Stage], step: Step
) -> tuple[Traffic, ...]:
    """What the rank of the pipeline stage that sends most sends."""
    return max((_summed(stage, mesh, step) for stage in of_ranks(rows, mesh, blocks, stages, step)), key=_bytes)


def _bytes(traffic: Iterable[Traffic]) -> int:
    return sum(each.bytes for each in traffic)


def _summed(rows: Iterable[Row], mesh: MeshShape, step: Step) -> tuple[Traffic, ...]:
    total: dict[tuple[object, ...], Traffic] = {}
    for row in rows:
        for one in _row_traffic(row, mesh, step):
            key = (one.what, one.kind, one.axes, one.times)
            before = total.get(key, replace(one, bytes=0, tensors=0))
            total[key] = replace(before, bytes=before.bytes + one.bytes, tensors=before.tensors + 1)
    return tuple(sorted(total.values(), key=lambda each: _ORDER.index(each.what)))


def _row_traffic(row: Row, mesh: MeshShape, step: Step) -> Iterator[Traffic]:
    compute, stored = _bare(row.compute), _bare(row.stored)
    if stored != compute:
        dtype = _dtype(row, row.compute)
        goes = lets_go(row, step)
        passes = step.accumulate * (step.microbatches or 1 if goes else 1)  # through a pipeline
        yield from _sent("parameters, forward", stored, compute, row, dtype, mesh, passes)
        if goes:
            yield from _sent("parameters, backward", stored, compute, row, dtype, mesh, passes)
    if row.grad is not None and row.state is not None:
        split = not row.added("grad").isdisjoint(mesh.data_axes)
        summed = [axis for axis in mesh.data_axes if mesh[axis] > 1 and axis not in compute.axes]
        sums = replace(compute, partials=tuple((axis, "sum") for axis in summed))
        dtype = step.reduce_dtype or _dtype(row, row.grad)
        yield from _sent("gradients", sums, _bare(row.state), row, dtype, mesh, step.accumulate if split else 1)
        yield from _sent("updated parameters", _bare(row.state), stored, row, _dtype(row, row.stored), mesh, 1)


def _sent(
    what: What, src: Layout, dst: Layout, row: Row, dtype: torch.dtype, mesh: MeshShape, times: int
) -> Iterator[Traffic]:
    for move in transition(src, dst, row.global_shape, dtype, mesh):
        if move.kind != "slice":
            yield Traffic(what, move.kind, move.axes, times * move.bytes, 1, times)


def _bare(layout: Layout) -> Layout:
    """Where the elements lie, in whatever dtype and memory."""
    return replace(layout, dtype=None, memory="device")


def _dtype(row: Row, layout: Layout) -> torch.dtype:
    return layout.dtype or row.dtype
