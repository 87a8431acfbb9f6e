"""Notes on layouts: what a layout means for the module of its tensor, as a plan prints it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardlib._mesh_shape import MeshShape
from shardlib.layout import Layout
from shardlib.rules.dims import ModuleDims

__all__ = ["contracted_axes", "replicated_note", "split_note"]


def contracted_axes(layout: Layout, registered: ModuleDims, tensor: str, mesh: MeshShape) -> tuple[str, ...]:
    """Return the model axes that shard a dim which the module contracts: its output is a partial sum over them."""
    if not layout.axes:
        return ()
    named = registered.dims(tensor, len(layout.dims)) or ()
    return tuple(
        axis
        for at, name in enumerate(named)
        if name in registered.contracted
        for axis in layout.axes_of(at)
        if mesh.kind(axis) == "model" and mesh[axis] > 1
    )


def split_note(
    layout: Layout, global_shape: Sequence[int], registered: ModuleDims | None, tensor: str, mesh: MeshShape
) -> str:
    """Return the note on a sharded tensor: which dims, their role in the module, and whether a dim is sharded "
    "unevenly."""
    named = registered.dims(tensor, len(global_shape)) if registered else None
    dims = [at for at in range(len(global_shape)) if layout.axes_of(at)]
    words = [
        f"{_part(registered, named[at], layout.axes_of(at), mesh)} ({_dim_called(named[at], at)})"
        if registered and named
        else f"{'expert-parallel' if _spreads(layout.axes_of(at), mesh) else 'sharded'} (dim {at})"
        for at in dims
    ]
    uneven = any(global_shape[at] % math.prod(mesh[axis] for axis in layout.axes_of(at)) for at in dims)
    return ", ".join(words) + ("; uneven" if uneven else "")


def replicated_note(*, absent: Sequence[str], added_to_a_sum: bool, optional: bool) -> str:
    """Return the note on a tensor that has a rule and that no axis of this mesh shards, with the reason.

    >>> replicated_note(absent=["tp"], added_to_a_sum=False, optional=False)
    'replicated: the mesh has no tp'
    """
    if added_to_a_sum:
        return "replicated; added once after the reduction"
    if absent:
        return f"replicated: the mesh has no {', '.join(absent)}"
    return "replicated: does not divide" if optional else "replicated"


def _part(registered: ModuleDims, name: str, axes: Sequence[str], mesh: MeshShape) -> str:
    if all(mesh.kind(axis) == "data" for axis in axes):
        return "stored in shards"
    if registered.output in name.strip("()").split():
        return "column-parallel"
    return "row-parallel" if name in registered.contracted else "sharded"


def _spreads(axes: Sequence[str], mesh: MeshShape) -> bool:
    return any(mesh.kind(axis) == "expert" for axis in axes)


def _dim_called(name: str, at: int) -> str:
    if name == "_":
        return f"dim {at}"
    return name.strip("()") if name.startswith("(") else f"{name} dim"
