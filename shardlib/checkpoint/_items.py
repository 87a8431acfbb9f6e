"""What a rank holds of tensors that belong to all: name, global shape, layout, and its local part.

Everything below this file - who writes what, files, reading - knows tensors as items only, and nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._mesh import MeshShape
from shardlib.checkpoint._boxes import Part, parts
from shardlib.engine import _torch
from shardlib.errors import CheckpointError, LayoutError, MeshError
from shardlib.layout import Layout

__all__ = [
    "Home",
    "Item",
    "elsewhere",
    "first_names",
    "home_of",
    "home_of_model",
    "item_of",
    "model_items",
    "tied_names",
]


@dataclass(frozen=True)
class Home:
    """The ranks that hold a tensor together, and where they sit: rank `ranks[i]` at place i of the mesh."""

    mesh: MeshShape
    ranks: tuple[int, ...]

    @classmethod
    def everywhere(cls, size: int) -> Home:
        """All ranks of the job, with no order among them that matters."""
        return cls(MeshShape(dp=size), tuple(range(size)))

    def coordinate(self, rank: int) -> dict[str, int]:
        return self.mesh.at(self.ranks.index(rank))

    @cached_property
    def array(self) -> Any:
        """The ranks as an array with one dim for each axis."""
        return np.array(self.ranks).reshape(self.mesh.sizes)


@dataclass(frozen=True)
class Item:
    """A tensor as one rank holds it.

    Attributes:
        section: "model" or "optimizer"; names are its own.
        name: in a checkpoint.
        shape, dtype: of the whole tensor.
        layout, home: how it lies, and on which ranks. Axes that do not split it hold copies.
        local: this rank's part, which loading writes to.
    """

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    home: Home
    local: torch.Tensor

    def parts(self, rank: int) -> list[Part]:
        """The boxes that a rank holds."""
        return parts(self.layout, self.shape, self.home.mesh, self.home.coordinate(rank))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split the tensor, in the mesh's order."""
        return tuple(axis for axis, size in self.home.mesh.items() if axis in self.layout.axes and size > 1)


def item_of(section: str, name: str, tensor: torch.Tensor, everywhere: Home) -> Item:
    """A tensor of a model or optimizer on this rank as an item: a DTensor in its layout, a plain one whole everywhere.

    Args:
        section: "model" or "optimizer".
        name: of the item.
        tensor: it.
        everywhere: the ranks that hold a plain one.

    Raises:
        CheckpointError: a DTensor that cannot be saved as it is: with partial sums, or split as no layout says.
    """
    if not isinstance(tensor, DTensor):
        local = tensor.detach()
        home, layout = everywhere, Layout.replicate(tensor.ndim)
    else:
        local, home = _torch.local_of(tensor).detach(), home_of(tensor.device_mesh)
        layout = _layout(name, tensor, home)
    shape = tuple(tensor.shape)
    item = Item(section, name, shape, tensor.dtype, layout, home, local)
    if isinstance(tensor, DTensor):
        rank = torch.distributed.get_rank()
        expected = layout.local_shape(shape, home.mesh, home.coordinate(rank))
        if tuple(local.shape) != tuple(expected):
            raise CheckpointError(
                f'"{name}" has local shape {tuple(local.shape)} on rank {rank}, and its layout "{layout}" of global '
                f"shape {shape} gives {tuple(expected)}. Make DTensors with distribute_tensor, or let shard_model."
            )
    return item


def _layout(name: str, tensor: DTensor, home: Home) -> Layout:
    mesh = tensor.device_mesh
    own = dict(zip(_axis_names(mesh), tensor.placements, strict=True))
    placements = [own.get(axis, torch.distributed.tensor.Replicate()) for axis in home.mesh.names]
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(f'"{name}" holds partial sums ({tensor.placements}); reduce it before it is saved.')
    try:
        return Layout.from_placements(placements, home.mesh, global_shape=tuple(tensor.shape))
    except LayoutError as error:
        raise CheckpointError(f'"{name}" cannot be saved as it lies: {error}') from error


_SPARE = ("dp", "tp", "fsdp", "sp", "cp", "ep", "pp", "shard", "replicate", "data", "model", "tensor")


def _axis_names(mesh: Any) -> tuple[str, ...]:
    """The names of a mesh's axes; where they mean nothing to shardlib, others: only which is which matters here."""
    names = tuple(mesh.mesh_dim_names or ())
    try:
        return MeshShape(dict.fromkeys(names, 1)).names
    except MeshError:
        root = tuple(_torch.root_mesh(mesh).mesh_dim_names or range(mesh.ndim))
        return tuple(_SPARE[root.index(name)] for name in names or range(mesh.ndim))


def home_of(mesh: Any) -> Home:
    """The ranks of a device mesh; of a sub-mesh, those of the mesh that it was sliced from, as far as they run the same
    stage of a pipeline."""
    root = _of_one_stage(_torch.root_mesh(mesh))
    if set(mesh.mesh_dim_names or ()) - set(root.mesh_dim_names or ()):  # flattened axes are not the root's
        root = mesh
    shape = MeshShape(dict(zip(_axis_names(root), root.shape, strict=True)))
    return Home(shape, tuple(_torch.ranks_of_mesh(root)))


def _of_one_stage(mesh: Any) -> Any:
    """The part of a mesh on which this rank's stage lies."""
    names = tuple(mesh.mesh_dim_names or ())
    kept = tuple(name for name in names if not _is_pipeline(name))
    return mesh[kept] if kept and kept != names else mesh


def _is_pipeline(axis: str) -> bool:
    try:
        return bool(MeshShape({axis: 1}).pipeline_axes)
    except MeshError:
        return False


def home_of_model(model: nn.Module, size: int) -> Home:
    """The ranks that hold what is plain in a model, or in the state of its parameters: those that run its stage."""
    from shardlib.engine import apply

    record = apply.record_of(model) if apply.is_sharded(model) else None
    return Home.everywhere(size) if record is None or record.pipeline is None else home_of(record.mesh)


def model_items(model: nn.Module, size: int) -> Iterator[Item]:
    """What a state dict of the model holds, tied tensors once under their first name in the whole model."""
    everywhere, first = home_of_model(model, size), first_names(model)
    seen: set[int] = set()
    for name, tensor in _state(model).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            if tensor.is_meta:
                raise CheckpointError(
                    f'"{name}" is on the meta device and has no values. Give the model values first: '
                    "shard_model(model, mesh, rules, init=...)."
                )
            yield item_of("model", first.get(name, name), tensor, everywhere)


def first_names(model: nn.Module) -> dict[str, str]:
    """Where other stages of a pipeline hold a tensor too: what the whole model calls it first."""
    from shardlib.engine import apply

    record = apply.record_of(model) if apply.is_sharded(model) else None
    if record is None or record.pipeline is None:
        return {}
    return {name: row.name for row in record.pipeline.plan.rows for name in row.tied}


def elsewhere(model: nn.Module | None) -> set[str]:
    """Names of tensors that are on ranks of other stages only."""
    from shardlib.engine import apply

    record = apply.record_of(model) if model is not None and apply.is_sharded(model) else None
    return set() if record is None or record.pipeline is None else record.pipeline.foreign


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names under which the model has one tensor, in its order; of a pipeline, the whole model."""
    if first := first_names(model):
        groups: dict[str, list[str]] = {}
        for name, one in first.items():
            groups.setdefault(one, []).append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)
    by_id: dict[int, list[str]] = {}
    for name, tensor in _state(model).items():
        if isinstance(tensor, torch.Tensor):
            by_id.setdefault(id(tensor), []).append(name)
    return tuple(tuple(names) for names in by_id.values() if len(names) > 1)


def _state(model: nn.Module) -> Mapping[str, Any]:
    """The state dict with the model's own tensors; what is no tensor must be nothing."""
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f'The model\'s state dict holds "{name}", a {type(value).__name__} and no tensor. Let '
                "get_extra_state() return a tensor, or give such values to save(..., extra=...)."
            )
    return state
