"""Trees of arrays as models: parameters of flax, haiku, equinox or Keras, or plain dicts, by the names of their paths.

JAX is imported when a tree is read, and torch is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardlib._dtypes import NAMES, name_of
from shardlib.errors import InputError
from shardlib.rules._tree_node import TreeNode, TreeTensor
from shardlib.rules.tree_dims import dims_of_node

__all__ = ["Tree", "dotted_path", "is_tree", "name_of_path", "named_leaves"]


def is_tree(model: Any) -> bool:
    """Tell whether a model is a tree of arrays, and no module of torch."""
    return not hasattr(model, "named_modules")


@dataclass(frozen=True, eq=False)
class Tree:
    """A tree of arrays, read once.

    Attributes:
        root: the tree as a model.
        names: the name of each leaf, in the order of `jax.tree.leaves`; None for what is no array of numbers, such as
            the key of a random generator.
        leaves: the leaves.
        structure: the structure of the tree, as `jax.tree.structure` gives it.
    """

    root: TreeNode
    names: tuple[str | None, ...]
    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, tree: Any) -> Tree:
        """Read a tree of arrays, or of `jax.ShapeDtypeStruct`s.

        Raises:
            InputError: a leaf is not an array, or two paths make one name.
        """
        import jax

        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        boxes = _boxes(tree)
        root, names = TreeNode(value=tree), list[str | None]()
        for path, leaf in flat:
            name, box = _name_in(path, boxes)
            tensor = _tensor(name, leaf, box)
            names.append(None if tensor is None else name)
            if tensor is not None:
                _put(root, name, tensor, tree, path)
        if twice := [name for name, count in Counter(names).items() if count > 1 and name is not None]:
            raise InputError(f'Two paths of the tree make the name "{twice[0]}"; rename keys that hold dots.')
        _find_dims(root)
        return cls(root, tuple(names), tuple(leaf for _, leaf in flat), structure)

    def map(self, made: Sequence[Any]) -> Any:
        """Return a tree of the same structure with other leaves."""
        return self.structure.unflatten(made)


def name_of_path(path: Sequence[Any]) -> str:
    """Return the name for rules of a leaf's path: its keys joined by dots. haiku's "a/~/b" is "a.b".

    >>> import jax
    >>> tree = {"layers": [{"kernel": 0}], "mlp/~/linear_0": {"w": 0}}
    >>> [name_of_path(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    ['layers.0.kernel', 'mlp.linear_0.w']
    """
    keys = (str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path)
    return ".".join(map(dotted_path, keys))


def dotted_path(path: str) -> str:
    """Return the name for rules of a path of haiku or Keras.

    >>> dotted_path("mlp/~/linear_0")
    'mlp.linear_0'
    """
    return path.replace("/~/", "/").replace("/", ".")


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Return the leaves of a tree of any objects, with the names that arrays in their place have."""
    import jax

    boxes = _boxes(tree)
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(_name_in(path, boxes)[0], leaf) for path, leaf in flat]


def _find_dims(node: TreeNode) -> None:
    for name, child in node.children.items():
        child.dims = dims_of_node(child, name, node)
        _find_dims(child)


def _boxes(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Return flax's variables and boxes of a tree, by path: they hold one array each, under the name "value"."""
    import jax

    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]
    return {tuple(path): leaf for path, leaf in found if _is_box(leaf)}


def _is_box(value: Any) -> bool:
    names = {cls.__name__ for cls in type(value).__mro__ if cls.__module__.partition(".")[0] == "flax"}
    return bool(names & {"Variable", "AxisMetadata", "Partitioned"})


def _name_in(path: Sequence[Any], boxes: Mapping[tuple[Any, ...], Any]) -> tuple[str, Any]:
    """Return the name of a leaf, and the box that holds it or None. A box is not a part of the name."""
    box = boxes.get(tuple(path[:-1]))
    return name_of_path(path if box is None else path[:-1]), box


def _tensor(name: str, leaf: Any, box: Any) -> TreeTensor | None:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise InputError(
            f'A tree was given with {type(leaf).__name__} {leaf!r} at "{name}"; its leaves must be arrays or '
            "jax.ShapeDtypeStructs. Give the parameters alone, or jnp.asarray(...)."
        )
    if "key<" in str(leaf.dtype):  # of JAX's random generators
        return None
    if getattr(leaf.dtype, "kind", "") in ("O", "S", "U") or getattr(leaf.dtype, "names", None):
        raise InputError(
            f'A tree was given with an array of {leaf.dtype} at "{name}"; its leaves must be arrays of numbers. Leave '
            "it out."
        )
    dtype = name_of(leaf.dtype)
    if dtype not in NAMES:
        return None
    is_parameter = box is None or not hasattr(box, "get_value") or _is_param(box)
    return TreeTensor(tuple(map(int, leaf.shape)), dtype, is_parameter and ("float" in dtype or "complex" in dtype))


def _is_param(variable: Any) -> bool:
    return any(cls.__name__ in ("Param", "LoRAParam") for cls in type(variable).__mro__)


def _put(root: TreeNode, name: str, tensor: TreeTensor, tree: Any, path: Sequence[Any]) -> None:
    *parents, last = name.split(".")
    values = list(_values(tree, path))
    node = root
    for depth, parent in enumerate(parents):
        # Where a key holds several names, as haiku's do, objects and names are no longer side by side.
        value = values[depth] if depth < len(values) and len(values) >= len(parents) else None
        node = node.children.setdefault(parent, TreeNode(value=value))
    node.tensors[last] = tensor


def _values(tree: Any, path: Sequence[Any]) -> Iterator[Any]:
    """Iterate over the objects that a path leads through, as far as attributes and keys reach them."""
    with suppress(AttributeError, LookupError, TypeError):  # keys of a tree need not be readable in the same way
        for key in path[:-1]:
            if hasattr(key, "name"):
                tree = getattr(tree, key.name)
            else:
                tree = tree[key.key if hasattr(key, "key") else key.idx]
            yield tree
