"""Levels and arrays of a tree, in the place of modules and tensors of torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardlib._dtypes import dtype_named

__all__ = ["TreeNode", "TreeTensor"]


@dataclass(frozen=True, eq=False)
class TreeTensor:
    """An array of a tree, without its values.

    Attributes:
        shape: its global shape.
        dtype_name: the name of its dtype.
        requires_grad: whether it is a parameter that is trained.
    """

    shape: tuple[int, ...]
    dtype_name: str
    requires_grad: bool

    @property
    def dtype(self) -> Any:
        return dtype_named(self.dtype_name)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return int(self.dtype.itemsize)


@dataclass(eq=False)
class TreeNode:
    """A level of a tree, in the place of a module of torch: it offers what rules ask of one.

    Attributes:
        children: the levels below, by key.
        tensors: the arrays of this level, by key.
        value: the object at this level, such as a module of equinox; None where it cannot be reached by the path.
        dims: the `ModuleDims` of its arrays, or None for a layer that is not known.
    """

    children: dict[str, TreeNode] = field(default_factory=dict)
    tensors: dict[str, TreeTensor] = field(default_factory=dict)
    value: Any = None
    dims: Any = None

    def named_children(self) -> Iterator[tuple[str, TreeNode]]:
        yield from self.children.items()

    def named_modules(self, prefix: str = "", **_options: Any) -> Iterator[tuple[str, TreeNode]]:
        yield prefix, self
        for key, child in self.children.items():
            yield from child.named_modules(f"{prefix}.{key}".lstrip("."))

    def modules(self) -> Iterator[TreeNode]:
        return (node for _, node in self.named_modules())

    def get_submodule(self, name: str) -> TreeNode:
        return dict(self.named_modules())[name]

    def named_parameters(self, recurse: bool = True, **_options: Any) -> Iterator[tuple[str, TreeTensor]]:
        return self._named(recurse, trained=True)

    def named_buffers(self, recurse: bool = True, **_options: Any) -> Iterator[tuple[str, TreeTensor]]:
        return self._named(recurse, trained=False)

    def parameters(self, recurse: bool = True) -> Iterator[TreeTensor]:
        return (tensor for _, tensor in self.named_parameters(recurse))

    def state_dict(self, **_options: Any) -> dict[str, TreeTensor]:
        return dict(self.named_parameters()) | dict(self.named_buffers())

    def _named(self, recurse: bool, *, trained: bool) -> Iterator[tuple[str, TreeTensor]]:
        for name, node in self.named_modules() if recurse else [("", self)]:
            for key, tensor in node.tensors.items():
                if tensor.requires_grad == trained:
                    yield f"{name}.{key}".lstrip("."), tensor

    @property
    def is_list(self) -> bool:
        """Whether its children are elements of a list, such as the blocks of a model."""
        return bool(self.children) and not self.tensors and all(key.isdecimal() for key in self.children)

    def __len__(self) -> int:
        return len(self.children)

    def __bool__(self) -> bool:
        return True
