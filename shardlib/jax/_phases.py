"""The shardings of a tree of parameters in each phase of a training step: by rules, or by a compiled model's plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch import nn

from shardlib._mesh import MeshShape
from shardlib._plan import LossScale, Phase, Plan, Row, RulesLike, Transform, make_plan
from shardlib.errors import InputError, nearest
from shardlib.jax._compile import Compiled, refuse_settings
from shardlib.jax._dtypes import torch_dtype
from shardlib.jax._mesh import from_named_sharding, shape_of
from shardlib.jax._storage import Storage, storage_of
from shardlib.jax._trees import path_name, shard_params
from shardlib.layout import Layout

__all__ = ["OfModel", "OfRules", "Phases", "with_params"]


class Phases(Protocol):
    """The layouts of a tree's leaves in each phase."""

    @property
    def mesh(self) -> Mesh:
        """The JAX mesh."""

    def shardings(self, params: Any, phase: Phase) -> Any:
        """Return the tree of shardings in a phase, for a tree of arrays or of their shapes."""

    def placed(self, params: Any) -> Any:
        """Return the tree as arrays with their stored shardings, which share no memory with what was given."""

    def values(self, params: Any) -> Any:
        """Return the tree that the loss is given: gathered as the plan says, in the compute dtype."""

    def scaler(self, params: Any) -> LossScale | None:
        """Return the scale of the loss that the plan asks for."""


@dataclass(frozen=True)
class OfModel:
    """The layouts of a compiled model, which gathers its parameters by itself."""

    fn: Compiled

    @property
    def mesh(self) -> Mesh:
        return self.fn.mesh

    def shardings(self, params: Any, phase: Phase) -> Any:
        self._check(params)
        return self.fn.shardings(params, phase)

    def placed(self, params: Any) -> Any:
        return _copied(params, self.shardings(params, "stored"))

    def values(self, params: Any) -> Any:
        return params

    def scaler(self, params: Any) -> LossScale | None:
        return None

    def _check(self, params: Any) -> None:
        trained = {row.name for row in self.fn.plan.rows if row.requires_grad}
        given = {*params} if isinstance(params, dict) else None
        if given is None:
            raise InputError(
                f"The step of a compiled model was given parameters as {type(params).__name__}; give the dict from "
                "names to arrays that compile_model returned."
            )
        if missing := sorted(trained - given):
            raise InputError(f"{len(missing)} arrays are missing, {', '.join(missing[:3])} among them.")
        if strange := sorted(given - trained):
            raise InputError(
                f'"{strange[0]}" was given, and is not a trained parameter of the model.{nearest(strange[0], trained)} '
                "Buffers and frozen parameters are fn.buffers."
            )
        for name, like in self.fn.abstract().items():
            if name in given and tuple(params[name].shape) != like.shape:
                raise InputError(
                    f'"{name}" was given as an array of shape {tuple(params[name].shape)}; it is {like.shape}. '
                    "fn.from_torch({name: tensor}) makes arrays of the right shape."
                )


class OfRules:
    """The layouts of a tree of arrays by rules on its paths, with transforms such as `zero(1)`."""

    def __init__(self, rules: RulesLike, mesh: Mesh, transforms: Transform | Sequence[Transform] = ()) -> None:
        self.rules, self.mesh, self.transforms = rules, mesh, transforms
        self._known: dict[Any, tuple[Plan, list[Storage]]] = {}

    def shardings(self, params: Any, phase: Phase) -> Any:
        structure = jax.tree.structure(params)
        return jax.tree.unflatten(structure, [stored.sharding(phase) for stored in self._planned(params)[1]])

    def placed(self, params: Any) -> Any:
        return _copied(shard_params(params, self.mesh, self.rules), self.shardings(params, "stored"))

    def values(self, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        stored = self._planned(params)[1]
        return jax.tree.unflatten(structure, [s.value(leaf) for s, leaf in zip(stored, leaves, strict=True)])

    def scaler(self, params: Any) -> LossScale | None:
        return self._planned(params)[0].step.scaler

    def _planned(self, params: Any) -> tuple[Plan, list[Storage]]:
        """Return the plan of a tree, and the storage of its leaves in order."""
        leaves, structure = jax.tree.flatten(params)
        key = structure, tuple((tuple(jnp.shape(leaf)), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
        if key not in self._known:
            shapes = shard_params(jax.tree.map(_shape_of_leaf, params), self.mesh, self.rules)
            named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
            plan, shape = self._plan(named), shape_of(self.mesh)
            self._known[key] = plan, [storage_of(_evenly(plan[name], shape), self.mesh, shape) for name in named]
        return self._known[key]

    def _plan(self, leaves: Mapping[str, Any]) -> Plan:
        """Plan the phases of arrays by name: their shardings say how they are stored, and transforms change that."""
        holder, rules = nn.Module(), {}
        for name, leaf in leaves.items():
            _hold(holder, name, leaf)
            rules[f"^{name}"] = from_named_sharding(leaf.sharding, len(leaf.shape))
        plan = make_plan(holder, shape_of(self.mesh), rules, transforms=self.transforms)
        refuse_settings(plan, served=("scaler",))
        return plan


def with_params(tree: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Return shardings for an optimizer's state: those of the parameters whose paths end the paths of its arrays.

    An array of another shape than its parameter's, or without a parameter, is replicated.

    >>> from shardlib.jax import make_mesh
    >>> mesh = make_mesh("tp=1")
    >>> params, split = {"w": jax.numpy.ones(2)}, {"w": NamedSharding(mesh, PartitionSpec("tp"))}
    >>> state = {"mu": params, "count": jax.numpy.zeros(())}
    >>> {name: str(s.spec) for name, s in with_params(state, params, split, mesh)["mu"].items()}
    {'w': "P('tp',)"}
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    own = {
        path: (tuple(leaf.shape), found) for (path, leaf), found in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }
    replicated = NamedSharding(mesh, PartitionSpec())

    def find(path: Any, leaf: Any) -> NamedSharding:
        ends = (own[path[at:]] for at in range(len(path) + 1) if path[at:] in own)
        return next((sharding for shape, sharding in ends if shape == tuple(leaf.shape)), replicated)

    return jax.tree_util.tree_map_with_path(find, tree)


def _copied(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda leaf, sharding: jax.device_put(leaf, sharding, may_alias=False), tree, shardings)


def _shape_of_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)


def _hold(module: nn.Module, name: str, leaf: jax.ShapeDtypeStruct) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in dict(module.named_children()):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    empty = torch.empty(tuple(leaf.shape), dtype=torch_dtype(leaf.dtype), device="meta")
    module.register_parameter(last, nn.Parameter(empty))


def _evenly(row: Row, mesh: MeshShape) -> Row:
    """Return the row with the axes that a transform added on a dim that they divide, or left out if there is none.

    An array of a tree keeps its shape, so no padding can make the shards of such a dim even.
    """
    changed = {}
    for phase, layout in row.layouts.items():
        if layout.uneven_dims(row.global_shape, mesh):
            added = [axis for axis in mesh.names if axis in layout.axes - row.compute.axes]
            even = next(_even_choices(row.compute, row.global_shape, mesh, added), row.compute)
            changed[phase] = dataclasses.replace(even, dtype=layout.dtype)
    return row.replace(**changed) if changed else row


def _even_choices(layout: Layout, shape: tuple[int, ...], mesh: MeshShape, added: Sequence[str]) -> Iterator[Layout]:
    for dim in range(len(shape)):
        moved = layout.with_axes(dim, (*layout.axes_of(dim), *added))
        if not moved.uneven_dims(shape, mesh):
            yield moved
