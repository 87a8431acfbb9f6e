"""Gradients of a scaled loss, as `torch.amp.GradScaler` divides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import Op

__all__ = ["UNSCALE", "unscale"]

UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Divide gradients, of which some may be plain, and let all ranks know that one holds a number that is not finite.

    Torch's own asks the first gradient how all of them lie: where it is replicated and another is split, ranks take
    different scales from then on (2.13.0).
    """
    grads, found, inverse = args
    op([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], found, inverse, **kwargs)
    for mesh, dim in _axes(grads):
        sent = found.to(mesh.device_type)  # from host memory, if gradients are offloaded
        dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        found.copy_(sent)


def _axes(grads: Sequence[torch.Tensor]) -> dict[tuple[DeviceMesh, int], None]:
    """Return the axes over which some gradient is split or a partial sum, in the same order on every rank."""
    return {
        (grad.device_mesh, dim): None
        for grad in grads
        if isinstance(grad, DTensor)
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(dim) > 1
    }
