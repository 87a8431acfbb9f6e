"""Where a model is on `meta`: this rank's local shards of the values that its tensors begin with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch, agree, exact, materialize, ops
from shardlib.engine.apply import shard
from shardlib.engine.apply.rank_plan import RankPlan

__all__ = ["initial_values"]


def initial_values(
    model: nn.Module, here: RankPlan, init: Any, *, check: bool, names: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Return this rank's shards of tensors on `meta`, by name.

    Tensors of other stages are made too, and dropped, so that all are drawn in the order of one device.

    Args:
        model: whole, before other stages' tensors are taken out.
        here: the plan on this rank.
        init: as `shard_model` takes it.
        check: compare what ranks have drawn or read. Collective over the mesh.
        names: on a pipeline, what the whole model calls this rank's tensors, and their names here.
    """
    if init is None and not any(tensor.is_meta for tensor in shard.named_tensors(model).values()):
        return {}
    drawn: dict[str, int] = {}

    def cut(name: str, whole: Any) -> torch.Tensor:
        if names is not None:
            if name not in names:
                return torch.empty(0)
            name = names[name]
        if isinstance(whole, DTensor):
            return _torch.local_of(whole)
        if check and isinstance(whole, torch.Tensor):
            drawn[name] = agree.fingerprint(whole)
        return shard.local_shard(here, name, whole)

    if here.exact_random:
        with exact.ExactMode(exact.Place()), _torch.implicit_replication():
            values = materialize.initial_values(model, init, cut, lambda name, tensor: _memory(here, name, tensor))
    else:
        values = materialize.initial_values(model, init, cut)
    if check:
        agree.draws_agree(drawn, here.everyone)
        if marks := materialize.checkpoints(init):
            agree.checkpoints_agree(marks, here.everyone)
    if names is None:
        return values
    return {names[name]: value for name, value in values.items() if name in names}


def _memory(here: RankPlan, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor: for this rank's shard where it is split and DTensor cuts it as the layout does."""
    layout = here.layout(name, tensor)
    if here.model_mesh is None or not here.is_split(layout) or here.is_spread(name):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    ops.enable(here.model_mesh)
    placements = tuple(layout.placements(here.model_mesh))
    slices = layout.local_slices(tuple(tensor.shape), here.shape, here.coordinate)
    if not exact.is_cut_so(tuple(tensor.shape), here.model_mesh, placements, slices):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    shape = layout.local_shape(tensor.shape, here.shape, here.coordinate)
    local = torch.empty(shape, dtype=tensor.dtype, device=here.device)
    return _torch.wrap(local, _torch.spec(here.model_mesh, placements, tensor.shape, tensor.dtype))
