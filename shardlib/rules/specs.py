"""Layouts as JAX users write them: layout maps of Keras, and mappings or trees of `PartitionSpec`s.

Keras and JAX are imported where something of theirs is given or asked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardlib._mesh_shape import AxisKind, MeshShape, kind_of, listed, register_axis
from shardlib.errors import InputError, LayoutError, RuleError
from shardlib.layout import Layout
from shardlib.rules._resolution import Resolution
from shardlib.rules.patterns import exactly
from shardlib.rules.trees import Tree, dotted_path, named_leaves

__all__ = [
    "check_even",
    "mesh_of_keras",
    "read_keras_layout_map",
    "read_partition_specs",
    "register_kinds",
    "structs_of_keras",
    "write_keras_layout_map",
    "write_partition_specs",
]


def register_kinds(axes: Iterable[str], kinds: Mapping[str, AxisKind] | None) -> None:
    """Register the kinds of axes that are given, and refuse axes that have none.

    Raises:
        RuleError: an axis is of no known kind.
        MeshError: a given kind is not the registered one.
    """
    for axis, kind in dict(kinds or {}).items():
        register_axis(axis, kind=kind)
    if strange := [axis for axis in dict.fromkeys(axes) if kind_of(axis) is None]:
        raise RuleError(
            f"These rules name the mesh axes {listed(strange)}, of which no kind is known. Say what each carries, as "
            f'in kinds={{"{strange[0]}": "data"}} for different examples or "model" for the parts of a layer.'
        )


# --- Keras ----------------------------------------------------------------------------------------------------------


def read_keras_layout_map(layout_map: Any, kinds: Mapping[str, AxisKind] | None) -> dict[str, str]:
    """Return the rules of a layout map; see `Rules.from_keras_layout_map`."""
    keys = _keys(layout_map)
    texts = {key: _text(key, layout_map[key].axes) for key in keys}
    register_kinds((axis for key in keys for axis in _axes_of(layout_map[key].axes)), kinds)
    searched = _is_searched(layout_map)
    return {f"tensor re:{_regex(key, keys, searched=searched)}": text for key, text in texts.items()}


def _keys(layout_map: Any) -> list[str]:
    keys = list(layout_map) if isinstance(layout_map, Mapping) else []
    if keys and all(isinstance(key, str) and hasattr(layout_map[key], "axes") for key in keys):
        return keys
    raise RuleError(
        f"A layout map was given as {type(layout_map).__name__} {layout_map!r}; give a keras.distribution.LayoutMap "
        "with at least one key. For a mapping to PartitionSpecs there is Rules.from_partition_specs."
    )


def _is_searched(layout_map: Any) -> bool:
    """Return whether a key of this version of Keras matches a part of a path, as before `re.fullmatch` took the place
    of `re.search`."""
    probe = type(layout_map)(None)
    probe["b"] = ()
    return probe["abc"] is not None


def _regex(key: str, keys: Sequence[str], *, searched: bool) -> str:
    """Return the regular expression of the paths whose layout Keras takes from a key, over names with dots.

    A path that is itself a key has the layout of that key, whatever other keys match. A key with a dot is never taken
    for a path: names have dots where paths have slashes.
    """
    try:
        compiled = re.compile(key)
    except re.error as fault:
        raise RuleError(f'Key "{key}" of the layout map is not a regular expression: {fault}. Correct it.') from None
    found = compiled.search if searched else compiled.fullmatch
    others = "".join(
        rf"(?!{_dotted(re.escape(each))}\Z)" for each in keys if each != key and "." not in each and found(each)
    )
    body = f".*(?:{_dotted(key)}).*" if searched else f"(?:{_dotted(key)})" if others else _dotted(key)
    return others + body if "." in key or found(key) else f"{_dotted(re.escape(key))}|{others}{body}"


def _dotted(key: str) -> str:
    r"""Return a regular expression over paths as one over names.

    >>> _dotted("a/b[^/]*.kernel")
    'a\\.b[^\\.]*.kernel'
    """
    return key.replace("\\/", "/").replace("/", r"\.")


def mesh_of_keras(device_mesh: Any) -> MeshShape:
    """Return the shape of a `keras.distribution.DeviceMesh`."""
    if hasattr(device_mesh, "axis_names") and hasattr(device_mesh, "shape"):
        return MeshShape(dict(zip(device_mesh.axis_names, device_mesh.shape, strict=True)))
    raise InputError(
        f"A mesh of Keras was given as {type(device_mesh).__name__} {device_mesh!r}; give the "
        "keras.distribution.DeviceMesh that the layout map is for."
    )


def structs_of_keras(variables: Any) -> dict[str, Any]:
    """Return shapes and dtypes by path, of Keras variables or of a mapping from their paths to arrays."""
    import jax

    pairs = variables.items() if isinstance(variables, Mapping) else ((_path(each), each) for each in variables)
    return {path: jax.ShapeDtypeStruct(tuple(each.shape), each.dtype) for path, each in pairs}


def _path(variable: Any) -> str:
    if isinstance(path := getattr(variable, "path", None), str):
        return path
    raise InputError(
        f"A variable of Keras was given as {type(variable).__name__}; give model.variables, or a mapping from "
        "variable.path to an array."
    )


def write_keras_layout_map(resolution: Resolution, paths: Iterable[str], device_mesh: Any) -> Any:
    """Return a `keras.distribution.LayoutMap`; see `Rules.to_keras_layout_map`."""
    import keras

    made = keras.distribution.LayoutMap(device_mesh)
    names = dict(named_leaves({path: path for path in paths}, lambda leaf: isinstance(leaf, str)))
    for name, path in names.items():
        tensor = resolution.tensors[name]
        check_even(name, tensor.global_shape, tensor.layout, resolution.mesh)
        spec = tensor.layout.partition_spec()
        if several := [entry for entry in spec if isinstance(entry, tuple)]:
            raise RuleError(
                f'"{path}" with layout "{tensor.layout}" is sharded over {several[0]} in one dim, and in a layout of '
                "Keras a dim has one axis. Shard two dims, or make one axis of the two."
            )
        made[path] = keras.distribution.TensorLayout(tuple(spec), device_mesh)
    return made


# --- PartitionSpecs -------------------------------------------------------------------------------------------------


def read_partition_specs(specs: Any, kinds: Mapping[str, AxisKind] | None) -> dict[str, str]:
    """Return the rules of a mapping or tree of specs; see `Rules.from_partition_specs`."""
    flat = isinstance(specs, Mapping) and all(map(_is_spec, specs.values()))
    leaves = [(_name(key), leaf) for key, leaf in specs.items()] if flat else named_leaves(specs, _is_spec)
    found = {}
    for name, leaf in leaves:
        key = name if flat else exactly(name)
        if key in found:
            raise RuleError(f'Two keys of the specs make the name "{name}"; rename keys that hold dots or slashes.')
        found[key] = _entries(name, leaf)
    register_kinds((axis for entries in found.values() for axis in _axes_of(entries)), kinds)
    return {key: _text(key, entries) for key, entries in found.items()}


def _name(key: Any) -> str:
    if isinstance(key, str):
        return key if key.startswith(("re:", "tensor re:")) else dotted_path(key)
    raise RuleError(f"A key of the specs was given as {key!r}; give the name of a parameter, or a pattern.")


def _is_spec(leaf: Any) -> bool:
    if leaf is None or _is_of_jax(leaf):
        return True
    return isinstance(leaf, tuple) and all(each is None or isinstance(each, str | tuple) for each in leaf)


def _is_of_jax(leaf: Any) -> bool:
    """Tell whether a leaf is a spec or sharding of JAX; there is none before JAX is imported."""
    sharding = sys.modules.get("jax.sharding")
    return sharding is not None and isinstance(leaf, sharding.PartitionSpec | sharding.NamedSharding)


def _entries(name: str, leaf: Any) -> Sequence[Any]:
    if not _is_spec(leaf):
        raise RuleError(
            f'The spec of "{name}" was given as {type(leaf).__name__} {leaf!r}; give a PartitionSpec, a NamedSharding, '
            "a tuple with None, an axis, or several axes for each dim, or None to replicate."
        )
    spec = getattr(leaf, "spec", leaf)
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise RuleError(
            f'The spec of "{name}" is {spec}, with unreduced or reduced axes. Give one whose axes shard dims.'
        )
    return () if spec is None else tuple(spec)


def write_partition_specs(tree: Tree, resolution: Resolution) -> Any:
    """Return a tree of specs; see `Rules.to_partition_specs`."""
    from jax.sharding import PartitionSpec

    for name, each in resolution.tensors.items():
        check_even(name, each.global_shape, each.layout, resolution.mesh)
    specs = {name: each.layout.partition_spec() for name, each in resolution.tensors.items()}
    return tree.map([specs[name] if name is not None else PartitionSpec() for name in tree.names])


def check_even(name: str, global_shape: Sequence[int], layout: Layout, mesh: MeshShape) -> None:
    """Refuse a layout of which a dim is not divided by its axes, since JAX has only even shards."""
    if uneven := layout.uneven_dims(global_shape, mesh):
        raise InputError(
            f'"{name}" of global shape {tuple(global_shape)} with layout "{layout}" on mesh "{mesh}" has uneven shards '
            f"in dim {uneven[0]}, and JAX has only even ones. Pad it, or shard another dim."
        )


# --- entries --------------------------------------------------------------------------------------------------------


def _axes_of(entries: Iterable[Any]) -> Iterator[str]:
    for entry in entries:
        yield from (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()


def _text(key: str, entries: Sequence[Any]) -> str:
    """Return the entries of a spec as a layout; dims beyond the last entry are not split.

    >>> _text("wi", (None, ("fsdp", "tp")))
    '_ _@(fsdp,tp) ...'
    """
    text = " ".join([*(_dim(key, entry, entries) for entry in entries), "..."])
    try:
        Layout.parse(text)
    except LayoutError as fault:
        raise RuleError(f'The spec of "{key}" is {tuple(entries)!r}: {fault}') from None
    return text


def _dim(key: str, entry: Any, entries: Sequence[Any]) -> str:
    axes = tuple(_axes_of((entry,)))
    if (entry is not None and not isinstance(entry, str | tuple)) or not all(_is_axis(axis) for axis in axes):
        raise RuleError(
            f'The spec of "{key}" is {tuple(entries)!r}, with {entry!r} for a dim; give None, the name of an axis, or '
            "a tuple of names."
        )
    return f"_@({','.join(axes)})" if len(axes) > 1 else f"_@{axes[0]}" if axes else "_"


def _is_axis(axis: Any) -> bool:
    return isinstance(axis, str) and axis.isidentifier()
