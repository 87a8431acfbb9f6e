"""Assignment to the `data` of a DTensor: `p.data = x`, as `nn.utils.vector_to_parameters` does it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import local_of, replicated_spec, spec_of
from shardlib.engine.ops._operands import redistributed
from shardlib.engine.ops.redistribute import to_full_tensor
from shardlib.errors import ShardingError

__all__ = ["assign_data"]


def assign_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Let a DTensor have the values of another tensor; a plain one counts as replicated.

    Raises:
        ShardingError: the other tensor has another global shape or dtype.
    """
    spec = spec_of(tensor)
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise ShardingError(
            f"data of global shape {tuple(value.shape)} and {value.dtype} was assigned to a tensor of global shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}, which a sharded model keeps. Change them before shard_model, "
            "dtypes also by sl.precision(...)."
        )
    if isinstance(value, DTensor) and value.device_mesh != tensor.device_mesh:
        value = to_full_tensor(value)
    source = spec_of(value) if isinstance(value, DTensor) else replicated_spec(value, tensor.device_mesh)
    local = local_of(value) if isinstance(value, DTensor) else value.detach()
    if source.placements != spec.placements:
        local = redistributed(local, source, spec.placements)
    local_of(tensor).data = local.to(local_of(tensor).device)
