"""The plan of a model that something else sharded, read from its DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan.make import make_plan
from shardlib._plan.value import Plan
from shardlib.errors import MeshError, PlanError
from shardlib.layout import Layout
from shardlib.rules import Rules
from shardlib.rules.dims import dims_of

if TYPE_CHECKING:
    from torch import nn

__all__ = ["plan_of_sharded"]


def plan_of_sharded(model: nn.Module, mesh: MeshLike | None) -> Plan:
    """Return the plan that shards a model as its DTensors are sharded; see `Plan.of`."""
    if isinstance(model, type) or not hasattr(model, "named_modules"):
        raise PlanError(f"A model was given as {type(model).__name__}; give a torch.nn.Module with DTensors.")
    tensors = dict(_tensors(model))
    found = {name: tensor for name, tensor in tensors.items() if _is_dtensor(tensor)}
    shape = _shape_of([tensor.device_mesh for tensor in found.values()], mesh)
    rules = {f"^{name}": _layout(model, name, tensor, shape) for name, tensor in found.items()}
    made = make_plan(model, shape, Rules(rules, unmatched="replicate"))
    rows = (row.replace(rule=None, note="" if row.name in found else "no DTensor") for row in made.rows)
    return made.replace(rows=tuple(rows), borders=(), rules=None)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _shape_of(meshes: Iterable[Any], given: MeshLike | None) -> MeshShape:
    """Return all axes of some meshes, those of the mesh with most axes first."""
    if given is not None:
        return MeshShape.of(given)
    sizes: dict[str, int] = {}
    for mesh in sorted(meshes, key=lambda each: -each.ndim):
        if mesh.mesh_dim_names is None:
            raise MeshError(
                f"The model's DTensors are on {mesh}, whose axes have no names. Give the mesh with names, such as "
                f'Plan.of(model, "{", ".join(f"axis{at}={size}" for at, size in enumerate(mesh.shape))}").'
            )
        for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise MeshError(f'The model has DTensors on an axis "{name}" of {sizes[name]} and of {size} ranks.')
    return MeshShape(sizes)


def _layout(model: nn.Module, name: str, tensor: Any, shape: MeshShape) -> Layout:
    """Return the layout of a DTensor, with the names that its dims have in a layer that is known."""
    from torch.distributed.tensor import Replicate

    axes = tensor.device_mesh.mesh_dim_names or shape.names
    own = dict(zip(axes, tensor.placements, strict=True))
    owner, _, attribute = name.rpartition(".")
    known = dims_of(model.get_submodule(owner))
    dims = None if known is None else known.dims(attribute, tensor.ndim)
    if dims is not None and not all(map(str.isidentifier, dims)):
        dims = None
    return Layout.from_placements(
        [own.get(axis, Replicate()) for axis in shape.names], shape, ndim=tensor.ndim, dim_names=dims
    )
