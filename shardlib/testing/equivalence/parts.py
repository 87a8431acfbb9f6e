"""The part of a single device's tensor that a rank's tensor must equal."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from shardlib._mesh_shape import MeshShape
from shardlib.engine import _torch
from shardlib.errors import LayoutError
from shardlib.layout import Layout

__all__ = ["RankCoordinate", "cuts", "layout_of", "local", "pair", "shard_key"]


@dataclass(frozen=True)
class RankCoordinate:
    """The coordinate of a rank on the mesh."""

    mesh: MeshShape
    coordinate: dict[str, int]

    @property
    def data(self) -> tuple[int, int]:
        """The index of this rank's block of rows, and the number of blocks."""
        return self.mesh.data_place(self.coordinate) if self.coordinate else (0, 1)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor."""
    return _torch.local_of(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


def pair(
    got: torch.Tensor, want: torch.Tensor, rank_coordinate: RankCoordinate
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a rank's local tensor and the expected one; None where no part of `want` has its shape.

    Args:
        got: the sharded run's tensor on this rank: a DTensor, or a plain tensor that is replicated over model axes, or
            a block of rows, or the piece that a hand-written layer leaves.
        want: the single device's tensor, equal on every rank.
        rank_coordinate: this rank's coordinate.

    Collective where `got` is a DTensor with partial sums, which are reduced first.
    """
    full = _matching(want.detach(), tuple(got.shape), rank_coordinate)
    if not isinstance(got, DTensor):
        return got.detach(), full
    if any(p.is_partial() for p in got.placements):
        with torch.no_grad():
            got = got.redistribute(placements=[Replicate() if p.is_partial() else p for p in got.placements])
    if full is None:
        return local(got), None
    layout, mesh, coordinate = layout_of(got)
    return local(got), layout.take(full, mesh, coordinate)


def layout_of(tensor: DTensor) -> tuple[Layout, MeshShape, dict[str, int]]:
    """Return the layout of a DTensor, the shape of its mesh, and this rank's coordinate there."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    layout, shape = _layout(tensor.placements, tuple(zip(names, mesh.shape, strict=True)), tuple(tensor.shape))
    return layout, shape, dict(zip(names, mesh.get_coordinate() or (), strict=False))


@functools.lru_cache(maxsize=4096)  # gradients, state and parameters have the same layouts in every step
def _layout(
    placements: tuple[Placement, ...], axes: tuple[tuple[str, int], ...], global_shape: tuple[int, ...]
) -> tuple[Layout, MeshShape]:
    shape = MeshShape(dict(axes))
    return Layout.from_placements(placements, shape, global_shape=global_shape), shape


def _matching(want: torch.Tensor, shape: tuple[int, ...], rank_coordinate: RankCoordinate) -> torch.Tensor | None:
    """Return the part of `want` with this shape on this rank: data axes split rows, model axes other dims."""
    if tuple(want.shape) == shape:
        return want
    if want.ndim != len(shape):
        return None
    return next((part for _, part in cuts(want, shape, rank_coordinate)), None)


def cuts(
    want: torch.Tensor, shape: tuple[int, ...], rank_coordinate: RankCoordinate
) -> Iterator[tuple[Layout, torch.Tensor]]:
    """Iterate over layouts by which this rank has a part of `want` of this shape, the likeliest first, with the
    part."""
    for layout in _candidates(tuple(want.shape), shape, rank_coordinate):
        try:
            part = layout.take(want, rank_coordinate.mesh, rank_coordinate.coordinate)
        except LayoutError:
            continue
        if tuple(part.shape) == shape:
            yield layout, part


def _candidates(want: tuple[int, ...], got: tuple[int, ...], rank_coordinate: RankCoordinate) -> Iterator[Layout]:
    """Iterate over layouts with local shape `got` of `want`, the likeliest first: data axes split one dim together."""
    cut = [dim for dim, (full, piece) in enumerate(zip(want, got, strict=True)) if full != piece]
    data = tuple(axis for axis in rank_coordinate.mesh.data_axes if rank_coordinate.mesh[axis] > 1)
    model = [axis for axis in rank_coordinate.mesh.model_axes if rank_coordinate.mesh[axis] > 1]
    groups: list[tuple[str, ...]] = [data] if data else []
    groups += [axes for n in range(1, len(model) + 1) for axes in itertools.permutations(model, n)]
    groups += [(*data, axis) for axis in model] if data else []
    for choice in itertools.product(groups, repeat=len(cut)):
        used = list(itertools.chain(*choice))
        if len(set(used)) == len(used):
            layout = Layout.replicate(len(want))
            for dim, axes in zip(cut, choice, strict=True):
                layout = layout.with_axes(dim, axes)
            yield layout


def shard_key(tensor: Any) -> tuple[Any, ...]:
    """Return what distinguishes ranks with different elements of a tensor: their coordinate on the axes that split
    it."""
    if not isinstance(tensor, DTensor):
        return ()
    indices = tensor.device_mesh.get_coordinate() or ()
    return tuple(i for i, p in zip(indices, tensor.placements, strict=False) if not p.is_replicate())
