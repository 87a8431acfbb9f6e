"""DTensor's dispatch of ops: sharding propagation and its caches, handlers of single ops, results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch._private import private
from shardlib.engine._torch.fake import fake_mode
from shardlib.engine._torch.meshes import forget_with_meshes
from shardlib.engine._torch.ops import Op, schema_of
from shardlib.engine._torch.patches import patch
from shardlib.engine._torch.tensor import DTensorSpec, TensorMeta
from shardlib.engine._torch.trees import pytree

private(
    "torch.distributed.tensor.DTensor._op_dispatcher",
    "torch.distributed.tensor._dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path",
    "torch.distributed.tensor._op_schema.OpInfo",
    "torch.distributed.tensor._op_schema.OpSchema",
    "torch.distributed.tensor._op_schema.OutputSharding",
    "torch.distributed.tensor._op_schema.RuntimeSchemaInfo",
    why="to answer how an op on DTensors is carried out, in torch's own dispatch and through its cache",
    without="torch's own rules would decide, of which some are wrong and many ops have none",
)
private(
    "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers",
    why="to put convolutions, argmax and as_strided behind the sharding rules",
    without="their handlers, which come first, would carry them out",
)
private(
    "torch.distributed.tensor._dispatch.OpDispatcher._allow_implicit_replication",
    why="to let masks and positions that a model makes meet DTensors",
    without="a plain tensor beside a DTensor raises",
)
private(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    why="to learn global shape, strides and dtype of what an op returns",
    without="results of ops on DTensors cannot be wrapped",
)
private(
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
    "torch._C._clear_DTensor_sharding_propagator_cache",
    why="to have torch ask for shardings again once a mesh is enabled, disabled or gone",
    without="ops would run by rules, or on process groups, that no longer hold",
)
private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    why="to ask meta kernels for shapes only where no mode would see the call",
    without="each new op takes milliseconds where a tenth of one would do",
)
private(
    "torch.utils._python_dispatch.return_and_correct_aliasing",
    why="to give back the very tensor that an op in place was given, and views of it",
    without="an in-place op on all-gathered operands would return another tensor",
)

from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, return_and_correct_aliasing

__all__ = [
    "OpInfo",
    "OpSchema",
    "OutputSharding",
    "RuntimeSchemaInfo",
    "clear_propagation_cache",
    "dispatcher",
    "global_metas",
    "implicit_replication",
    "intercept_propagation",
    "move_handlers",
    "replace_handler",
    "replace_kernels",
    "replicate_plain_tensors",
    "restore_handlers",
    "return_and_correct_aliasing",
    "set_implicit_replication",
    "told_by_meta",
]


def dispatcher() -> Any:
    """Return the process's DTensor op dispatcher: its handlers, its propagator, its slow path."""
    return DTensor._op_dispatcher


def intercept_propagation(propagate: Callable[..., Any]) -> Callable[[], None]:
    """Have DTensor ask `propagate(original, op, args, kwargs, info, try_cache)` for what its C++ cache does not know.

    `propagate` returns an `OutputSharding`, which is cached and carried out, or the result itself. Returns a function
    that undoes it.
    """
    target = dispatcher()
    original = target._propagate_op_sharding_dispatch_slow_path
    target._propagate_op_sharding_dispatch_slow_path = functools.partial(propagate, original)
    return lambda: vars(target).pop("_propagate_op_sharding_dispatch_slow_path", None)


def move_handlers(ops: Sequence[Op]) -> dict[Op, Any]:
    """Take ops out of the handlers that DTensor calls before it looks at its cache. Returns the handlers."""
    table = dispatcher()._custom_op_handlers
    return {op: table.pop(op) for op in ops if op in table}


def replace_handler(op: Op, handler: Callable[..., Any]) -> Callable[[], None]:
    """Let `handler(op, args, kwargs)` carry out an op that DTensor handles before its cache; return an undo."""
    table = dispatcher()._custom_op_handlers
    original, table[op] = table[op], handler
    return functools.partial(table.__setitem__, op, original)


def restore_handlers(handlers: Mapping[Op, Any]) -> None:
    """Undo `move_handlers`."""
    dispatcher()._custom_op_handlers.update(handlers)


def replace_kernels(kernels: Mapping[tuple[str, str], Callable[..., Any]]) -> Callable[[], None]:
    """Register kernels of aten ops, by name and dispatch key, above the existing ones.

    Returns a function that undoes it.
    """
    library = torch.library.Library("aten", "IMPL")
    for (op, key), kernel in kernels.items():
        library.impl(op, kernel, key)
    kept = [library]  # its kernels are there as long as it is
    return kept.clear


@forget_with_meshes
def clear_propagation_cache() -> None:
    """Make DTensor ask for the sharding of every op again (this thread's C++ cache, and the Python one)."""
    # torch.distributed.tensor.debug has both in one function, but importing it brings inductor and sets a variable of
    # the environment.
    dispatcher().sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def set_implicit_replication(enabled: bool) -> bool:
    """Set whether a plain tensor that meets a DTensor counts as replicated, in this thread. Returns what it was."""
    before = dispatcher()._allow_implicit_replication
    dispatcher()._allow_implicit_replication = enabled
    return before


def replicate_plain_tensors() -> None:
    """Count plain tensors that meet a DTensor as replicated in this thread, and no longer in the one that ends it."""
    set_implicit_replication(True)
    patch(replicate_plain_tensors, lambda: functools.partial(set_implicit_replication, False))


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Count plain tensors that meet a DTensor as replicated inside the block."""
    before = set_implicit_replication(True)
    try:
        yield
    finally:
        set_implicit_replication(before)


def global_metas(schema: OpSchema) -> Any:
    """Return global shape, stride and dtype of what an op returns: `TensorMeta`s in the op's own structure.

    Raises what the op raises on fake tensors, among it the errors of data-dependent shapes.
    """
    if told_by_meta(schema.op) and not _get_current_dispatch_mode_stack():
        given = (schema.args_schema, schema.kwargs_schema)
        if all(0 not in leaf.shape for leaf in pytree.tree_leaves(given) if isinstance(leaf, DTensorSpec)):
            args, kwargs = pytree.tree_map_only(DTensorSpec, _on_meta, given)
            return pytree.tree_map(_meta_of, schema.op(*args, **kwargs))
    with fake_mode():
        metas = dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(schema)
    if schema.op in _CONTIGUOUS_ON_CPU and schema.args_spec[0].mesh.device_type == "cpu":
        first = _on_meta(schema.args_spec[0])
        if not any(first.is_contiguous(memory_format=images) for images in _IMAGES.get(first.ndim, ())):
            return tuple(_contiguous(meta) for meta in metas)
    return metas


# On a CPU these give contiguous results, but for images in channels-last order, where their shape functions tell the
# order of the input (2.13.0).
_CONTIGUOUS_ON_CPU = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten.log_sigmoid_forward.default,
}
_IMAGES = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}


def _contiguous(meta: TensorMeta) -> TensorMeta:
    return TensorMeta(meta.shape, torch.empty(meta.shape, device="meta").stride(), meta.dtype)


# Of these and of pointwise ops, kernels for meta tensors tell strides and dtypes on any device. They take a tenth of
# a millisecond where fake tensors take one to five, and training begins with hundreds. Other ops ask for the device.
_TOLD_BY_META = {
    torch.ops.aten._log_softmax.default,
    torch.ops.aten._log_softmax_backward_data.default,
    torch.ops.aten._softmax.default,
    torch.ops.aten._softmax_backward_data.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.gelu_backward.default,
    torch.ops.aten.mean.dim,
    torch.ops.aten.mm.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}


@functools.cache
def told_by_meta(op: Any) -> bool:
    """Tell whether an op's kernel for meta tensors gives the metadata that the op has on any device."""
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return op in _TOLD_BY_META or (pointwise and not any(a.name == "device" for a in schema_of(op).arguments))


def _on_meta(spec: DTensorSpec) -> torch.Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def _meta_of(result: Any) -> TensorMeta | None:
    return TensorMeta(result.shape, result.stride(), result.dtype) if isinstance(result, torch.Tensor) else None
