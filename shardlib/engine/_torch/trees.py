"""Nested containers of tensors."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from shardlib.engine._torch._private import private

private(
    "torch.utils._pytree.SequenceKey",
    "torch.utils._pytree.keystr",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_is_leaf",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_unflatten",
    why="to take apart the arguments and results of modules and ops, by the containers that users register",
    without="a tensor inside a container would not be sharded, moved or counted",
)

from torch.utils import _pytree as pytree

__all__ = [
    "flatten_with_path",
    "leaves_of",
    "map_elements",
    "map_tensors",
    "pytree",
    "tensors_in",
]


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def leaves_of(*values: Any) -> Iterator[Any]:
    """Yield the leaves of values, in `pytree`'s order. Plain containers are taken apart here, which is faster."""
    for value in values:
        if isinstance(value, _LEAVES):
            yield value
        elif type(value) in (tuple, list):
            yield from leaves_of(*value)
        elif type(value) is dict:
            yield from leaves_of(*value.values())
        else:
            yield from pytree.tree_leaves(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, those in dataclasses and other objects of any class included.

    `pytree` opens registered containers only; models return, and keep, objects of their own.
    """
    opened: set[int] = set()
    pending = [value]
    while pending:
        for leaf in leaves_of(pending.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif not isinstance(leaf, _LEAVES) and not isinstance(leaf, _CLOSED) and id(leaf) not in opened:
                opened.add(id(leaf))
                pending += _contents(leaf)


def _contents(value: Any) -> list[Any]:
    """Return the contents of an object: the elements of a container that pytree does not know, and attributes."""
    found: list[Any] = []
    if isinstance(value, Mapping):
        found += value.values()
    elif isinstance(value, Sequence | Set):
        found += value
    found += getattr(value, "__dict__", {}).values()
    found += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    return found


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Change the tensors in a value. A container in which nothing changes stays the same object: it may be filled.

    In a graph of the compiler all containers are copies.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if torch.compiler.is_compiling():
        return pytree.tree_map_only(torch.Tensor, change, value)
    if not isinstance(value, list | dict):
        return map_elements(functools.partial(map_tensors, change), value)
    changed = {}
    for key, before in value.items() if isinstance(value, dict) else enumerate(value):
        after = map_tensors(change, before)
        if after is not before:
            changed[key] = after
    if changed:
        value = copy.copy(value)
        for key, after in changed.items():
            value[key] = after
    return value


def map_elements(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the elements of a tuple, or of a container that is registered; other values stay as they are."""
    if type(value) is tuple:
        changed = tuple(change(one) for one in value)
        return value if all(new is old for new, old in zip(changed, value, strict=True)) else changed
    if isinstance(value, _LEAVES) or pytree.tree_is_leaf(value):
        return value
    return pytree.tree_map(change, value, is_leaf=lambda inner: inner is not value)


def flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves of a tree with their paths, and its structure.

    A mapping that was registered without names for what it holds, as those of diffusers are, has those of a dict; the
    leaves of another such container are counted.
    """
    try:
        return pytree.tree_flatten_with_path(tree)
    except ValueError:
        leaves, structure = pytree.tree_flatten(tree)
    try:
        named = pytree.tree_flatten_with_path(_as_dicts(tree))[0]
    except ValueError:
        named = []
    if [id(leaf) for _, leaf in named] == [id(leaf) for leaf in leaves]:
        return named, structure
    return [((pytree.SequenceKey(i),), leaf) for i, leaf in enumerate(leaves)], structure


def _as_dicts(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _as_dicts(value) for key, value in tree.items()}
    return type(tree)(map(_as_dicts, tree)) if type(tree) in (list, tuple) else tree


_LEAVES = (torch.Tensor, type(None), bool, int, float, str)
_CLOSED = (torch.nn.Module, torch.Generator, torch.optim.Optimizer, type, bytes, range, *_FUNCTIONS)
