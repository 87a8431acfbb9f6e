"""Index of a model's modules and tensors, read once, with the names that share one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from shardlib.rules._tree_node import TreeNode
from shardlib.rules.trees import Tree, is_tree

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Leaf", "ModelIndex", "called", "folded", "is_layer", "nbytes", "readable_bytes", "summary"]

Kind = Literal["parameter", "buffer"]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, eq=False)
class Leaf:
    """One parameter or buffer, under all of its names; the first is the canonical one."""

    names: tuple[str, ...]
    kind: Kind
    tensor: torch.Tensor
    persistent: bool

    @property
    def name(self) -> str:
        return self.names[0]


class ModelIndex:
    """Modules and tensors of a model by name, tied ones together.

    `modules` holds every name, also the second name of a module that is registered twice; `module_name` gives the
    first name of each. `own` maps a module's name to its own tensors: attribute to full name.
    """

    def __init__(self, model: Any) -> None:
        """Read a module of torch, or a tree of arrays."""
        self.model = model = Tree.of(model).root if is_tree(model) else model
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.own: dict[str, dict[str, str]] = {name: {} for name in self.modules}
        self.leaf: dict[str, Leaf] = {}
        self._first: dict[int, str] = {}
        for name, module in self.modules.items():
            self._first.setdefault(id(module), name)
        self.leaves = self._read_leaves()

    def module_name(self, module: nn.Module) -> str:
        return self._first[id(module)]

    def owner(self, tensor_name: str) -> tuple[str, nn.Module, str]:
        """Return the module that owns a tensor: its name, the module, and the tensor's attribute there."""
        module_name, _, attribute = tensor_name.rpartition(".")
        return module_name, self.modules[module_name], attribute

    def enclosing(self, module_name: str) -> Iterable[nn.Module]:
        """Iterate over a module and the modules around it, innermost first."""
        yield self.modules[module_name]
        while module_name:
            module_name = module_name.rpartition(".")[0]
            yield self.modules[module_name]

    def _read_leaves(self) -> list[Leaf]:
        names: dict[int, list[str]] = {}
        found: dict[int, tuple[Kind, torch.Tensor]] = {}
        for name, module in self.modules.items():
            for attribute, kind, tensor in _own_tensors(module):
                full = f"{name}.{attribute}" if name else attribute
                self.own[name][attribute] = full
                names.setdefault(id(tensor), []).append(full)
                found.setdefault(id(tensor), (kind, tensor))
        saved = self.model.state_dict(keep_vars=True).keys()
        leaves = [
            Leaf(tuple(names[key]), kind, tensor, any(name in saved for name in names[key]))
            for key, (kind, tensor) in found.items()
        ]
        self.leaf = {name: leaf for leaf in leaves for name in leaf.names}
        return leaves


def is_layer(module: Any, *names: str) -> bool:
    """Tell whether a module is one of `torch.nn`'s of these names, or of a subclass. torch is not imported for it.

    >>> is_layer(object(), "Linear")
    False
    """
    if isinstance(module, TreeNode):
        return module.is_list and "ModuleList" in names
    kind: Any = type(module)
    return _is_layer(kind, names)


@cache
def _is_layer(kind: Any, names: tuple[str, ...]) -> bool:
    return any(cls.__name__ in names and cls.__module__.startswith("torch.nn.") for cls in kind.__mro__)


def called(module: Any) -> str:
    """Return what an error calls a module: its class, or what it is if it is no module.

    >>> called(TreeNode())
    'a tree of arrays'
    """
    return "a tree of arrays" if isinstance(module, TreeNode) else type(module).__qualname__


def folded(name: str) -> str:
    """Replace the numbers in a name, so that repeated blocks have the same name.

    >>> folded("blocks.11.attn.w1.weight")
    'blocks.*.attn.w1.weight'
    """
    return _NUMBER.sub("*", name)


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the global tensor."""
    return tensor.numel() * tensor.element_size()


def readable_bytes(count: int) -> str:
    """Format a number of bytes.

    >>> readable_bytes(640), readable_bytes(3 * 2**20)
    ('640 B', '3.0 MiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def summary(shapes: Mapping[str, tuple[int, ...]], *, limit: int = 12) -> str:
    """Format names and global shapes in one line, repeated blocks folded, at most `limit` of them.

    >>> summary({"h.0.w": (4, 2), "h.1.w": (4, 2), "2.b": (4,)})
    '"h.*.w" (4, 2) x2, "2.b" (4,)'
    """
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault((folded(name), tuple(shape)), []).append(name)
    lines = [
        f'"{name}" {shape} x{len(names)}' if len(names) > 1 else f'"{names[0]}" {shape}'
        for (name, shape), names in alike.items()
    ]
    more = f", and {len(lines) - limit} more" if len(lines) > limit else ""
    return ", ".join(lines[:limit]) + more


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Kind, torch.Tensor]]:
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        yield name, "parameter", parameter
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield name, "buffer", buffer
