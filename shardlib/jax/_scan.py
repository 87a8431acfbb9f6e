"""Repeated blocks of a graph as one body that `jax.lax.scan` runs over stacked parameters.

The nodes of alike blocks differ in what they read from outside alone: tensors of the model, which are stacked; the
results of the block before, which the scan carries; and values that all blocks read, such as a mask.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.engine._torch import pytree
from shardlib.jax._borders import Constraints
from shardlib.jax._context import constrained
from shardlib.jax._export import Graph, module_path, without_gradient
from shardlib.jax._fused import unfused
from shardlib.jax._storage import Storage

__all__ = ["Run", "find_runs", "run_blocks"]

Node = torch.fx.Node
Compute = Callable[[Node, Mapping[Node, Any], Any], Any]
Stored = Callable[[Node], tuple[Any, Storage | None]]


@dataclass(frozen=True)
class Run:
    """Consecutive blocks that one body computes.

    Attributes:
        first: the position in the graph of the first node of the first block.
        blocks: the nodes of each block.
        stacked: for each node of the first block's tensors those of all blocks.
        carried: for each outside node that the first block reads, and later ones have from the block before, the
            position of the node in the block that gives it.
        kept: the positions of nodes that are read outside of the run, but for carried ones of the last block.
    """

    first: int
    blocks: tuple[tuple[Node, ...], ...]
    stacked: Mapping[Node, tuple[Node, ...]]
    carried: Mapping[Node, int]
    kept: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position in the graph after the last node."""
        return self.first + len(self.blocks) * len(self.blocks[0])


def find_runs(
    graph: Graph, repeated: Sequence[str], constraints: Constraints, form: Callable[[Node], Any]
) -> list[Run]:
    """Return the runs of alike consecutive blocks.

    Args:
        graph: the exported graph.
        repeated: the names of modules that may be alike.
        constraints: the constraints on activations, which belong to the form of a block.
        form: the form of a tensor of the model: tensors of one form can be stacked.
    """
    runs: list[Run] = []
    blocks = [_Block(start, nodes, *_form(nodes, constraints)) for start, nodes in _segments(graph, set(repeated))]
    while blocks:
        alike = list(itertools.takewhile(functools.partial(_follows, blocks), range(1, len(blocks))))
        tried = ((n, _run(blocks[:n], graph, form)) for n in range(len(alike) + 1, 1, -1))
        length, found = next(((n, made) for n, made in tried if made is not None), (1, None))
        runs += [found] if found is not None else []
        blocks = blocks[length:]
    return runs


@dataclass(frozen=True)
class _Block:
    """The nodes of a block from a position on, its form, and the nodes that it reads from outside."""

    start: int
    nodes: tuple[Node, ...]
    form: list[Any]
    reads: list[Node]


def _follows(blocks: Sequence[_Block], at: int) -> bool:
    """Return whether a block is as the first one, and no node runs between it and the one before."""
    last = blocks[at - 1]
    return blocks[at].form == blocks[0].form and blocks[at].start == last.start + len(last.nodes)


def _segments(graph: Graph, repeated: set[str]) -> Iterator[tuple[int, tuple[Node, ...]]]:
    """Iterate over the blocks in order of execution: the position of the first node, and the nodes."""
    blocks = [next((name for name in module_path(node) if name in repeated), None) for node in graph.nodes]
    start = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[start]:
            if blocks[start] is not None:
                yield start, graph.nodes[start:at]
            start = at


def _run(blocks: Sequence[_Block], graph: Graph, form: Callable[[Node], Any]) -> Run | None:
    """Return blocks of one form as a run, or None if they read what can be neither stacked nor carried."""
    stacked: dict[Node, tuple[Node, ...]] = {}
    carried: dict[Node, int] = {}
    inside = [{node: at for at, node in enumerate(block.nodes)} for block in blocks]
    for own in zip(*(block.reads for block in blocks), strict=True):
        if all(node is own[0] for node in own):
            continue
        if all(node in graph.sources and graph.sources[node].kind != "argument" for node in own):
            if any(form(node) != form(own[0]) for node in own):
                return None
            stacked[own[0]] = own
            continue
        positions = {before.get(node) for before, node in zip(inside, own[1:], strict=False)}
        position = positions.pop()
        if positions or position is None or not _type(own[0]) == _type(own[1]) != "":
            return None
        carried[own[0]] = position
    nodes = tuple(block.nodes for block in blocks)
    kept = tuple(at for at in range(len(nodes[0])) if _leaves(at, nodes, carried.values()))
    return Run(blocks[0].start, nodes, stacked, carried, kept)


def _leaves(at: int, blocks: Sequence[Sequence[Node]], carried: Iterable[int]) -> bool:
    """Return whether all blocks' values at a position have to be kept; the last one's is there if it is carried."""
    early = any(_read_elsewhere(blocks, index, at) for index in range(len(blocks) - 1))
    return early or (at not in carried and _read_elsewhere(blocks, len(blocks) - 1, at))


def _read_elsewhere(blocks: Sequence[Sequence[Node]], index: int, at: int) -> bool:
    """Return whether nodes outside of a block and of the next one read its node at a position."""
    near = {node for block in blocks[index : index + 2] for node in block}
    return any(user not in near for user in blocks[index][at].users)


def _form(nodes: Sequence[Node], constraints: Constraints) -> tuple[list[Any], list[Node]]:
    """Return what alike blocks have in common, and the nodes that a block reads from outside in order."""
    inside = {node: at for at, node in enumerate(nodes)}
    outside: dict[Node, int] = {}

    def named(node: Node) -> tuple[str, int]:
        return ("inside", inside[node]) if node in inside else ("outside", outside.setdefault(node, len(outside)))

    forms: list[Any] = []
    for node in nodes:
        arguments = pytree.tree_map_only(Node, named, (list(node.args), dict(node.kwargs)))
        borders = [
            str(border.layout)
            for found in (constraints.leaving.get(node, ()), *_entering(node, constraints))
            for border in found
        ]
        results = pytree.tree_map_only(torch.Tensor, _type_of, node.meta.get("val"))
        forms.append((node.target, repr(arguments), repr(results), borders, without_gradient(node)))
    return forms, list(outside)


def _entering(node: Node, constraints: Constraints) -> list[Any]:
    return [constraints.entering.get((node, read), ()) for read in node.all_input_nodes]


def _type_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)}"


def _type(node: Node) -> str:
    value = node.meta.get("val")
    return _type_of(value) if isinstance(value, torch.Tensor) else ""


def run_blocks(run: Run, values: Mapping[Node, Any], stored: Stored, compute: Compute) -> dict[Node, Any]:
    """Run all blocks, and return the values of nodes that others read.

    Args:
        run: the blocks.
        values: the values of nodes outside.
        stored: the array of a tensor of the model, as it is stored.
        compute: computes a node from the values that it reads, at a position in the graph.
    """
    template, carried = run.blocks[0], list(run.carried)
    stored_nodes = list(run.stacked)
    pairs = [[stored(each) for each in run.stacked[node]] for node in stored_nodes]
    storages = [own[0][1] for own in pairs]
    stacks = [_stacked([array for array, _ in own], own[0][1]) for own in pairs]

    def body(carry: Any, each: Any) -> Any:
        position, pieces = each
        inside: dict[Node, Any] = {**values, **dict(zip(carried, carry, strict=True))}
        for node, storage, piece in zip(stored_nodes, storages, pieces, strict=True):
            inside[node] = piece if storage is None else storage.value(piece)
        for offset, node in enumerate(template):
            inside[node] = compute(node, inside, position + offset)
        own = [_unfused(inside[node]) for node in template]
        return [own[at] for at in run.carried.values()], [own[at] for at in run.kept]

    begun = [unfused(values[node]) for node in carried]
    positions = run.first + len(template) * jnp.arange(len(run.blocks))
    last, kept = lax.scan(body, begun, (positions, stacks))
    found = {run.blocks[-1][at]: value for at, value in zip(run.carried.values(), last, strict=True)}
    for at, stack in zip(run.kept, kept, strict=True):
        for index, nodes in enumerate(run.blocks):
            found[nodes[at]] = jax.tree.map(operator.itemgetter(index), stack)
    return found


def _unfused(value: Any) -> Any:
    return tuple(map(unfused, value)) if isinstance(value, tuple) else unfused(value)


def _stacked(arrays: Sequence[Any], storage: Storage | None) -> Any:
    """Stack arrays with their stored sharding, so that no device gets another one's shards."""
    stack = jnp.stack(arrays)
    if storage is None:
        return stack
    stored = storage.sharding()
    return constrained(stack, NamedSharding(stored.mesh, PartitionSpec(None, *stored.spec)))
