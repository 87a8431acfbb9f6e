"""Trees of arrays without a module, laid out by rules on their paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch import nn

from shardlib._plan import RulesLike, make_plan
from shardlib.errors import InputError
from shardlib.jax._dtypes import refuse_narrowed, torch_dtype
from shardlib.jax._exchange import to_jax
from shardlib.jax._mesh import named_sharding, shape_of
from shardlib.layout import Layout

__all__ = ["path_name", "shard_params"]


def path_name(path: Sequence[Any]) -> str:
    """Convert a leaf's path in a tree to a name for rules: keys joined by dots.

    >>> tree = {"layers": [{"kernel": 0}]}
    >>> [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    ['layers.0.kernel']
    """
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path)


def shard_params(params: Any, mesh: Mesh, rules: RulesLike) -> Any:
    """Shard a tree of arrays or tensors over a JAX mesh, by rules on the names of its paths.

    Args:
        params: any tree of arrays, numpy arrays or tensors, such as flax's parameters; or of `jax.ShapeDtypeStruct`s,
            as `jax.eval_shape` makes them, which get shardings: `load` reads a checkpoint into them.
        mesh: a JAX mesh.
        rules: as for a model, with text layouts: `Rules({"kernel": "in out@tp"}, unmatched="replicate")`.

    Returns:
        The same tree of `jax.Array`s, of the same shapes; without values where there were none.

    Raises:
        RuleError, LayoutError: the rules do not say one clear thing about these names; a factor of a fused dim is
            sharded, which no array of this shape can be.
        InputError: a dim that its axes do not divide; a leaf that is not an array, or that JAX would narrow.

    >>> from shardlib.jax import make_mesh
    >>> tree = {"dense": {"kernel": torch.ones(4, 8), "bias": torch.ones(8)}}
    >>> laid = shard_params(tree, make_mesh("tp=1"), {"kernel": "in out@tp", "bias": "out@tp"})
    >>> laid["dense"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    shape = shape_of(mesh)
    holder, names = nn.Module(), [path_name(path) for path, _ in leaves]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f'Two paths of the tree make the name "{twice[0]}"; rename keys that hold dots.')
    for name, (_, leaf) in zip(names, leaves, strict=True):
        _hold(holder, name, _checked(name, leaf))
    laid_out = make_plan(holder, shape, rules)
    arrays = [_placed(name, leaf, mesh, laid_out[name].stored) for name, (_, leaf) in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, arrays)


def _checked(name: str, leaf: Any) -> Any:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise InputError(
            f'shard_params was given a tree with {type(leaf).__name__} {leaf!r} at "{name}"; its leaves must be '
            "arrays, tensors or jax.ShapeDtypeStructs. Give the parameters alone, or jnp.asarray(...)."
        )
    refuse_narrowed(leaf.dtype if isinstance(leaf, torch.Tensor) else torch_dtype(leaf.dtype), f'"{name}"')
    return leaf


def _hold(module: nn.Module, name: str, leaf: Any) -> None:
    """Register a tensor without values under a name, for rules to resolve."""
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in dict(module.named_children()):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    dtype = leaf.dtype if isinstance(leaf, torch.Tensor) else torch_dtype(leaf.dtype)
    empty = torch.empty(tuple(leaf.shape), dtype=dtype, device="meta")
    module.register_parameter(last, nn.Parameter(empty, requires_grad=False))


def _placed(name: str, leaf: Any, mesh: Mesh, layout: Layout) -> Any:
    shape = tuple(leaf.shape)
    if uneven := layout.uneven_dims(shape, shape_of(mesh)):
        raise InputError(
            f'"{name}" of global shape {shape} with layout "{layout}" on mesh "{shape_of(mesh)}" has uneven shards in '
            f"dim {uneven[0]}, and JAX has only even ones. Pad it, or shard another dim."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = named_sharding(layout.resolve(shape, shape_of(mesh)), mesh)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, torch.Tensor):
        return to_jax(leaf, mesh, layout, copy=True)
    return jax.device_put(leaf, named_sharding(layout.resolve(shape, shape_of(mesh)), mesh))
