"""Runs an exported graph on JAX arrays: node by node, each by its lowering. What `jax.jit` traces."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax import lax

from shardlib.engine._torch import pytree
from shardlib.errors import InputError
from shardlib.jax import _fused
from shardlib.jax._borders import Constraints
from shardlib.jax._dtypes import as_dtype
from shardlib.jax._export import Graph, module_path, of_sizes, without_gradient
from shardlib.jax._fused import Fused, unfused
from shardlib.jax._scan import Run, Stored, run_blocks
from shardlib.jax._table import find_lowering

__all__ = ["run"]


def run(
    graph: Graph,
    inputs: Mapping[torch.fx.Node, Any],
    constraints: Constraints,
    rng: Any,
    runs: Sequence[Run] = (),
    stored: Stored | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Run the graph; return the model's flat results, and the new values of the buffers that it changes.

    Args:
        graph: the graph to run.
        inputs: a value for each input of the graph.
        constraints: the constraints on activations.
        rng: a key of JAX, or None for a graph that draws nothing.
        runs: blocks that are scanned.
        stored: the stored arrays of tensors that they stack.
    """
    values: dict[torch.fx.Node, Any] = dict(inputs)

    def compute(node: torch.fx.Node, read: Mapping[torch.fx.Node, Any], index: Any) -> Any:
        return _computed(node, read, constraints, rng, index)

    begins, scanned = {each.first: each for each in runs}, 0
    for index, node in enumerate(graph.nodes):
        if index in begins:
            assert stored is not None
            values |= run_blocks(begins[index], values, stored, compute)
            scanned = begins[index].end
        if index >= scanned:
            values[node] = compute(node, values, index)
    results = [unfused(values[r]) if isinstance(r, torch.fx.Node) else r for r in graph.results]
    return results, {name: lax.stop_gradient(unfused(values[node])) for name, node in graph.changed.items()}


def _computed(
    node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], constraints: Constraints, rng: Any, index: Any
) -> Any:
    with jax.named_scope(scope_of(node)):
        return _computed_inside(node, values, constraints, rng, index)


def scope_of(node: torch.fx.Node) -> str:
    """Return the scope `module|op` of a node, which begins XLA's names of its computations, in profiles too."""
    target = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    return f"{(module_path(node) or ('',))[-1] or '(root)'}|{target}"


def _computed_inside(
    node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], constraints: Constraints, rng: Any, index: Any
) -> Any:
    def read(other: torch.fx.Node) -> Any:
        return constraints.on_input(node, other, values[other])

    args: Any = torch.fx.node.map_arg(node.args, read)
    kwargs: Any = torch.fx.node.map_arg(node.kwargs, read)
    if of_sizes(node):
        return _size(node, args)
    if node.target is operator.getitem:
        if args[0][args[1]] is None and node.users:
            raise InputError(
                f"The model reads result {args[1]} of {node.args[0]}, which is not computed on JAX: torch keeps it for "
                "its own backward. Leave it out."
            )
        return constraints.on_output(node, args[0][args[1]])
    known = find_lowering(node.target) if _is_op(node) else None
    if known is None:  # a check of the export itself; unknown ops were refused before
        return None
    if known.random:
        kwargs = {**kwargs, "key": None if rng is None else jax.random.fold_in(rng, index)}
    if known.constrained:
        kwargs = {**kwargs, "constraints": constraints}
    try:
        result = _called(node, known, args, kwargs)
    except Exception as error:
        where = (module_path(node) or ("",))[-1] or "(root)"
        error.add_note(f'This was {node.target} in module "{where}", run on JAX:\n{node.meta.get("stack_trace", "")}')
        raise
    result = _as_torch_has_it(result, node)
    return constraints.on_output(node, result) if not isinstance(result, tuple) else result


def _size(node: torch.fx.Node, args: Any) -> Any:
    """Return a size that the graph computes of sizes of arguments, symbolic or not; torch's checks of sizes are left
    out, which JAX cannot decide for symbols."""
    if not isinstance(node.meta.get("val"), torch.SymInt):
        return None
    if node.target is torch.ops.aten.sym_size.int:
        return args[0].shape[args[1]]
    return node.target(*args)  # type: ignore[operator]


def _is_op(node: torch.fx.Node) -> bool:
    return not getattr(node.target, "__name__", "").startswith("_assert_tensor_metadata")


def _called(node: torch.fx.Node, known: Any, args: Any, kwargs: Any) -> Any:
    if any(isinstance(leaf, Fused) for leaf in _leaves((args, kwargs))):
        target: Any = node.target
        return _fused.call(f"{target.namespace}::{target.__name__}", known, args, dict(kwargs))
    return known.function(*args, **kwargs)


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def _as_torch_has_it(result: Any, node: torch.fx.Node) -> Any:
    """Convert a result to the dtype of torch's, without a gradient where torch records none."""
    wanted = node.meta.get("val")
    if isinstance(result, tuple | list):
        shapes = wanted if isinstance(wanted, tuple | list) else [None] * len(result)
        return tuple(_one(each, like, node) for each, like in zip(result, shapes, strict=True))
    return _one(result, wanted, node)


def _one(value: Any, wanted: Any, node: torch.fx.Node) -> Any:
    if not isinstance(wanted, torch.Tensor) or not hasattr(value, "dtype"):
        return value
    differs = value.ndim != wanted.ndim or any(
        isinstance(there, int) and here != there for here, there in zip(value.shape, wanted.shape, strict=True)
    )
    if differs and 0 not in wanted.shape:
        raise AssertionError(f"{node.target} gave shape {tuple(value.shape)}, torch has {tuple(wanted.shape)}")
    array = value.array if isinstance(value, Fused) else value
    if array.dtype != as_dtype(wanted.dtype):
        array = array.astype(as_dtype(wanted.dtype))
    if without_gradient(node):
        array = lax.stop_gradient(array)
    return Fused(array, value.parts) if isinstance(value, Fused) else array
