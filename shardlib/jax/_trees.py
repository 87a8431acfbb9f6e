"""Trees of arrays without a module, laid out by rules on their paths; logical axes of flax and its kin as rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch import nn

from shardlib._plan import RulesLike, plan
from shardlib.errors import InputError, RuleError
from shardlib.jax._dtypes import torch_dtype
from shardlib.jax._exchange import to_jax
from shardlib.jax._mesh import named_sharding, shape_of
from shardlib.layout import Layout
from shardlib.rules import Rules

__all__ = ["path_name", "rules_from_logical_axes", "shard_params"]

Axes = str | Sequence[str] | None


def path_name(path: Sequence[Any]) -> str:
    """A leaf's path in a tree as a name for rules: keys joined by dots.

    >>> tree = {"layers": [{"kernel": 0}]}
    >>> [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    ['layers.0.kernel']
    """
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path)


def shard_params(params: Any, mesh: Mesh, rules: RulesLike) -> Any:
    """A tree of arrays or tensors, laid out over a mesh of JAX by rules on the names that its paths make.

    Args:
        params: any tree of arrays, numpy arrays or tensors, such as flax's parameters.
        mesh: of JAX.
        rules: as for a model, with text layouts: `{"kernel": "in out@tp", "**": None}`.

    Returns:
        The same tree of `jax.Array`s, of the same shapes.

    Raises:
        RuleError, LayoutError: the rules do not say one clear thing about these names; a fused dim is split inside,
            which no array of this shape can be.
        InputError: a dim that its axes do not divide.

    >>> from shardlib.jax import make_mesh
    >>> tree = {"dense": {"kernel": torch.ones(4, 8), "bias": torch.ones(8)}}
    >>> laid = shard_params(tree, make_mesh("tp=1"), {"kernel": "in out@tp", "bias": "out@tp"})
    >>> laid["dense"]["kernel"].sharding.spec
    P(None, 'tp')
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    shape = shape_of(mesh)
    holder, names = nn.Module(), [path_name(path) for path, _ in leaves]
    for name, (_, leaf) in zip(names, leaves, strict=True):
        _hold(holder, name, leaf)
    laid_out = plan(holder, shape, rules)
    arrays = [_placed(name, leaf, mesh, laid_out[name].stored) for name, (_, leaf) in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, arrays)


def _hold(module: nn.Module, name: str, leaf: Any) -> None:
    """A tensor without values under this name, for rules to resolve on."""
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
            f'"{name}" of global shape {shape} with layout "{layout}" on mesh "{shape_of(mesh)}" has uneven pieces in '
            f"dim {uneven[0]}, and JAX has only even ones. Pad it, or split another dim."
        )
    if isinstance(leaf, torch.Tensor):
        return to_jax(leaf, mesh, layout, copy=True)
    return jax.device_put(leaf, named_sharding(layout.resolve(shape, shape_of(mesh)), mesh))


def rules_from_logical_axes(logical: Any, rules: Sequence[tuple[str, Axes]]) -> Rules:
    """Logical axis names of parameters, and flax's rules for them, as rules.

    As in flax the first rule of a name holds whose mesh axes the tensor does not use yet; a name without a rule, and
    None, is not split. Names of dims become those of the layouts.

    Args:
        logical: a tree whose leaves are tuples of names, one for each dim of a parameter; None for a dim without.
        rules: pairs of a logical name and a mesh axis, several of them, or None.

    Raises:
        RuleError: a leaf that is no tuple of names.

    >>> axes = {"dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)}}
    >>> rules_from_logical_axes(axes, [("mlp", "tp"), ("embed", None)])
    Rules({"^dense.bias": "mlp@tp", "^dense.kernel": "embed mlp@tp"})
    """
    leaves = jax.tree_util.tree_flatten_with_path(logical, is_leaf=lambda node: isinstance(node, tuple))[0]
    return Rules({f"^{path_name(path)}": _layout_text(path_name(path), names, rules) for path, names in leaves})


def _layout_text(parameter: str, names: Any, rules: Sequence[tuple[str, Axes]]) -> str:
    if not isinstance(names, tuple) or any(name is not None and not isinstance(name, str) for name in names):
        raise RuleError(
            f'The logical axes of "{parameter}" were given as {names!r}; give a tuple with a name, or None, for each '
            "dim."
        )
    used: set[str] = set()
    dims = []
    for at, name in enumerate(names):
        axes = next((a for n, a in map(_pair, rules) if n == name and name is not None and used.isdisjoint(a)), ())
        used |= set(axes)
        word = name if name is not None and name not in names[:at] and name.isidentifier() else "_"
        dims.append(word + (f"@({','.join(axes)})" if len(axes) > 1 else f"@{axes[0]}" if axes else ""))
    return " ".join(dims)


def _pair(rule: tuple[str, Axes]) -> tuple[str, tuple[str, ...]]:
    name, axes = rule
    return name, (axes,) if isinstance(axes, str) else tuple(axes or ())
