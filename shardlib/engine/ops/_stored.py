"""Ops on parameters that are stored in shards over data axes: plain tensors and full gradients differ between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from shardlib._mesh_shape import MeshShape
from shardlib.engine._torch import DTensorSpec, Op, has_values, pytree, written_to
from shardlib.engine.ops._operands import redistributed
from shardlib.engine.ops.redistribute import to_full_tensor
from shardlib.engine.ranks import agree
from shardlib.errors import ShardingError

__all__ = ["mean_of_gradient", "refuse_local_tensors", "written_whole"]

_aten = torch.ops.aten
_SUMS = {_aten.add.Tensor, _aten.add_.Tensor, _aten.sub.Tensor, _aten.sub_.Tensor}
_PRODUCTS = {
    op
    for packet in (_aten.mm, _aten.addmm, _aten.bmm, _aten.mv, _aten.dot, _aten.convolution, _aten.embedding)
    for op in (getattr(packet, name) for name in packet.overloads())
}


def written_whole(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out a call that writes DTensors into a plain tensor, as `p -= lr * p.grad` where only gradients are split.

    All are gathered. Returns NotImplemented for any other call.
    """
    written = written_to(op, args, kwargs)
    if not written or any(isinstance(tensor, DTensor) for tensor in written):
        return NotImplemented
    return op(*pytree.tree_map_only(DTensor, to_full_tensor, tuple(args)), **kwargs)


def refuse_local_tensors(op: Op, args: Sequence[Any]) -> None:
    """Refuse a call that would count this data rank's activations as a shard's counterpart.

    A plain tensor beside DTensors counts as replicated. Beside a weight that is stored in shards over data axes it is
    likely a batch, of which each data rank has another. A tensor of the weight's own global shape, as a mask or another
    model's weight, passes, and so does a value. Where gradients are recorded, data ranks compare them: a rank that
    computed with its own loss would give its shard a gradient of its own examples alone. A loss is added to a penalty.

    Raises:
        ShardingError: the call is a product, the plain tensor has another shape, or data ranks have different ones.
    """
    shards = [x for x in args if isinstance(x, DTensor)]
    plain = [x for x in args if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]
    if not shards or not plain or all(p.is_replicate() for shard in shards for p in shard.placements):
        return
    shape = tuple(shards[0].shape)
    other = next((x for x in plain if x.dim() and (op in _PRODUCTS or tuple(x.shape) != shape)), None)
    if other is not None:
        _refuse(op, shape, other, "each data rank may have another")
    if torch.is_grad_enabled() and not (op in _SUMS and shape == ()):
        for other in plain:
            if _differs(other, shards[0].device_mesh):
                _refuse(op, shape, other, "data ranks have different ones")


def _refuse(op: Op, shape: tuple[int, ...], other: torch.Tensor, why: str) -> None:
    raise ShardingError(
        f"{op} was given a tensor of global shape {shape} that is stored in shards, and a plain tensor of shape "
        f"{tuple(other.shape)}, of which {why}. Outside of the forward of its unit a parameter is this rank's shard: "
        "call the model, or the unit that get_plan(model).units names; or compute with weight.full_tensor(), whose "
        "gradient is the mean over data ranks."
    )


def _differs(tensor: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Tell whether ranks along the data axes have different values. Collective over these axes."""
    if not has_values(tensor):
        return False
    mark = agree.fingerprint(tensor)
    marks = torch.tensor([mark, -mark], device=mesh.device_type)
    for axis in _data_axes(mesh):
        dist.all_reduce(marks, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    most, least = marks.tolist()
    return most != -least


def _data_axes(mesh: DeviceMesh) -> list[str]:
    shape = MeshShape.of(mesh)
    return [axis for axis in shape.data_axes if shape[axis] > 1]


def mean_of_gradient(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor | None:
    """Return this rank's shard of the mean of a full gradient, of which each data rank has that of its own examples.

    So is the gradient of `weight.full_tensor()`. Returns None where no data axis splits a full tensor.
    """
    names = source.mesh.mesh_dim_names or ()
    axes = [names.index(axis) for axis in _data_axes(source.mesh)]
    full = [axis for axis in axes if source.placements[axis].is_replicate()]
    counts = local.is_floating_point() or local.is_complex()
    if not counts or all(target.placements[axis].is_replicate() for axis in full):
        return None
    placements = tuple(Partial() if axis in full else one for axis, one in enumerate(source.placements))
    count = math.prod(source.mesh.size(axis) for axis in full)
    made = DTensorSpec(source.mesh, placements, tensor_meta=source.tensor_meta)
    return redistributed(local / count, made, target.placements)
