"""DTensors: their local tensors and specs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardlib.engine._torch._private import private
from shardlib.engine._torch.meshes import cached_by_mesh, root_mesh

private(
    "torch.distributed.tensor.DTensor._local_tensor",
    why="to take a local shard without a node of autograd and without a copy",
    without="every use of a local shard would be recorded by autograd",
)
private(
    "torch.distributed.tensor.DTensor._spec",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    why="to wrap local tensors and to set the placements of an op's operands and results",
    without="a DTensor could be made by from_local alone, at eight times the cost and with a node of autograd",
)
private(
    "torch.Tensor._is_param",
    why="to make a DTensor and a parameter in one",
    without="sharding a parameter would take a third longer: nn.Parameter detaches a DTensor, which makes another one",
)
private(
    "torch.distributed.tensor.placement_types._StridedShard",
    why="to shard one factor of a fused dim, as of q, k and v in one matrix",
    without="a fused dim cannot be sharded",
)
private(
    "torch._C._autograd._unsafe_set_version_counter",
    why="to let autograd refuse what it saved of memory that other parameters have taken since",
    without="backward could silently read the weights of another module",
)
private(
    "torch.Tensor._use_count",
    why="to see whether code of the user still refers to an unsharded parameter after the forward of its unit",
    without="a weight that a hook has kept is read when the buffer holds another one",
)
private(
    "torch._C._is_alias_of",
    why="to see whether a region's output is known to its surroundings by another tensor",
    without="a sparse tensor beside a region raises, since untyped_storage() does",
)

from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "_StridedShard",
    "alias",
    "as_replicated",
    "chunks_of",
    "intercept_data",
    "intercept_reads",
    "local_of",
    "local_shape_and_offset",
    "mark_parameter",
    "memory_of",
    "on_dim",
    "referenced",
    "replicated_spec",
    "seed_all",
    "set_grad_dtype",
    "set_local",
    "set_version",
    "shard",
    "share_memory",
    "spec",
    "spec_of",
    "spec_with",
    "split_factor",
    "splits",
    "wrap",
    "wrap_parameter",
]


def local_of(tensor: DTensor) -> torch.Tensor:
    """Return the local shard: no autograd, no copy. `to_local()` would make a view that autograd records."""
    return tensor._local_tensor


def referenced(tensors: Mapping[int, torch.Tensor]) -> Iterator[int]:
    """Yield the keys of tensors to which code in Python refers, and not only this mapping.

    All references from C++, as those of graphs of autograd, count as one to the object in Python (2.13, 2.14, 2.15).
    """
    for key in tensors:
        if sys.getrefcount(tensors[key]) - (tensors[key]._use_count() > 1) > _REFERENCES:  # type: ignore[attr-defined]
            yield key


_REFERENCES = 2  # of the mapping, and of the call that counts


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor over the same memory, outside of its graph of autograd, with the same version counter."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    local = local_of(tensor).detach()  # the local tensor of a detached DTensor has a counter of its own
    if torch.is_inference_mode_enabled():  # where a DTensor cannot be detached (2.13.0), and nothing is saved
        return wrap(local, spec_of(tensor))
    made = tensor.detach()
    made._local_tensor = local  # type: ignore[attr-defined]
    return made


def mark_parameter(tensor: torch.Tensor) -> None:
    """Let a tensor be an instance of `nn.Parameter`."""
    tensor._is_param = True  # type: ignore[attr-defined]


def set_grad_dtype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Let backward passes add up the gradient of a leaf in another dtype than its own."""
    param.grad_dtype = dtype


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter that a tensor shares with its aliases and views."""
    each = (tensor, local_of(tensor)) if isinstance(tensor, DTensor) else (tensor,)
    torch._C._autograd._unsafe_set_version_counter(each, (version,) * len(each))


def spec_of(tensor: DTensor) -> Any:
    """Return mesh, placements and global metadata of a DTensor, as the value that `wrap` takes."""
    return tensor._spec


def intercept_data(assign: Callable[[Callable[..., None], torch.Tensor, torch.Tensor], None]) -> Callable[[], None]:
    """Let `assign(original, tensor, value)` carry out `tensor.data = value` on DTensors and parameters.

    The original changes the wrapper of a DTensor alone, whose memory no op reads; and a plain parameter that is given a
    DTensor ends the process once it is used (2.13.0, 2.14.1). Returns an undo function.
    """
    data: Any = torch.Tensor.data

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        assign(data.__set__, tensor, value)

    for kind in (DTensor, torch.nn.Parameter):
        kind.data = property(data.__get__, set_data)  # type: ignore[assignment]

    def undo() -> None:
        del DTensor.data, torch.nn.Parameter.data

    return undo


def intercept_reads(full_tensor: Callable[[DTensor], torch.Tensor]) -> Callable[[], None]:
    """Let `numpy()` and `tolist()` of a DTensor be those of `full_tensor(tensor)`; return an undo function.

    Torch refuses both for every subclass (2.13.0, 2.14.1).
    """

    def numpy(tensor: DTensor, *, force: bool = False) -> Any:
        return full_tensor(tensor).numpy(force=force)

    def tolist(tensor: DTensor) -> Any:
        return full_tensor(tensor).tolist()

    DTensor.numpy, DTensor.tolist = numpy, tolist  # type: ignore[method-assign,assignment]

    def undo() -> None:
        del DTensor.numpy, DTensor.tolist

    return undo


def set_local(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Give a DTensor another local tensor, and the global shape and placements that this has."""
    tensor._local_tensor, tensor._spec = local, spec


# `DTensor.__new__` without the guard that keeps dynamo from tracing it: `wrap` is never traced, and the guard costs as
# much as the rest. (Where a later torch has no guard, this is `DTensor.__new__` itself.)
_new_dtensor: Any = getattr(DTensor.__new__, "__wrapped__", DTensor.__new__)


def wrap(local: torch.Tensor, spec: Any) -> DTensor:
    """Make a DTensor around a local shard, at an eighth of the cost of `DTensor.from_local`: no autograd, no check."""
    if local.dtype != spec.tensor_meta.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return _new_dtensor(DTensor, local, spec, requires_grad=False)


def wrap_parameter(local: torch.Tensor, spec: Any, *, requires_grad: bool) -> torch.nn.Parameter:
    """Make a parameter that is a DTensor, as `nn.Parameter(wrap(local, spec))`, which would make two DTensors."""
    made = wrap(local, spec).requires_grad_(requires_grad)
    made._is_param = True
    return made  # type: ignore[return-value]


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Copy this rank's local shard out of a plain tensor that every rank holds whole, without communication."""
    return local_of(distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)).clone()


@cached_by_mesh
def _replicated_spec(mesh: DeviceMesh, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=TensorMeta(shape, stride, dtype))


def replicated_spec(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return the spec of a plain tensor that is the same on all ranks of `mesh`."""
    return _replicated_spec(mesh, tensor.shape, tensor.stride(), tensor.dtype)


def as_replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor itself, and a plain tensor, the same on all ranks of `mesh`, as a replicated one."""
    return tensor if isinstance(tensor, DTensor) else wrap(tensor, replicated_spec(tensor, mesh))


def spec(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the spec of a contiguous tensor of this global shape.

    Sub-meshes of two meshes are equal where they have the same ranks, as "tp" of "dp=2,tp=2" and of "pp=2,tp=2". The
    spec has the sub-mesh that was given, from which checkpoints find the ranks that have copies.
    """
    return _spec(root_mesh(mesh), mesh, placements, shape, dtype)


@cached_by_mesh
def _spec(
    _root: DeviceMesh, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


@cached_by_mesh
def spec_with(spec: DTensorSpec, placements: tuple[Placement, ...]) -> Any:
    """Return the spec of the same tensor in other placements."""
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def splits(placement: Placement, dim: int) -> bool:
    """Tell whether a placement splits this tensor dim, plainly or inside a fused dim."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def on_dim(placement: Placement, dim: int) -> Placement:
    """Return the same split of another tensor dim."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return this rank's local shape, and where it begins in the global tensor (without meaning for a fused split).

    It is plain arithmetic, so that it works while a block is traced, where upstream's own helper makes tensors.
    """
    local, offset = list(shape), [0] * len(shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for index, n, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            dim = placement.dim
            chunks = chunks_of(local[dim], n, index, split_factor(placement))
            local[dim], offset[dim] = sum(size for _, size in chunks), offset[dim] + chunks[0][0]
    return tuple(local), tuple(offset)


def split_factor(placement: Any) -> int:
    """Return the number of pieces that a placement splits one by one: one, but for a fused split."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def chunks_of(size: int, n: int, index: int, pieces: int = 1) -> list[tuple[int, int]]:
    """Return where rank `index` of `n` has its chunks of a dim, and their sizes, which may be zero: one of each piece.

    Pieces and chunks are those of `torch.chunk`.

    >>> chunks_of(7, 2, 1), chunks_of(7, 2, 1, pieces=2)
    ([(4, 3)], [(2, 2), (6, 1)])
    """
    piece, found = -(-size // pieces), []
    for i in range(pieces):
        first = min(piece * i, size)
        length = min(piece, size - first)
        chunk = -(-length // n)
        start = min(chunk * index, length)
        found.append((first + start, min(chunk, length - start)))
    return found


def memory_of(tensor: torch.Tensor) -> int:
    """Return what tensors have in common that lie in one storage, also on the meta device, while one of them lives."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


# Tells whether two tensors lie in one storage; fake ones too.
share_memory: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]


def seed_all(number: int) -> None:
    """Seed torch's default generators as `torch.manual_seed` does, at less cost without an accelerator.

    `torch.manual_seed` formats the stack for each kind of accelerator, present or not (2.13.0). That takes as long as a
    small step of training.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
