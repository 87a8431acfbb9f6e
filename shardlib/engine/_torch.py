"""The one file of private PyTorch interfaces. Each says what it is for and the versions it was seen on.

Seen on torch 2.13.0; the names used here exist in 2.10 and later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = [
    "DTensorSpec",
    "OpInfo",
    "OpSchema",
    "OutputSharding",
    "RuntimeSchemaInfo",
    "TensorMeta",
    "_StridedShard",
    "backward_id",
    "clear_propagation_cache",
    "dispatcher",
    "flattened",
    "forget_meshes",
    "global_metas",
    "implicit_replication",
    "local_of",
    "local_shape_and_offset",
    "redistribute_local",
    "return_and_correct_aliasing",
    "run_at_end_of_backward",
    "set_implicit_replication",
    "shard",
    "spec_of",
    "wrap",
]


def local_of(tensor: DTensor) -> torch.Tensor:
    """The local shard itself: no autograd, no copy. `to_local()` would make a view that autograd records."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> Any:
    """Mesh, placements and global metadata of a DTensor, as the value that `wrap` takes."""
    return tensor._spec


def wrap(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor around a local shard, an eighth of the cost of `DTensor.from_local` (no autograd, no checks)."""
    if local.dtype != spec.tensor_meta.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """This rank's local shard of a plain tensor that every rank holds whole: no communication, always a copy."""
    return local_of(distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)).clone()


def flattened(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """The one-axis mesh over several axes of a mesh, so that one collective spans them all."""
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten()


def set_implicit_replication(enabled: bool) -> bool:
    """Whether a plain tensor that meets a DTensor counts as replicated, in this thread. Returns what it was."""
    before = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(enabled)
    return before


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Plain tensors that meet a DTensor count as replicated inside this block."""
    before = set_implicit_replication(True)
    try:
        yield
    finally:
        set_implicit_replication(before)


def run_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run once the backward pass that is now in progress has finished, before `backward()` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """A number for the backward pass in progress, -1 outside of one."""
    return torch._C._current_graph_task_id()


def forget_meshes() -> None:
    """Drop what DTensor remembers of meshes whose process groups are gone: cached propagation, the RNG tracker."""
    _clear_sharding_prop_cache()
    dtensor_random._rng_tracker = None
    torch._C._set_dtensor_allow_implicit_replication(False)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def clear_propagation_cache() -> None:
    """Make DTensor ask for the sharding of every op again (this thread's C++ cache, and the Python one)."""
    _clear_sharding_prop_cache()


def dispatcher() -> Any:
    """The process's DTensor op dispatcher: its handlers, its propagator, its slow path."""
    return DTensor._op_dispatcher


def global_metas(schema: OpSchema) -> Any:
    """Global shape, stride and dtype of what an op returns: `TensorMeta`s in the op's own structure.

    Raises what the op raises on fake tensors, among it the errors of data-dependent shapes.
    """
    return dispatcher().sharding_propagator._propagate_tensor_meta_non_cached(schema)


def redistribute_local(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local tensor of `source` as the local tensor of `target`, with the collectives that takes."""
    if source.placements == target.placements:
        return local
    return redistribute_local_tensor(local, source, target)


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """This rank's local shape, and where it begins in the global tensor (of no meaning for a fused split)."""
    fused = any(isinstance(p, _StridedShard) for p in placements)
    found = compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements), skip_offset=fused)
    return tuple(found[0]), tuple(found[1])
