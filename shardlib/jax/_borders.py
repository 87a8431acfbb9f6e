"""Module borders of the plan as sharding constraints on values of the graph.

A value leaves a module (or enters it) at nodes inside of it that nodes outside read. A constraint there fixes what the
partitioner would choose by itself: a row-parallel product is summed once, at its border, so that a transformer block
has Megatron's collectives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlib._mesh_shape import MeshShape
from shardlib.errors import InputError, LayoutError
from shardlib.jax._context import constrained
from shardlib.jax._export import Graph, module_path
from shardlib.jax._fused import Fused
from shardlib.layout import Layout
from shardlib.rules import Border

__all__ = ["Constraints"]

_CHOICE = PartitionSpec.UNCONSTRAINED


class Constraints:
    """The sharding constraints of values, for one graph on one mesh.

    Attributes:
        programs: those of the graph's experts.
        leaving: for a node the layouts of the borders that its value leaves by.
        entering: for a node and one that it reads the layouts of the borders between them.
    """

    def __init__(self, graph: Graph, borders: Sequence[Border], mesh: Mesh, shape: MeshShape, rows: int) -> None:
        self.mesh, self.shape, self.rows, self.programs = mesh, shape, rows, graph.programs
        self.leaving: dict[torch.fx.Node, list[Border]] = {}
        self.entering: dict[tuple[torch.fx.Node, torch.fx.Node], list[Border]] = {}
        laid_out = [border for border in borders if border.layout is not None]
        for border in laid_out:
            (_place_leaving if border.side == "output" else _place_entering)(graph, border, self)
        # A value that leaves several modules at once passes the innermost one's border first; one that enters, last.
        for node, borders in self.leaving.items():
            borders.sort(key=functools.partial(_depth, node), reverse=True)
        for (node, _), borders in self.entering.items():
            borders.sort(key=functools.partial(_depth, node))

    def on_output(self, node: torch.fx.Node, value: Any) -> Any:
        """Constrain a node's value to the layouts of the borders that it leaves."""
        for border in self.leaving.get(node, ()):
            value = self.laid_out(value, border)
        return value

    def on_input(self, node: torch.fx.Node, read: torch.fx.Node, value: Any) -> Any:
        """Constrain a value to the layouts of the borders through which it reaches a node."""
        for border in self.entering.get((node, read), ()):
            value = self.laid_out(value, border)
        return value

    def on_batch(self, value: Any) -> Any:
        """Divide the rows of an argument over the data axes."""
        if value.ndim == 0 or not self.is_batch(value):
            return value
        return self._constrained(value, [self.shape.data_axes, *[()] * (value.ndim - 1)])

    def laid_out(self, value: Any, border: Border) -> Any:
        if isinstance(value, Fused) or not hasattr(value, "ndim") or not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        assert border.layout is not None
        axes = _axes_of(border.layout, value.ndim)
        if axes is None:
            raise InputError(
                f'The layout "{border.layout}" of "{border.module}.{border.side}" was given to an activation of global '
                f"shape {tuple(value.shape)}, which has another number of dims. Name as many dims as the activation "
                'has, or begin the layout with "...".'
            )
        if axes and self.is_batch(value):
            inner = tuple(axis for axis in axes[0] if axis not in self.shape.data_axes)
            axes[0] = (*self.shape.data_axes, *inner)
        return self._constrained(value, axes)

    def split_along(self, value: Any, *entries: Any) -> Any:
        """Constrain the first dims by an entry each: axes, None, or UNCONSTRAINED. No dim after them is sharded."""
        spec = PartitionSpec(*entries, *[None] * (value.ndim - len(entries)))
        return constrained(value, NamedSharding(self.mesh, spec))

    def by_rows(self, function: Callable[..., Any], value: Any, other: Any, channels: Any) -> Any:
        """Return `function(value, other)`, each row of which depends on the same row of `value`, and on all of `other`.

        Each data rank computes its own rows, and the gradient of `other` is summed over data ranks. Rows that do not
        divide evenly are not sharded. The second dim is sharded by `channels`, and no dim after it is.
        """
        split = self.shape.data_ranks > 1 and self.is_batch(value)
        rows = self.shape.data_axes if split else None
        if split and isinstance(self.mesh, Mesh):  # a mesh without devices types a program of global arrays
            by_rank = PartitionSpec(rows)
            function = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=(by_rank, PartitionSpec()),
                out_specs=by_rank,
                axis_names=set(self.shape.data_axes),
            )
        return self.split_along(function(self.split_along(value, rows, channels), other), rows, channels)

    def is_batch(self, value: Any) -> bool:
        """Return whether a value's first dim counts examples, or a multiple of them, evenly over the data ranks."""
        return (
            self.rows > 0
            and value.ndim > 0
            and value.shape[0] % self.rows == 0
            and (self.rows % self.shape.data_ranks == 0)
        )

    def _constrained(self, value: Any, axes: Sequence[tuple[str, ...]]) -> Any:
        """Constrain a value. Dims that their axes do not divide are left to the partitioner: JAX would silently
        replicate them."""
        pieces = [math.prod(self.shape[axis] for axis in each) for each in axes]
        entries = [
            _CHOICE if n % count != 0 else (each or None)
            for n, count, each in zip(value.shape, pieces, axes, strict=True)
        ]
        return constrained(value, NamedSharding(self.mesh, PartitionSpec(*entries)))


def _depth(node: torch.fx.Node, border: Border) -> int:
    """Return the number of modules inside the border's module that a node runs in."""
    return module_path(node).index(border.module)


def _axes_of(layout: Layout, ndim: int) -> list[tuple[str, ...]] | None:
    try:
        laid = layout.with_ndim(ndim)
    except LayoutError:
        return None
    return [laid.axes_of(dim) for dim in range(ndim)]


def _place_leaving(graph: Graph, border: Border, into: Constraints) -> None:
    """Constrain every node of the module that a node outside of it reads, except new values of buffers."""
    inside = {node for node in graph.nodes if border.module in module_path(node)}
    results = {id(node) for node in graph.results}
    for node in inside:
        if id(node) in results or any(user not in inside and user.op != "output" for user in node.users):
            into.leaving.setdefault(node, []).append(border)


def _place_entering(graph: Graph, border: Border, into: Constraints) -> None:
    """Constrain the values from outside that nodes of the module read, except tensors of the model."""
    inside = {node for node in graph.nodes if border.module in module_path(node)}
    for node in inside:
        for read in node.all_input_nodes:
            source = graph.sources.get(read)
            if read not in inside and (source is None or source.kind == "argument"):
                into.entering.setdefault((node, read), []).append(border)
