"""Collectives on local tensors, and redistribution of DTensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine._torch._private import private
from shardlib.engine._torch.meshes import cached_by_mesh, forget_with_meshes
from shardlib.engine._torch.patches import patch
from shardlib.engine._torch.tensor import DTensorSpec, _StridedShard, chunks_of, split_factor

private(
    "torch._C._AutoDispatchBelowAutograd",
    "torch.ops._c10d_functional.all_reduce",
    "torch.ops._c10d_functional.all_to_all_single",
    "torch.ops._c10d_functional.wait_tensor",
    why="to issue a collective without a word to autograd, which costs as much again",
    without="a small step would take noticeably longer",
)
private(
    "torch.utils._python_dispatch._len_torch_dispatch_stack",
    why="to tell whether ops are traced or recorded, and must be ones that a graph can hold",
    without="every sum over a model axis would take the slower way",
)
private(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    why="to wait for what DTensor's placements return",
    without="a kernel could read a result before it is there",
)
private(
    "torch.distributed.tensor.Partial._reduce_value",
    "torch.distributed.tensor.Partial._partition_value",
    "torch.distributed.tensor.Shard._to_replicate_tensor",
    "torch.distributed.tensor.Shard._reduce_shard_tensor",
    why="to redistribute one mesh axis at a time, where DTensor's own way is wrong for a sharded fused dim",
    without="a sharded fused dim beside another axis cannot be redistributed",
)
private(
    "torch.distributed.tensor._redistribute.redistribute_local_tensor",
    why="to redistribute local tensors, and to correct redistribute() and full_tensor() for sharded fused dims",
    without="operands are not redistributed, and a fused dim beside another axis is gathered in the wrong order",
)
private(
    "torch.distributed.tensor._redistribute._gen_transform_infos",
    "torch.distributed.tensor._redistribute.clear_redistribute_planner_cache",
    why="to drop what DTensor remembers of moves on meshes whose process groups are gone",
    without="an equal mesh of the next job would use the old groups",
)
private(
    "torch.distributed.tensor._redistribute._optimize_transform_infos",
    why="to keep DTensor from all-gathering two axes at once that shard a dim unevenly",
    without="shardlib assumes that torch all-gathers one axis after the other",
    optional=True,
)

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import Partial, Placement, Shard, _redistribute
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
    redistribute_local_tensor,
)
from torch.utils._python_dispatch import _len_torch_dispatch_stack

__all__ = [
    "AsyncTensor",
    "all_reduced",
    "all_to_all",
    "exchanged",
    "gather_uneven_splits_in_turn",
    "group_to_sum_over",
    "intercept_redistribution",
    "joined",
    "part",
    "redistribute_local",
    "sum_in_place",
    "sum_scattered",
]

forget_with_meshes(clear_redistribute_planner_cache)
forget_with_meshes(_gen_transform_infos.cache_clear)

AsyncTensor = AsyncCollectiveTensor


@cached_by_mesh
def group_to_sum_over(
    mesh: DeviceMesh, now: tuple[Placement, ...], want: tuple[Placement, ...]
) -> dist.ProcessGroup | None:
    """Return the one group whose all-reduce sums partial sums, if nothing else differs."""
    changing = [axis for axis, (a, b) in enumerate(zip(now, want, strict=True)) if a != b]
    if len(changing) == 1 and now[changing[0]].is_partial("sum") and want[changing[0]].is_replicate():
        return mesh.get_group(changing[0])
    return None


def all_reduced(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a new tensor, the sum over a group."""
    if _is_watched(tensor):
        return _summed_functionally(tensor, group)
    return sum_in_place(tensor.clone(memory_format=torch.contiguous_format), group)


def sum_in_place(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum a contiguous tensor over a group; return it, or a new tensor where ops are traced or recorded."""
    if _is_watched(tensor):
        return _summed_functionally(tensor, group)
    group.allreduce([tensor]).wait()  # `dist.all_reduce` without its Python
    return tensor


def _is_watched(tensor: torch.Tensor) -> bool:
    """Tell whether ops on a tensor are traced, recorded or fake."""
    return type(tensor) is not torch.Tensor or _len_torch_dispatch_stack() > 0


def _summed_functionally(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum by DTensor's own op, which graphs can hold, but below autograd, which costs as much again."""
    collective = torch.ops._c10d_functional
    with torch._C._AutoDispatchBelowAutograd():
        return collective.wait_tensor.default(collective.all_reduce.default(tensor, "sum", group.group_name))


def all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange rows with the ranks of a group: row i of the result is rank i's row for this rank."""
    collective = torch.ops._c10d_functional
    ones = [1] * len(tensor)
    with torch._C._AutoDispatchBelowAutograd():
        return collective.wait_tensor.default(
            collective.all_to_all_single.default(tensor, ones, ones, group.group_name)
        )


def exchanged(
    tensor: torch.Tensor, group: dist.ProcessGroup, to: int, source: int, shape: Sequence[int]
) -> Callable[[], torch.Tensor]:
    """Send a tensor to rank `to` of a group, and return what waits for `source`'s tensor, of local shape `shape`.

    Every rank of the group calls it. It is an all-to-all with pieces for one rank only, as `permute_tensor` of
    functional collectives, which takes one shape.
    """
    collective = torch.ops._c10d_functional
    size, shape = dist.get_world_size(group), tuple(shape)
    sent = [tensor.numel() if i == to else 0 for i in range(size)]
    received = [math.prod(shape) if i == source else 0 for i in range(size)]
    with torch._C._AutoDispatchBelowAutograd():
        flat = tensor.contiguous().flatten()
        coming = collective.all_to_all_single.default(flat, received, sent, group.group_name)

    def wait() -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return collective.wait_tensor.default(coming).reshape(shape)

    return wait


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Move the local tensor of `source` to the placements of `target`, by collectives."""
    if source.placements == target.placements:
        return local
    return redistribute_local_tensor(local, source, target)


def joined(local: torch.Tensor, mesh: DeviceMesh, axis: int, now: Any, shape: Sequence[int]) -> torch.Tensor:
    """Join what the ranks of one mesh axis hold: their shards side by side, or their sum.

    `shape` is that of the result.
    """
    if isinstance(now, Partial):
        return _arrived(now._reduce_value(local, mesh, axis))
    if isinstance(now, Shard):
        return _arrived(Shard(now.dim)._to_replicate_tensor(local.contiguous(), mesh, axis, shape))
    if not isinstance(now, _StridedShard):
        return local
    dim, pieces, ranks = now.dim, split_factor(now), mesh.size(axis)
    if shape[dim] % (pieces * ranks) == 0:  # a plain split of each piece
        cut = local.unflatten(dim, (pieces, local.shape[dim] // pieces))
        split = (*shape[:dim], pieces, shape[dim] // pieces, *shape[dim + 1 :])
        return joined(cut, mesh, axis, Shard(dim + 1), split).flatten(dim, dim + 1)
    rows = [_local_rows(shape[dim], ranks, rank, pieces, local.device) for rank in range(ranks)]
    longest = len(rows[0])
    padding = local.new_zeros((*local.shape[:dim], longest - local.shape[dim], *local.shape[dim + 1 :]))
    padded_shape = (*shape[:dim], longest * ranks, *shape[dim + 1 :])
    padded = joined(torch.cat([local, padding], dim), mesh, axis, Shard(dim), padded_shape)
    at = torch.cat([torch.arange(len(each), device=local.device) + rank * longest for rank, each in enumerate(rows)])
    return padded.index_select(dim, at[torch.cat(rows).argsort()])


def _local_rows(size: int, ranks: int, rank: int, pieces: int, device: torch.device) -> torch.Tensor:
    """Return the indices of a dim of this global size that a rank has."""
    chunks = chunks_of(size, ranks, rank, pieces)
    return torch.cat([torch.arange(start, start + count, device=device) for start, count in chunks])


def sum_scattered(local: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int) -> torch.Tensor:
    """Reduce-scatter over one mesh axis: return this rank's chunk of the sum, along `dim`."""
    return _arrived(Shard(dim)._reduce_shard_tensor(local, mesh, "sum", axis))


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def part(tensor: torch.Tensor, mesh: DeviceMesh, axis: int, want: Any) -> torch.Tensor:
    """Return this rank's part, along one mesh axis, of a tensor that is the same on all ranks of the axis."""
    if isinstance(want, Partial):
        return want._partition_value(tensor, mesh, axis)
    if not isinstance(want, Shard | _StridedShard):
        return tensor
    dim, ranks, rank = want.dim, mesh.size(axis), mesh.get_local_rank(axis)
    pieces, size = split_factor(want), tensor.shape[dim]
    if size % pieces:
        return tensor.index_select(dim, _local_rows(size, ranks, rank, pieces, tensor.device))
    [(start, count)] = chunks_of(size // pieces, ranks, rank)
    return tensor.unflatten(dim, (pieces, size // pieces)).narrow(dim + 1, start, count).clone().flatten(dim, dim + 1)


def intercept_redistribution(redistribute: Callable[..., Any]) -> Callable[[], None]:
    """Have `DTensor.redistribute` and `full_tensor` ask `redistribute(original, local, source, target, **options)`.

    Returns a function that undoes it.
    """
    original = _redistribute.redistribute_local_tensor
    _redistribute.redistribute_local_tensor = functools.partial(redistribute, original)  # type: ignore[assignment]
    return lambda: setattr(_redistribute, "redistribute_local_tensor", original)


def gather_uneven_splits_in_turn() -> None:
    """Make DTensor gather a dim that two mesh axes split unevenly in two steps, one axis after the other.

    Where a mesh has a flattened form, PyTorch (2.13.0) makes one all-gather of the two. Nine rows on 2 x 2 ranks are
    3, 2, 2, 2, but flattened they would be 3, 3, 3, 0, and the wrong rows come back as padding.
    `tests/engine/test_properties.py` shows it.
    """
    if hasattr(_redistribute, "_optimize_transform_infos"):
        patch(gather_uneven_splits_in_turn, _gather_in_turn)


def _gather_in_turn() -> Callable[[], None]:
    merged: Any = _redistribute._optimize_transform_infos

    def merge(infos: list[Any], mesh: DeviceMesh, *placements: Any) -> list[Any]:
        return infos if any(_is_uneven_gather(info, mesh) for info in infos) else merged(infos, mesh, *placements)

    _redistribute._optimize_transform_infos = merge  # type: ignore[assignment]
    return lambda: setattr(_redistribute, "_optimize_transform_infos", merged)


def _is_uneven_gather(info: Any, mesh: DeviceMesh) -> bool:
    source, target = info.src_dst_placements
    if not target.is_replicate() or not isinstance(source, Shard | _StridedShard):
        return False
    return isinstance(source, _StridedShard) or info.logical_shape[source.dim] % mesh.size(info.mesh_dim) != 0
