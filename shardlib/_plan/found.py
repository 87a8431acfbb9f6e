"""The layouts of a model that something else sharded, read from its DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.errors import MeshError, PlanError
from shardlib.layout import Layout
from shardlib.rules import Rules
from shardlib.rules.dims import dims_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["read_dtensors"]


def read_dtensors(model: nn.Module, mesh: MeshLike | None) -> tuple[MeshShape, Rules]:
    """Return the mesh of a model's DTensors, and rules that name each of them.

    Raises:
        PlanError: no model.
        MeshError, LayoutError: as of `Plan.of`.
    """
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        raise PlanError(f"A model was given as {type(model).__name__}; give a torch.nn.Module with DTensors.")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name: t for name, t in tensors.items() if hasattr(t, "placements") and hasattr(t, "device_mesh")}
    shape = MeshShape.of(_axes_of(tensor.device_mesh for tensor in found.values()) if mesh is None else mesh)
    rules = {f"^{name}": _layout(tensor, shape, _dims(model, name, tensor.ndim)) for name, tensor in found.items()}
    return shape, Rules(rules, unmatched="replicate")


def _axes_of(meshes: Iterable[Any]) -> dict[str, int]:
    """Return all axes of some meshes, those of the mesh with most axes first."""
    sizes: dict[str, int] = {}
    for mesh in sorted(meshes, key=lambda each: -int(each.ndim)):
        if mesh.mesh_dim_names is None:
            named = ",".join(f"{name}={size}" for name, size in zip(("dp", "tp", "pp"), mesh.shape, strict=False))
            raise MeshError(
                f"The model has DTensors on a mesh of {tuple(mesh.shape)} ranks whose axes have no names. Name them: "
                f'Plan.of(model, "{named}").'
            )
        for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise MeshError(f'The model has DTensors on an axis "{name}" of {sizes[name]} and of {size} ranks.')
    if not sizes:
        raise MeshError('The model has no DTensors. Give the mesh that it runs on: Plan.of(model, "dp=8").')
    return sizes


def _dims(model: nn.Module, name: str, ndim: int) -> Sequence[str] | None:
    """Return the names of a tensor's dims in a layer that is known."""
    owner, _, attribute = name.rpartition(".")
    known = dims_of(model.get_submodule(owner))
    dims = None if known is None else known.dims(attribute, ndim)
    return dims if dims is not None and all(map(str.isidentifier, dims)) else None


def _layout(tensor: Any, shape: MeshShape, dims: Sequence[str] | None) -> Layout:
    from torch.distributed.tensor import Replicate

    axes = tensor.device_mesh.mesh_dim_names or shape.names
    if absent := [axis for axis in axes if axis not in shape] or len(axes) != len(tensor.placements):
        raise MeshError(f'A DTensor has {len(tensor.placements)} axes, {axes}, and mesh "{shape}" has not {absent}.')
    own = dict(zip(axes, tensor.placements, strict=True))
    placements = [own.get(axis, Replicate()) for axis in shape.names]
    return Layout.from_placements(placements, shape, ndim=tensor.ndim, dim_names=dims)
