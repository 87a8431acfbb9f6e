"""Logical axes of flax, t5x and MaxText: names for the dims of parameters, and the mesh axes that split each name.

A list of pairs is read as by `flax.linen.logical_to_mesh_axes` (flax 0.12). Pairs are read in their order, not in that
of the dims: each gives its mesh axes to the dim of its name, if that dim has none yet and no other dim of the tensor
has one of them. A pair with None leaves a dim unsplit, as does a name without a pair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

from shardlib.errors import LayoutError, RuleError
from shardlib.layout import Dim, Layout
from shardlib.rules.patterns import exactly

if TYPE_CHECKING:
    from shardlib._mesh_shape import MeshShape
    from shardlib.rules._resolution import Resolution, TensorLayout

__all__ = ["LogicalAxes", "LogicalRule", "read_logical_axes", "write_logical_axes"]

Axes = str | Sequence[str] | None
LogicalRule = tuple[str, Axes]
Names = tuple[str | None, ...]


class LogicalAxes(NamedTuple):
    """Layouts in flax's form: `Rules.from_logical_axes(*axes)` reads it.

    Attributes:
        names: nested dicts, by the parts of the parameters' names; each leaf has a name, or None, for each dim.
        rules: pairs of a name and its mesh axes, as for `flax.linen.logical_axis_rules`.
    """

    names: dict[str, Any]
    rules: list[LogicalRule]


# --- reading --------------------------------------------------------------------------------------------------------


def _all(_parameter: str, _name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    return axes


def read_logical_axes(
    logical: Any,
    rules: Iterable[LogicalRule],
    kept: Callable[[str, str, tuple[str, ...]], tuple[str, ...]] = _all,
) -> dict[str, Any]:
    """Return the arguments of `Rules` that express logical axes; see `Rules.from_logical_axes`.

    `kept` gets a parameter's name, the logical name of a dim and the axes that the dim has, and returns those to keep.

    >>> read_logical_axes({"wi": ("embed", "mlp")}, [("embed", "fsdp"), ("mlp", ("fsdp", "tp")), ("mlp", "tp")])
    {'rules': {'^wi': 'embed@fsdp mlp@tp'}}
    """
    pairs = [_pair(rule) for rule in _list_of(rules)]
    return {"rules": {exactly(name): _text(name, leaf, pairs, kept) for name, leaf in _leaves(logical)}}


def _list_of(rules: Any) -> Sequence[Any]:
    if isinstance(rules, list | tuple) and not any(isinstance(rule, str) for rule in rules):
        return rules
    raise RuleError(
        f"The rules for logical axes were given as {rules!r}; give a list of pairs of a logical name and mesh axes, in "
        'order of precedence: [("mlp", "tp"), ("embed", ("fsdp", "tp")), ("heads", None)].'
    )


def _pair(rule: Any) -> tuple[str, tuple[str, ...]]:
    match rule:
        case [str(name), None]:
            return name, ()
        case [str(name), str(axis)] if axis.isidentifier():
            return name, (axis,)
        case [str(name), [*axes]] if all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
            if len(set(axes)) == len(axes):
                return name, tuple(axes)
    raise RuleError(
        f"A rule for logical axes was given as {rule!r}; give a pair of a logical name and a mesh axis, several "
        'different ones, or None: ("mlp", "tp"), ("embed", ("fsdp", "tp")), ("heads", None).'
    )


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Iterate over the leaves with their paths; dicts and lists are nodes, as in JAX, anything else is a leaf."""
    if isinstance(tree, Mapping):
        inner: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list):
        inner = enumerate(tree)
    elif path:
        yield ".".join(path), tree
        return
    else:
        raise RuleError(
            f"Logical axes were given as {type(tree).__name__} {tree!r}; give a tree of dicts and lists, of the "
            'structure of the parameters, with a tuple of names at each: {"dense": {"kernel": ("embed", "mlp")}}.'
        )
    for key, node in inner:
        yield from _leaves(node, (*path, str(key)))


def _text(
    parameter: str,
    leaf: Any,
    pairs: Sequence[tuple[str, tuple[str, ...]]],
    kept: Callable[[str, str, tuple[str, ...]], tuple[str, ...]],
) -> str:
    names, open_end = _names_of(parameter, leaf)
    found: dict[str, tuple[str, ...]] = {}
    for name, axes in pairs:
        if name in names and name not in found and set(axes).isdisjoint(chain(*found.values())):
            found[name] = axes
    found = {name: kept(parameter, name, axes) for name, axes in found.items()}
    return " ".join([*(_dim(name, found.get(name or "", ())) for name in names), *(["..."] if open_end else [])])


def _names_of(parameter: str, leaf: Any) -> tuple[Names, bool]:
    """Return the names of a leaf's dims, and whether unsplit dims may follow, as after a short `PartitionSpec`."""
    boxed = getattr(leaf, "names", None)  # nn.Partitioned, nn.LogicallyPartitioned and t5x's AxisMetadata
    names = leaf if boxed is None else boxed
    if names is None or (not isinstance(names, tuple | str) and hasattr(names, "shape")):
        return (), True  # an array without a box has no names
    spec = _is_spec(names)
    if not (spec or isinstance(names, tuple)) or not all(name is None or isinstance(name, str) for name in names):
        raise RuleError(
            f'The logical axes of "{parameter}" were given as {names!r}; give a tuple with a name, or None, for each '
            "dim, or flax's box of one (nn.with_logical_partitioning makes it)."
        )
    names = tuple(names)
    if twice := [name for at, name in enumerate(names) if name is not None and name in names[:at]]:
        raise RuleError(
            f'The logical axes of "{parameter}" are {names!r}, with "{twice[0]}" twice, and a rule for it could mean '
            "either dim. Call one of them something else, or None."
        )
    shape = getattr(getattr(leaf, "value", None), "shape", None)
    if shape is not None and len(shape) != len(names):
        raise RuleError(
            f'The logical axes of "{parameter}" are {names!r}, and its box holds an array of shape {tuple(shape)}; '
            "give a name, or None, for each dim."
        )
    return names, spec


def _is_spec(leaf: Any) -> bool:
    jax = sys.modules.get("jax")  # where it was never imported, nothing is a spec of it
    return jax is not None and isinstance(leaf, jax.sharding.PartitionSpec)


def _dim(name: str | None, axes: tuple[str, ...]) -> str:
    return f"{_word(name)}@({','.join(axes)})" if len(axes) > 1 else "@".join((_word(name), *axes))


def _word(name: str | None) -> str:
    """Return a dim's name as a layout can have it, else "_"."""
    try:
        Layout.parse(name or "_")
    except LayoutError:
        return "_"
    return name if name and name.isidentifier() else "_"


# --- writing --------------------------------------------------------------------------------------------------------


def write_logical_axes(resolution: Resolution) -> LogicalAxes:
    """Convert a resolution to logical axes; see `Rules.to_logical_axes`."""
    if inside := [each for each in resolution.tensors.values() if _is_split_inside(each.layout, resolution.mesh)]:
        listed = "".join(f'\n  "{each.name}": "{each.layout}"' for each in inside[:8])
        more = f"\n  and {len(inside) - 8} more" if len(inside) > 8 else ""
        raise RuleError(
            f"{len(inside)} tensors have a fused dim of which one factor is sharded, but a logical axis names a whole "
            f"dim:{listed}{more}\nShard the whole dim, or give each factor a parameter, as flax models do."
        )
    meanings: dict[str, tuple[str, ...]] = {}
    tree: dict[str, Any] = {}
    for tensor in resolution.tensors.values():
        *parents, last = tensor.name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _called(tensor, resolution.mesh, meanings)
    return LogicalAxes(tree, [(name, _spelled(axes)) for name, axes in meanings.items()])


def _is_split_inside(layout: Layout, mesh: MeshShape) -> bool:
    inner = (factor for dim in layout.dims if isinstance(dim, Dim) for factor in dim.factors[1:])
    return any(mesh[axis] > 1 for factor in inner for axis in factor.axes)


def _called(tensor: TensorLayout, mesh: MeshShape, meanings: dict[str, tuple[str, ...]]) -> Names:
    """Return a logical name for each dim of a tensor, such that each name has the same mesh axes in all tensors. That
    is the dim's own name where possible, with its axes appended where the name already has others; None for an unsplit
    dim whose name is split elsewhere."""
    names: list[str | None] = []
    for dim in tensor.layout.dims:
        assert isinstance(dim, Dim), "a resolution's layouts are concrete"
        word = "_".join(factor.name for factor in dim.factors if factor.name.strip("_"))
        outer = dim.factors[0].axes
        names.append(next(name for name in _candidates(word, outer) if _can_be(name, outer, names, meanings)))
        if name := names[-1]:
            meanings[name] = outer
    return tuple(names)


def _candidates(word: str, axes: tuple[str, ...]) -> Iterator[str | None]:
    if word:
        yield word
    if not axes:
        yield None
    long = "_".join((*filter(None, [word]), *axes))
    yield long
    yield from (f"{long}_{n}" for n in count(2))


def _can_be(
    name: str | None, axes: tuple[str, ...], others: Sequence[str | None], meanings: Mapping[str, tuple[str, ...]]
) -> bool:
    return name is None or (name not in others and meanings.get(name, axes) == axes)


def _spelled(axes: tuple[str, ...]) -> Axes:
    return axes if len(axes) > 1 else axes[0] if axes else None
