"""Ops of torch: their schemas, kernels of many tensors, formulas and samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardlib.engine._torch._private import private, private_when_used
from shardlib.engine._torch.trees import pytree

private(
    "torch._ops.OpOverload",
    why="to name the type of an op",
    without="an op cannot be told from other callables",
)
private(
    "torch.ops.aten.detach.default._schema",
    why="to read which arguments an op takes, writes to and returns views of",
    without="no op on DTensors finds its sharding rule",
)
private(
    "torch.ops._c10d_functional.all_reduce",
    "torch.ops._dtensor.shard_dim_alltoall",
    why="to tell collectives from other ops",
    without="a recorded step would miss the collectives of DTensors",
)
private(
    "torch._C._dispatch_get_all_op_names",
    why="to find every pointwise op and every op that draws random numbers",
    without="most pointwise ops would all-gather their operands, and some random ones would differ between ranks",
)
private(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    why="to tell the ops that come apart into others under inference mode",
    without="inference would all-gather the operands of such ops",
)
private(
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._foreach_clamp_min_",
    "torch._foreach_clamp_max_",
    why="to act on all parameters or gradients in one call",
    without="a step of a model of many small parameters would take several times as long",
)
private(
    "torch._scaled_mm",
    why="to multiply matrices in float8",
    without="float8 training does not work",
)
private(
    "torch._C.DisableTorchFunctionSubclass",
    why="to read the shape of a parameter that is stored in shards, below the subclass that refuses to give its values",
    without="that subclass would ask itself without end",
)
private(
    "torch._decomp.decomposition_table",
    why="to compute ops on JAX that only torch's formulas in other ops are known of",
    without="the JAX engine would refuse most of torch's ops",
)
private(
    "torch.backends.__allow_nonbracketed_mutation",
    why="to import torch's samples of ops, which forbids a process to set flags such as torch.backends.cudnn.benchmark",
    without="a process that has checked an op cannot set such a flag any more",
)
_samples = private_when_used(
    "torch.testing._internal.common_methods_invocations.op_db",
    why="to check sharding rules on torch's own samples of ops",
    without="shardlib.testing cannot check an op on samples",
)

__all__ = [
    "Op",
    "call_below_subclass",
    "clamp_all",
    "collective_name",
    "copy_all",
    "decomposition_of",
    "flop_formulas",
    "is_composite",
    "is_view",
    "multiply_all",
    "named_arguments",
    "norms_of",
    "op_database",
    "op_names",
    "scaled_product",
    "schema_of",
    "written_to",
]

Op = torch._ops.OpOverload


def schema_of(op: Op) -> Any:
    """Return names, types, defaults and aliases of an op's arguments and results."""
    return op._schema


def written_to(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """List the tensors that a call of an op changes."""
    values = (args[i] if i < len(args) else kwargs.get(name) for i, name in _changed_arguments(op))
    return [leaf for value in values for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@functools.cache
def _changed_arguments(op: Op) -> tuple[tuple[int, str], ...]:
    """List the place and the name of each argument that an op changes."""
    given = enumerate(schema_of(op).arguments)
    return tuple((i, each.name) for i, each in given if each.alias_info is not None and each.alias_info.is_write)


def is_view(op: Op) -> bool:
    """Tell whether the op's result shares the storage of an operand."""
    return op.is_view


# Lists every registered op, as in "aten::add.Tensor".
op_names = torch._C._dispatch_get_all_op_names


def is_composite(op: Op) -> bool:
    """Tell whether autograd sees through the op, which then reaches DTensor under inference mode only."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def collective_name(op: Any) -> str | None:
    """Return the bare name of an op of c10d, functional collectives or DTensor; None for any other op."""
    return op.overloadpacket.__name__ if op.namespace in ("c10d", "_c10d_functional", "_dtensor") else None


def named_arguments(op: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Map the names of an op's schema to positional arguments."""
    return {argument.name: value for argument, value in zip(schema_of(op).arguments, args, strict=False)}


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[Any]) -> None:
    """Call `target.copy_(source)` for each pair, in one kernel."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def clamp_all(tensors: Sequence[torch.Tensor], limit: float) -> None:
    """Call `tensor.clamp_(-limit, limit)` for each, in two kernels."""
    if tensors:
        torch._foreach_clamp_min_(list(tensors), -limit)
        torch._foreach_clamp_max_(list(tensors), limit)


def multiply_all(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Call `tensor.mul_(factor)` for each, in one kernel."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Compute the p-norm of each tensor that is not empty, in one kernel; by default in their own dtype."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return list(torch._foreach_norm(filled, p, dtype)) if filled else []


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_unit: torch.Tensor,
    b_unit: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `(a * a_unit) @ (b * b_unit) + bias`, a and b in float8, summed in float32 and rounded once."""
    return torch._scaled_mm(a, b, scale_a=a_unit, scale_b=b_unit, bias=bias, out_dtype=dtype, use_fast_accum=False)


def call_below_subclass(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of tensors as if they were of no subclass of `torch.Tensor`."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def decomposition_of(op: Op) -> Callable[..., Any] | None:
    """Return torch's function that computes an op by other ops, or None."""
    from torch._decomp import decomposition_table  # takes a second

    default = torch.export.default_decompositions()
    return default[op] if op in default else decomposition_table.get(op)


@functools.cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Return PyTorch's formulas, and for the CPU's attention (missing in 2.13.0) those of the same kernel elsewhere."""
    aten = torch.ops.aten
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[forward],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[backward],
    }
    return {**on_cpu, **flop_registry}


def op_database() -> list[Any]:
    """List PyTorch's own samples of some six hundred ops, for the checker (needs the package `expecttest`)."""
    with torch.backends.__allow_nonbracketed_mutation():  # leaving it undoes what the import forbids
        _samples()
        from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)
