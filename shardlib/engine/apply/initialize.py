"""Initial values of a model on `meta`: this rank's local shards of its tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch, ops
from shardlib.engine.apply import materialize, shard
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.feature import exact
from shardlib.engine.ranks import agree

__all__ = ["initial_values"]


def initial_values(model: nn.Module, rank_plan: RankPlan, init: Any, *, check: bool) -> dict[str, torch.Tensor]:
    """Return this rank's shards of tensors on `meta`, by name.

    Tensors of other stages are initialised too, and dropped, so that random numbers are drawn in the order of one
    device.

    Args:
        model: the full model, before other stages' tensors are removed.
        rank_plan: the plan on this rank.
        init: as in `shard_model`.
        check: compare the values that ranks have drawn or read. Collective over the mesh.
    """
    names = None if rank_plan.stages is None else rank_plan.stages.names_here  # by canonical names
    drawn: dict[str, int] = {}

    def shard_of(name: str, full: Any) -> torch.Tensor:
        if names is not None:
            if name not in names:
                return torch.empty(0)
            name = names[name]
        if isinstance(full, DTensor):
            return _torch.local_of(full)
        if check and isinstance(full, torch.Tensor):
            drawn[name] = agree.fingerprint(full)
        return shard.local_shard(rank_plan, name, full)

    if rank_plan.exact_random:
        # The constants of an initialiser meet DTensors, which `_memory` makes.
        with exact.ExactMode(exact.DataRank()), _torch.implicit_replication():
            values = materialize.initial_values(model, init, shard_of, functools.partial(_memory, rank_plan))
    else:
        values = materialize.initial_values(model, init, shard_of, None)
    if check:
        agree.draws_agree(drawn, rank_plan.mesh_group)
        if marks := materialize.checkpoints(init):
            agree.checkpoints_agree(marks, rank_plan.mesh_group)
    if names is None:
        return values
    return {names[name]: value for name, value in values.items() if name in names}


def _memory(rank_plan: RankPlan, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor: for the local shard only, if DTensor splits the tensor as the layout does."""
    layout = rank_plan.layout(name, tensor)
    mesh, shape = rank_plan.model_mesh, tuple(tensor.shape)
    if mesh is not None and rank_plan.is_split(layout) and not rank_plan.is_spread(name):
        ops.enable(mesh)
        placements = layout.placements(mesh)
        slices = layout.local_slices(shape, rank_plan.shape, rank_plan.coordinate)
        if exact.holds_slices(shape, mesh, placements, slices):
            local = layout.local_shape(shape, rank_plan.shape, rank_plan.coordinate)
            memory = torch.empty(local, dtype=tensor.dtype, device=rank_plan.device)
            return _torch.wrap(memory, _torch.spec(mesh, placements, shape, tensor.dtype))
    return torch.empty(shape, dtype=tensor.dtype, device="cpu")
