"""All ranks in one process: tensors cut up, moved between layouts by the listed collectives, and put together.

For what needs no processes: laws of layouts and prices, at a fraction of a millisecond an example. The limits:

- It moves elements, not time: no overlap, no order between ranks, no backend, no hang.
- It knows tensors and layouts, not programs. Torch has a simulation of programs (`LocalTensorMode`, torch 2.13), which
  does not hold up: all ranks run the same Python lines there, and code that asks for its rank gets a symbolic number
  for all of them, with which `shard_model` fails at once; and a plain tensor that is distributed to a fused layout is
  silently cut wrong. A warm call on four real ranks costs some ten milliseconds: `shardlib.testing.ranks`.
- Partial layouts may be sums and means, or maxima, or minima: a sum of maxima is not a maximum of sums, and a layout
  does not say which is meant.

>>> stored, compute = Layout.parse("a@(tp,fsdp) b"), Layout.parse("a@tp b")
>>> t = torch.arange(24.0).reshape(8, 3)
>>> moved = carry_out(cut(t, stored, "fsdp=2,tp=2"), stored, compute, t.shape, "fsdp=2,tp=2")
>>> torch.equal(whole(moved, compute, t.shape, "fsdp=2,tp=2"), t)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations, product

import torch

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Collective, Layout, transition

__all__ = ["carry_out", "cut", "whole"]

_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
}
# What is added to the value x on the ranks of an axis, in turn; reduced it gives x again, and no two are alike.
_UNLIKE: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "sum": lambda x, i, n: 2 * x if i == n - 1 else -x if i == 0 else torch.zeros_like(x),
    "avg": lambda x, i, n: x + (2 * i - (n - 1)),
    "max": lambda x, i, n: x - (n - 1 - i),
    "min": lambda x, i, n: x + (n - 1 - i),
}


def cut(tensor: torch.Tensor, layout: Layout, mesh: MeshLike) -> list[torch.Tensor]:
    """Return every rank's local tensor, rank 0 first. Partial layouts get different summands, exact for integers.

    >>> cut(torch.arange(4), Layout.parse("a@tp"), "tp=2")
    [tensor([0, 1]), tensor([2, 3])]
    >>> cut(torch.arange(3), Layout.parse("a + sum@tp"), "tp=2")
    [tensor([ 0, -1, -2]), tensor([0, 2, 4])]
    """
    _check(layout)
    shape = MeshShape.of(mesh)
    shards = []
    for coordinate in _coordinates(shape):
        local = layout.take(tensor, shape, coordinate).clone()
        for axis, op in layout.partials:
            if shape[axis] > 1:
                local = _UNLIKE[op](local, coordinate[axis], shape[axis])
        shards.append(local)
    return shards


def whole(shards: Sequence[torch.Tensor], layout: Layout, global_shape: Sequence[int], mesh: MeshLike) -> torch.Tensor:
    """Assemble a tensor from its shards, reduced over partial axes; the inverse of `cut`.

    Raises:
        LayoutError: ranks that hold the same elements do not agree; or the shards do not fit the layout.
    """
    _check(layout)
    shape = MeshShape.of(mesh)
    reduced = list(shards)
    for axis, op in layout.partials:
        for group in shape.groups((axis,)):
            total = _REDUCE[op](torch.stack([reduced[rank] for rank in group]))
            for rank in group:
                reduced[rank] = total.to(shards[0].dtype)
    plain = replace(layout, partials=())
    found = plain.put(reduced, global_shape, shape)
    for rank, coordinate in enumerate(_coordinates(shape)):
        if not torch.equal(plain.take(found, shape, coordinate), reduced[rank]):
            raise LayoutError(
                f'Layout "{layout}" on mesh "{shape}": rank {rank} holds other values than a rank that holds the same '
                "elements. Compare the shards of ranks that differ only on axes that shard nothing."
            )
    return found


def carry_out(
    shards: Sequence[torch.Tensor], src: Layout, dst: Layout, global_shape: Sequence[int], mesh: MeshLike
) -> list[torch.Tensor]:
    """Perform the collectives that `transition(src, dst, ...)` lists, in order, on the shards of all ranks.

    Where each rank gets exactly what the listed kinds, axes and bytes allow, and in the end what `dst` says.

    Raises:
        LayoutError: the listed collectives do not lead there: an element is missing, or the bytes are others.
    """
    _check(src)
    _check(dst)
    shape, size = MeshShape.of(mesh), tuple(global_shape)
    steps = transition(src, dst, size, shards[0].dtype, shape)
    problem = ""
    for scatter_dims in _scatter_choices(steps, len(size)):
        ranks = _Ranks.holding(shards, src, dst, size, shape)
        problem = ranks.perform(steps, scatter_dims)
        if not problem:
            return ranks.shards()
    listed = ", ".join(map(str, steps)) or "nothing"
    raise LayoutError(f'From "{src}" to "{dst}" of {size} on mesh "{shape}" by {listed}: {problem}.')


_ScatterDim = int | None
"""The dim that a scattered axis shards, or None for the dim that it shards in the end."""


def _scatter_choices(steps: Sequence[Collective], ndim: int) -> Iterator[Mapping[str, _ScatterDim]]:
    """Iterate over the dims to scatter to, which collectives do not name: every choice and order of axes is tried."""
    scattered = [axis for step in steps if step.kind == "reduce_scatter" for axis in step.axes]
    for axes in permutations(scattered):
        for scatter_dims in product((None, *range(ndim)), repeat=len(axes)):
            yield dict(zip(axes, scatter_dims, strict=True))


@dataclass
class _Ranks:
    """Every rank's values in a tensor of global shape, and which of them it holds; `needs` is what `dst` asks for."""

    src: Layout
    dst: Layout
    mesh: MeshShape
    values: list[torch.Tensor]
    holds: list[torch.Tensor]
    needs: list[torch.Tensor]

    @classmethod
    def holding(
        cls, shards: Sequence[torch.Tensor], src: Layout, dst: Layout, size: tuple[int, ...], mesh: MeshShape
    ) -> _Ranks:
        at = torch.arange(math.prod(size)).reshape(size)
        values, holds, needs = [], [], []
        for shard, coordinate in zip(shards, _coordinates(mesh), strict=True):
            mine, wanted = src.take(at, mesh, coordinate), dst.take(at, mesh, coordinate)
            values.append(shard.new_zeros(at.numel()).index_put((mine.flatten(),), shard.flatten()).reshape(size))
            holds.append(torch.isin(at, mine.flatten()))
            needs.append(torch.isin(at, wanted.flatten()))
        return cls(src, dst, mesh, values, holds, needs)

    def shards(self) -> list[torch.Tensor]:
        return [self.dst.take(v, self.mesh, c) for v, c in zip(self.values, _coordinates(self.mesh), strict=True)]

    def perform(self, steps: Sequence[Collective], scatter_dims: Mapping[str, _ScatterDim]) -> str:
        """Perform all steps; return what is wrong, or an empty string."""
        fresh = {a: op for a, op in self.dst.partials if self.src.partial.get(a) != op and self.mesh[a] > 1}
        for step in steps:
            sent = self._perform(step, scatter_dims)
            if step.kind != "copy" and math.ceil(sent * self.values[0].dtype.itemsize) != step.bytes:
                return f"{step} sends {float(sent * self.values[0].dtype.itemsize):g} bytes a rank"
        for rank, (has, wants) in enumerate(zip(self.holds, self.needs, strict=True)):
            if bool((wants & ~has).any()):
                return f"rank {rank} does not get all that it needs"
        for axis, op in fresh.items():
            for rank, coordinate in enumerate(_coordinates(self.mesh)):
                self.values[rank] = _UNLIKE[op](self.values[rank], coordinate[axis], self.mesh[axis])
        return ""

    def _perform(self, step: Collective, scatter_dims: Mapping[str, _ScatterDim]) -> Fraction:
        """Perform one step; return the elements that a rank sends, on average."""
        if step.kind == "slice":
            for axis in step.axes:
                self._keep(axis, None)
        elif step.kind in ("all_reduce", "reduce_scatter"):
            return self._reduce(step, scatter_dims)
        elif step.kind in ("all_gather", "all_to_all"):
            return self._exchange(step.axes)
        return Fraction(0)

    def _reduce(self, step: Collective, scatter_dims: Mapping[str, _ScatterDim]) -> Fraction:
        held = Fraction(sum(int(has.sum()) for has in self.holds), len(self.holds))
        op = self.src.partial[step.axes[0]]
        for group in self.mesh.groups(step.axes):
            total = _REDUCE[op](torch.stack([self.values[rank] for rank in group]))
            for rank in group:
                self.values[rank] = total.to(self.values[rank].dtype)
        n = math.prod(self.mesh[axis] for axis in step.axes)
        sent = held * Fraction(n - 1, n)
        if step.kind == "all_reduce":
            return 2 * sent
        for axis in (axis for axis in scatter_dims if axis in step.axes):
            self._keep(axis, scatter_dims[axis])
        return sent

    def _exchange(self, axes: Sequence[str]) -> Fraction:
        """Exchange between the ranks of a group the elements that each needs and lacks."""
        received, holds, values = 0, list(self.holds), list(self.values)
        for group in self.mesh.groups(axes):
            for rank in group:
                for other in group:
                    new = self.needs[rank] & self.holds[other] & ~holds[rank]
                    received += int(new.sum())
                    values[rank] = torch.where(new, self.values[other], values[rank])
                    holds[rank] = holds[rank] | new
        self.holds, self.values = holds, values
        return Fraction(received, len(holds))

    def _keep(self, axis: str, dim: _ScatterDim) -> None:
        """Let an axis split the elements that its ranks hold: in a dim, or as in the destination."""
        coordinates = list(_coordinates(self.mesh))
        for group in self.mesh.groups((axis,)):
            for index, rank in enumerate(group):
                if dim is None:
                    needs_here = [need for need, c in zip(self.needs, coordinates, strict=True) if c[axis] == index]
                    self.holds[rank] = self.holds[rank] & torch.stack(needs_here).any(0)
                else:
                    self.holds[rank] = self.holds[rank] & _chunk(self.holds[rank], dim, index, len(group))


def _chunk(held: torch.Tensor, dim: int, index: int, n: int) -> torch.Tensor:
    """Return one of n pieces of the held elements, along a dim."""
    others = [d for d in range(held.ndim) if d != dim]
    rows = (held.any(others) if others else held).nonzero().flatten().chunk(n)
    mine = torch.zeros(held.shape[dim], dtype=torch.bool)
    if index < len(rows):
        mine[rows[index]] = True
    return mine.reshape([-1 if d == dim else 1 for d in range(held.ndim)])


def _coordinates(mesh: MeshShape) -> Iterator[dict[str, int]]:
    return (mesh.coordinate(rank) for rank in range(mesh.world_size))


def _check(layout: Layout) -> None:
    ops = set(layout.partial.values())
    if unknown := sorted(ops - set(_REDUCE)):
        raise LayoutError(f'Layout "{layout}": "{unknown[0]}" cannot be simulated; known are {", ".join(_REDUCE)}.')
    if len(ops) > 1 and not ops <= {"sum", "avg"}:
        raise LayoutError(
            f'Layout "{layout}" mixes {" and ".join(sorted(ops))}, whose order changes the value. Reduce one first.'
        )
