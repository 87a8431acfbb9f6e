"""Items: tensors as one rank holds them, by name, global shape, layout and local shard.

Modules below this one - the assignment of writers, files, reading - use items only, and do not know the engine.
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

from shardlib._mesh_shape import MeshShape
from shardlib.engine import _torch
from shardlib.errors import CheckpointError, LayoutError, MeshError
from shardlib.layout import Layout
from shardlib.layout._boxes import Part, parts

__all__ = [
    "Item",
    "RankMesh",
    "elsewhere",
    "first_names",
    "item_of",
    "model_items",
    "rank_mesh_of",
    "rank_mesh_of_model",
    "tied_names",
]


@dataclass(frozen=True)
class RankMesh:
    """The ranks that hold a tensor together, and their coordinates: rank `ranks[i]` is at index i of the mesh."""

    mesh: MeshShape
    ranks: tuple[int, ...]

    @classmethod
    def everywhere(cls, size: int) -> RankMesh:
        """Return all ranks of the job, in any order."""
        return cls(MeshShape(dp=size), tuple(range(size)))

    def coordinate(self, rank: int) -> dict[str, int]:
        return self.mesh.at(self.ranks.index(rank))

    @cached_property
    def array(self) -> Any:
        """The ranks as an array with one dim for each axis."""
        return np.array(self.ranks).reshape(self.mesh.sizes)


@dataclass(frozen=True)
class Item:
    """A tensor of the job, and this rank's shard of it.

    Attributes:
        section: "model" or "optimizer"; names are its own.
        name: the tensor's name in a checkpoint.
        shape, dtype: global shape and dtype.
        layout, rank_mesh: the layout, and its ranks. Axes that do not split the tensor hold copies.
        local: this rank's local shard, which loading overwrites.
    """

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    rank_mesh: RankMesh
    local: torch.Tensor

    def parts(self, rank: int) -> list[Part]:
        """Return the boxes that a rank holds."""
        return parts(self.layout, self.shape, self.rank_mesh.mesh, self.rank_mesh.coordinate(rank))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split the tensor, in the mesh's order."""
        return tuple(axis for axis, size in self.rank_mesh.mesh.items() if axis in self.layout.axes and size > 1)


def item_of(section: str, name: str, tensor: torch.Tensor, everywhere: RankMesh) -> Item:
    """Return a tensor of a model or optimizer as an item: a DTensor with its layout, a plain tensor as replicated
    everywhere.

    Args:
        section: "model" or "optimizer".
        name: the name of the item.
        tensor: the tensor.
        everywhere: the ranks that replicate a plain tensor.

    Raises:
        CheckpointError: a DTensor that cannot be saved: partial, or with placements that have no layout.
    """
    if tensor.layout is not torch.strided:
        raise CheckpointError(
            f'"{name}" is a sparse tensor ({tensor.layout}), which safetensors cannot hold. Register the buffer with '
            "persistent=False, and give its parts, such as indices and values, to save(..., extra=...)."
        )
    if not isinstance(tensor, DTensor):
        local = tensor.detach()
        rank_mesh, layout = everywhere, Layout.replicate(tensor.ndim)
    else:
        local, rank_mesh = _torch.local_of(tensor).detach(), rank_mesh_of(tensor.device_mesh)
        layout = _layout(name, tensor, rank_mesh)
    shape = tuple(tensor.shape)
    item = Item(section, name, shape, tensor.dtype, layout, rank_mesh, local)
    if isinstance(tensor, DTensor):
        rank = torch.distributed.get_rank()
        expected = layout.local_shape(shape, rank_mesh.mesh, rank_mesh.coordinate(rank))
        if tuple(local.shape) != tuple(expected):
            raise CheckpointError(
                f'"{name}" has local shape {tuple(local.shape)} on rank {rank}, and its layout "{layout}" of global '
                f"shape {shape} gives {tuple(expected)}. Make DTensors with distribute_tensor, or let shard_model."
            )
    return item


def _layout(name: str, tensor: DTensor, rank_mesh: RankMesh) -> Layout:
    mesh = tensor.device_mesh
    own = dict(zip(_axis_names(mesh), tensor.placements, strict=True))
    placements = [own.get(axis, torch.distributed.tensor.Replicate()) for axis in rank_mesh.mesh.names]
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(f'"{name}" holds partial sums ({tensor.placements}); reduce it before it is saved.')
    try:
        return Layout.from_placements(placements, rank_mesh.mesh, global_shape=tuple(tensor.shape))
    except LayoutError as error:
        raise CheckpointError(f'"{name}" cannot be saved with its placements: {error}') from None


_SUBSTITUTES = ("dp", "tp", "fsdp", "sp", "cp", "ep", "pp", "shard", "replicate", "data", "model", "tensor")


def _axis_names(mesh: Any) -> tuple[str, ...]:
    """Return the names of a mesh's axes, or substitutes where they are not valid names of shardlib axes."""
    names = tuple(mesh.mesh_dim_names or ())
    try:
        return MeshShape(dict.fromkeys(names, 1)).names
    except MeshError:
        root = tuple(_torch.root_mesh(mesh).mesh_dim_names or range(mesh.ndim))
        return tuple(_SUBSTITUTES[root.index(name)] for name in names or range(mesh.ndim))


def rank_mesh_of(mesh: Any) -> RankMesh:
    """Return the ranks of a device mesh; of a sub-mesh, those of the root mesh that run the same stage of a
    pipeline."""
    root = _of_one_stage(_torch.root_mesh(mesh))
    if set(mesh.mesh_dim_names or ()) - set(root.mesh_dim_names or ()):  # flattened axes are not the root's
        root = mesh
    shape = MeshShape(dict(zip(_axis_names(root), root.shape, strict=True)))
    return RankMesh(shape, tuple(_torch.ranks_of_mesh(root)))


def _of_one_stage(mesh: Any) -> Any:
    """Return the sub-mesh of this rank's stage."""
    names = tuple(mesh.mesh_dim_names or ())
    kept = tuple(name for name in names if not _is_pipeline(name))
    return mesh[kept] if kept and kept != names else mesh


def _is_pipeline(axis: str) -> bool:
    try:
        return bool(MeshShape({axis: 1}).pipeline_axes)
    except MeshError:
        return False


def rank_mesh_of_model(model: nn.Module, size: int) -> RankMesh:
    """Return the ranks that replicate the plain tensors of a model and of its parameters' state: those of its stage."""
    from shardlib.engine import apply

    record = apply.record_of(model) if apply.is_sharded(model) else None
    return RankMesh.everywhere(size) if record is None or record.pipeline is None else rank_mesh_of(record.mesh)


def model_items(model: nn.Module, size: int) -> Iterator[Item]:
    """Iterate over the tensors of the model's state dict; tied tensors appear once, under their first name in the full
    model."""
    everywhere, first = rank_mesh_of_model(model, size), first_names(model)
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
    """Map each name to the first name of its tensor in the full model; empty without a pipeline."""
    from shardlib.engine import apply

    record = apply.record_of(model) if apply.is_sharded(model) else None
    if record is None or record.pipeline is None:
        return {}
    return {name: row.name for row in record.pipeline.stages.plan.rows for name in row.tied}


def elsewhere(model: nn.Module | None) -> set[str]:
    """Return the names of tensors that only ranks of other stages hold."""
    from shardlib.engine import apply

    record = apply.record_of(model) if model is not None and apply.is_sharded(model) else None
    return set() if record is None or record.pipeline is None else record.pipeline.stages.foreign


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return groups of names of tied tensors, in the model's order; for a pipeline, of the full model."""
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
    """Return the state dict with the model's own tensors, and refuse other values."""
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f'The model\'s state dict holds "{name}", a {type(value).__name__} and no tensor. Let '
                "get_extra_state() return a tensor, or give such values to save(..., extra=...)."
            )
    return state
