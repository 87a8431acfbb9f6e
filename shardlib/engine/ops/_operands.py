"""The tensors of one call of an op, flattened, with their specs; and redistribution of local tensors."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardlib.engine._torch import (
    DTensorSpec,
    TensorMeta,
    _StridedShard,
    all_reduced,
    all_to_all,
    group_to_sum_over,
    joined,
    local_of,
    local_shape_and_offset,
    part,
    pytree,
    redistribute_local,
    schema_of,
    spec_of,
    split_factor,
    splits,
    sum_scattered,
)
from shardlib.engine.ops._rows import Op, is_split
from shardlib.engine.ranks.lost import naming_lost_ranks_in_operations
from shardlib.errors import ShardingError

__all__ = [
    "Operands",
    "arguments_by_name",
    "has_order",
    "in_order",
    "is_fused_beside_others",
    "meta_of",
    "pieces_of",
    "redistributed",
    "replicated",
    "spec_like",
]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Operands:
    """The tensors of one call. Plain tensors count as replicated."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mesh: DeviceMesh
    leaves: tuple[Any, ...]
    tree: Any
    at: tuple[int, ...]  # positions of tensors among the leaves
    specs: tuple[DTensorSpec, ...]

    @classmethod
    def of(cls, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Operands:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        specs = tuple(_spec(leaves[i], mesh, op) for i in at)
        return cls(op, args, kwargs, mesh, tuple(leaves), tree, at, specs)

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.leaves[i] for i in self.at)

    @functools.cached_property
    def others(self) -> tuple[Any, ...]:
        """The op and its arguments but for the values of tensors, as part of a key."""
        leaves = tuple(x for x in self.leaves if not isinstance(x, torch.Tensor))
        return self.op, self.at, leaves, tuple(map(type, leaves)), str(self.tree)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The schema argument of each tensor."""
        args, kwargs = self.numbered()
        named = [(a.name, value) for a, value in zip(schema_of(self.op).arguments, args, strict=False)]
        owner = {leaf: name for name, value in (*named, *kwargs.items()) for leaf in pytree.tree_leaves(value)}
        return tuple(owner[i] for i in self.at)

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """Indices of the tensors that the op writes to."""
        declared = {self.at.index(i) for i in self._leaves_of(lambda alias: alias.is_write)}
        hidden = _HIDDEN_WRITES.get(schema_of(self.op).name, ())
        return frozenset(declared | {i for i, name in enumerate(self.names) if name in hidden})

    @functools.cached_property
    def viewed(self) -> frozenset[int]:
        """Indices of the tensors that the op returns views of."""
        return frozenset(self.at.index(i) for i in self._leaves_of(lambda alias: not alias.is_write))

    @functools.cached_property
    def all_replicated(self) -> bool:
        return all(isinstance(p, Replicate) for spec in self.specs for p in spec.placements)

    def rebuilt(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return args and kwargs with other values in place of the tensors."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.at, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return list(args), kwargs

    def local(self, placements: Sequence[tuple[Placement, ...]]) -> list[torch.Tensor]:
        """Return the local tensors, redistributed. An operand with unchanged placements is not copied."""
        return [
            redistributed(_local(tensor), spec, want)
            for tensor, spec, want in zip(self.tensors, self.specs, placements, strict=True)
        ]

    def numbered(self) -> tuple[Any, Any]:
        """Return args and kwargs with each leaf replaced by its index."""
        return pytree.tree_unflatten(list(range(len(self.leaves))), self.tree)

    def _leaves_of(self, wanted: Any) -> list[int]:
        args, kwargs = self.numbered()
        values = arguments_by_name(self.op, args, kwargs)
        tensors = set(self.at)
        chosen = [a for a in schema_of(self.op).arguments if a.alias_info is not None and wanted(a.alias_info)]
        return [leaf for a in chosen for leaf in pytree.tree_leaves(values[a.name]) if leaf in tensors]


# Arguments that are written to in training although the schema does not say so.
_HIDDEN_WRITES = {
    f"aten::{name}": ("running_mean", "running_var")
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


def arguments_by_name(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by their schema names, with defaults filled in."""
    return {
        name: args[i] if i < len(args) else kwargs.get(name, default) for i, (name, default) in enumerate(_defaults(op))
    }


@functools.cache
def _defaults(op: Op) -> tuple[tuple[str, Any], ...]:
    """Return names and defaults. They are cached: reading a schema costs as much as a small draw of random numbers."""
    return tuple((argument.name, argument.default_value) for argument in schema_of(op).arguments)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim


def meta_of(spec: DTensorSpec) -> TensorMeta:
    """Return global shape, strides and dtype, which the spec of a tensor always has."""
    assert spec.tensor_meta is not None
    return spec.tensor_meta


def spec_like(mesh: DeviceMesh, placements: tuple[Placement, ...], tensor: torch.Tensor) -> DTensorSpec:
    """Make a spec with the global shape of a tensor."""
    return DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(torch.Size(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    )


def redistributed(local: torch.Tensor, spec: DTensorSpec, want: Placements) -> torch.Tensor:
    """Redistribute a local tensor. The strides of the result have the order of the global strides."""
    return local if spec.placements == want else _redistributed(local, spec, want)


@naming_lost_ranks_in_operations
def _redistributed(local: torch.Tensor, spec: DTensorSpec, want: Placements) -> torch.Tensor:
    local = local.resolve_conj().resolve_neg()  # collectives do not support lazy conjugation or negation
    group = group_to_sum_over(spec.mesh, spec.placements, want)
    if group is not None and local.dtype not in _CARRIERS:
        return in_order(all_reduced(local, group), meta_of(spec).stride)
    carrier = _CARRIERS.get(local.dtype, local.dtype)
    fused = is_fused_beside_others(spec, want)
    if fused and (axis := _innermost(spec, want)) is not None:
        result = _one_axis(local.to(carrier), spec, want, axis)
    elif fused:
        result = _axis_by_axis(local.to(carrier), spec, want)
    elif (axis := _exchanging(local, spec, want)) is not None:
        result = _exchanged(local.to(carrier), spec, want, axis)
    else:
        result = redistribute_local(local.to(carrier), spec, DTensorSpec(spec.mesh, want, tensor_meta=spec.tensor_meta))
    return in_order(result.to(local.dtype), meta_of(spec).stride)


def is_fused_beside_others(spec: DTensorSpec, want: Placements) -> bool:
    """Return whether there are several axes, and one of them has a fused split before or after a redistribution."""
    return len(want) > 1 and any(isinstance(p, _StridedShard) for p in (*spec.placements, *want))


def _innermost(spec: DTensorSpec, want: Placements) -> int | None:
    """Return the mesh axis of a redistribution that changes only one axis, between an even split and none.

    It has to be the innermost axis that splits its dim, so that the shards of its ranks are adjacent; it may precede
    the other axes in the mesh. None for other redistributions.
    """
    changing = [axis for axis, (a, b) in enumerate(zip(spec.placements, want, strict=True)) if a != b]
    if len(changing) != 1:
        return None
    [axis] = changing
    ends = (spec.placements[axis], want[axis])
    split = [p for p in ends if is_split(p)]
    if len(split) != 1 or any(p.is_partial() and not p.is_partial("sum") for p in ends):
        return None
    dim, factor = split[0].dim, split_factor(split[0])
    others = [(i, n) for i, n in enumerate(spec.mesh.shape) if i != axis and getattr(want[i], "dim", None) == dim]
    later = math.prod(n for i, n in others if i > axis)
    even = meta_of(spec).shape[dim] % (spec.mesh.size(axis) * math.prod(n for _, n in others)) == 0
    return axis if even and later == factor and all(type(want[i]) is Shard for i, _ in others) else None


def _one_axis(local: torch.Tensor, spec: DTensorSpec, want: Placements, axis: int) -> torch.Tensor:
    """Redistribute over the axis that `_innermost` found."""
    before, after = spec.placements[axis], want[axis]
    if is_split(before):
        shape = list(local.shape)
        shape[before.dim] *= spec.mesh.size(axis)
        gathered = joined(local, spec.mesh, axis, Shard(before.dim), shape)
        return part(gathered, spec.mesh, axis, after)
    assert is_split(after)
    if before.is_partial():
        return sum_scattered(local, spec.mesh, axis, after.dim)
    return part(local, spec.mesh, axis, Shard(after.dim))


def _axis_by_axis(local: torch.Tensor, spec: DTensorSpec, want: Placements) -> torch.Tensor:
    """Gather one mesh axis after the other, the last first, and then split them, the first first.

    For fused splits on several axes, which DTensor takes for an order of axes, or for which it computes wrong sizes.
    Axes that share a dim with a changing axis are gathered and split too.
    """
    mesh, at = spec.mesh, list(spec.placements)
    changing = {axis for axis, (a, b) in enumerate(zip(at, want, strict=True)) if a != b}
    dims = {getattr(p, "dim", None) for axis in changing for p in (at[axis], want[axis])} - {None}
    axes = [a for a, p in enumerate(at) if a in changing or getattr(p, "dim", None) in dims]
    for axis in reversed(axes):
        before = (*at[:axis], *replicated(mesh)[axis:])
        local = joined(local, mesh, axis, at[axis], local_shape_and_offset(meta_of(spec).shape, mesh, before)[0])
    for axis in axes:
        local = part(local, mesh, axis, want[axis])
    return local


def _exchanging(local: torch.Tensor, spec: DTensorSpec, want: Placements) -> int | None:
    """Return the mesh axis over which an even split moves from one dim to another, on CPU; None otherwise.

    The redistribution is then an all-to-all; DTensor, without an all-to-all over gloo, would gather and split.
    """
    changing = [axis for axis, (a, b) in enumerate(zip(spec.placements, want, strict=True)) if a != b]
    if len(changing) != 1 or spec.mesh.device_type != "cpu" or not local.is_floating_point():
        return None
    [axis] = changing
    before, after = spec.placements[axis], want[axis]
    if type(before) is not Shard or type(after) is not Shard:
        return None
    inner = {getattr(p, "dim", None) for p in want[axis + 1 :]}
    uneven = (
        local.shape[before.dim] * pieces_of(before.dim, spec.placements, spec.mesh.shape)
        != meta_of(spec).shape[before.dim]
    )
    if uneven or inner & {before.dim, after.dim} or local.shape[after.dim] % spec.mesh.size(axis):
        return None
    return axis


def pieces_of(dim: int, placements: Sequence[Placement], sizes: Sequence[int]) -> int:
    """Return the number of pieces that mesh axes of these sizes split a dim into."""
    return math.prod(size for size, p in zip(sizes, placements, strict=True) if splits(p, dim))


def _exchanged(local: torch.Tensor, spec: DTensorSpec, want: Placements, axis: int) -> torch.Tensor:
    before, after = spec.placements[axis], want[axis]
    assert isinstance(before, Shard) and isinstance(after, Shard)
    sent = torch.stack(local.chunk(spec.mesh.size(axis), after.dim))
    received = all_to_all(sent, spec.mesh.get_group(axis))
    return torch.cat(received.unbind(), before.dim)


def in_order(local: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a local tensor whose dims have the memory order of the global strides; a copy unless they already have it.

    Kernels and views rely on that order: shards of a contiguous tensor have to be contiguous, including the strides of
    dims with size 1 or 0, which `view_as_complex` checks and `is_contiguous` does not. An expanded dim has stride 0 and
    no place in that order: it goes around the dims behind it, so that the innermost dim stays innermost.

    >>> in_order(torch.empty(2, 3, 4)[:0, :, :2], (6, 2, 1)).stride()
    (6, 2, 1)
    >>> in_order(torch.empty(2, 3, 4), (4, 0, 1)).stride()
    (12, 4, 1)
    """
    strides = [stride or max(strides[dim + 1 :], default=0) for dim, stride in enumerate(strides)]
    if list(strides) == sorted(strides, reverse=True) and local.stride() == _packed(local.shape):
        return local
    order = sorted(range(local.ndim), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(local.ndim), key=order.__getitem__)
    packed = _packed([local.shape[dim] for dim in order])
    if local.stride() == tuple(packed[i] for i in back):
        return local
    return local.permute(order).contiguous().as_strided([local.shape[dim] for dim in order], packed).permute(back)


def has_order(local: torch.Tensor, strides: Sequence[int]) -> bool:
    """Return whether `in_order` would leave a local tensor as it is, but for the strides of dims of size 1.

    >>> has_order(torch.empty(2, 3), (6, 1)), has_order(torch.empty(2, 1), (1, 6)), has_order(torch.empty(2, 3), (1, 6))
    (True, True, False)
    """
    wanted = in_order(torch.empty_strided(local.shape, local.stride(), device="meta"), strides).stride()
    pairs = zip(local.shape, local.stride(), wanted, strict=True)
    return not local.numel() or all(now == want for size, now, want in pairs if size > 1)


def _packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = itertools.accumulate((max(size, 1) for size in reversed(shape[1:])), operator.mul, initial=1)
    return tuple(strides)[::-1] if shape else ()


# Dtypes that some back ends do not support in collectives, and wider dtypes that represent all their values.
_CARRIERS = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _spec(tensor: torch.Tensor, mesh: DeviceMesh, op: Op) -> DTensorSpec:
    if not isinstance(tensor, DTensor):
        return spec_like(mesh, replicated(mesh), tensor)
    if tensor.device_mesh != mesh:
        raise ShardingError(
            f"{op} was given DTensors on two meshes, {mesh} and {tensor.device_mesh}; an op works on one mesh. "
            "Redistribute one of them, or take its full_tensor()."
        )
    return spec_of(tensor)
