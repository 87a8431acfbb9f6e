"""Redistribution of DTensors, right for fused splits on several axes too, and without autograd; and `p.data = x`."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardlib.engine import _torch
from shardlib.engine.ops._operands import redistributed
from shardlib.errors import ShardingError

__all__ = ["assign_data", "redistribute", "redistribute_gradient", "to_full_tensor"]


def to_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, not recorded by autograd; its local tensor itself if it is replicated.

    A plain tensor is returned unchanged. Collective over the mesh, on the mesh's device: NCCL sends nothing of a copy
    in host memory, as `p.cpu()` is.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, local = tensor.device_mesh, _torch.local_of(tensor)
    on_mesh = local if local.device.type in (mesh.device_type, "meta") else local.to(mesh.device_type)
    return redistributed(on_mesh, _torch.spec_of(tensor), (Replicate(),) * mesh.ndim).to(local.device)


def redistribute_gradient(grad: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Redistribute a gradient; autograd follows where the backward pass makes a graph."""
    if torch.is_grad_enabled():  # create_graph=True
        return grad.redistribute(placements=placements)
    return redistribute(grad, placements)


def redistribute(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Redistribute a DTensor, not recorded by autograd."""
    spec = _torch.spec_of(x)
    return _torch.wrap(redistributed(_torch.local_of(x), spec, placements), _torch.spec_with(spec, placements))


def assign_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Let a DTensor have the values of another tensor, as `nn.utils.vector_to_parameters` assigns to `p.data`.

    A plain tensor counts as replicated.

    Raises:
        ShardingError: the other tensor has another global shape or dtype.
    """
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ShardingError(
            f"data of global shape {tuple(value.shape)} and {value.dtype} was assigned to a tensor of global shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}, which a sharded model keeps. Change them before shard_model, "
            "dtypes also by sl.precision(...)."
        )
    if isinstance(value, DTensor) and value.device_mesh != tensor.device_mesh:
        value = to_full_tensor(value)
    if isinstance(value, DTensor):
        source, local = _torch.spec_of(value), _torch.local_of(value)
    else:
        source, local = _torch.replicated_spec(value, tensor.device_mesh), value.detach()
    mine = _torch.local_of(tensor)
    mine.data = redistributed(local, source, _torch.spec_of(tensor).placements).to(mine.device)
