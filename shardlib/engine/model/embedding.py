"""Embeddings whose vocabulary a model axis splits: each rank looks up its own rows and makes their gradient.

PyTorch's backward function of an embedding knows the number of rows and not their layout: on DTensors every rank would
make the gradient of the whole vocabulary, of which it keeps its rows (Shoeybi et al., "Megatron-LM", 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardlib.engine import _torch
from shardlib.engine.undo import replace_forward

__all__ = ["is_embedding", "look_up_locally"]


def is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Tell whether a module does what `nn.Embedding` does by default, and nothing else."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def look_up_locally(module: nn.Embedding) -> Callable[[], None]:
    """Let an embedding inside a region look up its own rows, and return an undo function."""
    own_forward = module.forward

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight: Any = module.weight
        axis = _axis_of_rows(weight, input) if isinstance(weight, DTensor) else None
        return own_forward(input) if axis is None else _look_up(weight, input, axis, module.padding_idx)

    return replace_forward(module, forward)


def _placements(ids: torch.Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements of indices; a region leaves those replicated that are plain."""
    return ids.placements if isinstance(ids, DTensor) else (Replicate(),) * mesh.ndim


def _axis_of_rows(weight: DTensor, ids: torch.Tensor) -> int | None:
    """Return the axis that splits the weight, if it gives rows to each rank and the indices are replicated on it."""
    given = _placements(ids, weight.device_mesh)
    split = [axis for axis, placement in enumerate(weight.placements) if placement != Replicate()]
    if len(split) != 1 or weight.placements[split[0]] != Shard(0) or given[split[0]] != Replicate():
        return None
    ranks = weight.device_mesh.size(split[0])
    ((_, fewest),) = _torch.chunks_of(weight.shape[0], ranks, ranks - 1)
    return split[0] if fewest and not any(placement.is_partial() for placement in given) else None


def _look_up(weight: DTensor, ids: torch.Tensor, axis: int, padding_idx: int | None) -> torch.Tensor:
    mesh = weight.device_mesh
    out = list(_placements(ids, mesh))
    sums: list[Placement] = [Partial() if placement.is_shard() else Replicate() for placement in out]
    sums[axis], out[axis] = Shard(0), Partial()
    rows = weight.to_local(grad_placements=sums)
    ((first, _),) = _torch.chunks_of(weight.shape[0], mesh.size(axis), mesh.get_local_rank(axis))
    local_ids = ids.to_local() if isinstance(ids, DTensor) else ids
    own = local_ids - first
    # An index that no rank has stays as it is, for PyTorch to refuse.
    absent = ((own < 0) | (own >= rows.shape[0])) & (local_ids >= 0) & (local_ids < weight.shape[0])
    padding = None if padding_idx is None or not first <= padding_idx < first + rows.shape[0] else padding_idx - first
    found = F.embedding(own.masked_fill(absent, 0), rows, padding).masked_fill(absent.unsqueeze(-1), 0)
    shape = torch.Size((*ids.shape, weight.shape[1]))
    return DTensor.from_local(
        found, mesh, out, run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )
