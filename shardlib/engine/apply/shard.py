"""Replacing every parameter and buffer of a model by this rank's local shard.

A tensor becomes a DTensor if ranks hold different shards of it, or if it belongs to a region that computes on DTensors.
Other tensors stay plain and move to this rank's device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import Row
from shardlib.engine import _torch
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.data import offload
from shardlib.engine.data.params import local_of
from shardlib.engine.undo import Undo
from shardlib.errors import ShardingError
from shardlib.layout import Layout, shard_spec

__all__ = ["ShardedTensors", "local_shard", "shard_tensors"]


@dataclass(frozen=True, eq=False)
class ShardedTensors:
    """The parameters of a model whose tensors were replaced by local shards.

    Attributes:
        parameters: all parameters by their first name, as they are now.
        replaced: the names of those that were replaced, by the parameter before.
        masters: this rank's shards of the wide copies that the optimizer steps on, by name, for parameters that lost
            precision by rounding.
    """

    parameters: Mapping[str, nn.Parameter]
    replaced: Mapping[torch.Tensor, str]
    masters: Mapping[str, torch.Tensor]


def shard_tensors(
    model: nn.Module, rank_plan: RankPlan, values: Mapping[str, torch.Tensor], undo: Undo
) -> ShardedTensors:
    """Replace a model's tensors by this rank's local shards; `values` are those of tensors on `meta`, by name."""
    places = [
        (own, key, f"{prefix}.{key}".lstrip("."), tensor)
        for prefix, module in model.named_modules()
        for own, key, tensor in _torch.registered_tensors(module)
    ]
    after: dict[int, torch.Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    replaced: dict[torch.Tensor, str] = {}
    masters: dict[str, torch.Tensor] = {}
    for _, _, name, tensor in places:
        if id(tensor) in after:
            continue  # tied
        new = after[id(tensor)] = _rounded(rank_plan, name, _placed(rank_plan, name, tensor, values.get(name)), masters)
        if isinstance(new, nn.Parameter):
            parameters[name] = new
            if new is not tensor:
                _refuse_hooks(name, tensor)
                replaced[tensor] = name

    def put(*, back: bool) -> None:
        for own, key, _, tensor in places:
            own[key] = tensor if back else after[id(tensor)]
        for module in model.modules():
            _torch.find_weights_again(module)

    undo.callback(put, back=True)
    put(back=False)
    return ShardedTensors(parameters, replaced, masters)


def _refuse_hooks(name: str, param: torch.Tensor) -> None:
    if _torch.has_gradient_hooks(param):
        raise ShardingError(
            f'"{name}" has hooks on its gradient (register_hook), and sharding puts another parameter in its place. '
            "Register them after shard_model."
        )


def _placed(rank_plan: RankPlan, name: str, tensor: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    """Return the sharded form of a tensor: a DTensor on the whole mesh where it is stored in shards, on the mesh that
    it is computed with inside a region or for experts, else a plain tensor.
    """
    row, mesh = rank_plan.rows.get(name), rank_plan.mesh_for(name, tensor)
    if row is not None and rank_plan.is_stored_sharded(name):
        mesh, layout = rank_plan.mesh, rank_plan.on_active_axes(row.stored)
    elif mesh is not None:
        layout = rank_plan.layout(name, tensor)
    else:
        return _on_device(rank_plan, tensor, local)
    local = _in_stored_memory(rank_plan, row, local_shard(rank_plan, name, tensor) if local is None else local)
    return _wrapped(local, _torch.spec(mesh, layout.placements(mesh), tuple(tensor.shape), local.dtype), tensor)


def _on_device(rank_plan: RankPlan, tensor: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    if value is None and tensor.device.type == rank_plan.device.type:
        return tensor
    return _marked(_torch.as_kind((tensor.detach() if value is None else value).to(rank_plan.device), tensor), tensor)


def _rounded(rank_plan: RankPlan, name: str, tensor: torch.Tensor, masters: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a parameter in the dtype that it is stored in. `masters` gets the wide copy."""
    row = rank_plan.rows.get(name)
    if not isinstance(tensor, nn.Parameter) or row is None or row.stored.dtype in (None, tensor.dtype):
        return tensor
    wide, dtype = local_of(tensor), row.stored.dtype
    if row.state is not None and row.has_master:
        stored, state = rank_plan.on_active_axes(row.stored), rank_plan.on_active_axes(row.state)
        sharding = shard_spec(stored, state, row.global_shape, rank_plan.shape, rank_plan.coordinate)
        shard = (
            wide
            if sharding is None
            else sharding.take(wide, rank_plan.executor.transport(rank_plan.added(stored, state)).index)
        )
        is_offloaded = "state" in offload.offloaded_phases(row, rank_plan.device)
        device = offload.HOST if is_offloaded else shard.device
        masters[name] = shard.to(device, row.state.dtype or row.dtype, copy=True)
    assert dtype is not None
    low = _in_stored_memory(rank_plan, row, wide.to(dtype))
    if not isinstance(tensor, DTensor):
        return _marked(_torch.as_kind(low, tensor), tensor)
    spec = _torch.spec(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), dtype)
    return _wrapped(low, spec, tensor)


def _in_stored_memory(rank_plan: RankPlan, row: Row | None, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter in the memory that it is stored in."""
    if "stored" in offload.offloaded_phases(row, rank_plan.device):
        return offload.on_host(local, rank_plan.device)
    return local.to(rank_plan.device)


def _wrapped(local: torch.Tensor, spec: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of a local shard, as a parameter if `like` is one."""
    if not isinstance(like, nn.Parameter):
        return _torch.wrap(local, spec)
    return _marked(_torch.wrap_parameter(local, spec, requires_grad=like.requires_grad), like)


def _marked(made: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Give a parameter the attributes of the one that it replaces."""
    if isinstance(like, nn.Parameter):
        # Copies of a tensor that was made in a LazyInitContext, and of no other, know where its values are.
        made.__dict__.update({key: value for key, value in like.__dict__.items() if key != "__deepcopy__"})
    return made


def local_shard(rank_plan: RankPlan, name: str, full: Any) -> torch.Tensor:
    """Return this rank's shard of a full tensor or of a slice of a safetensors file; only the shard is read."""
    shape = tuple(full.shape) if isinstance(full, torch.Tensor) else tuple(full.get_shape())
    layout = rank_plan.rows[name].stored if name in rank_plan.rows else Layout.replicate(len(shape))
    layout = rank_plan.on_active_axes(layout)
    if isinstance(full, torch.Tensor):
        return layout.take(full.detach(), rank_plan.shape, rank_plan.coordinate).clone()
    return _read(full, layout.local_slices(shape, rank_plan.shape, rank_plan.coordinate))


def _read(source: Any, slices: tuple[tuple[slice, ...], ...]) -> torch.Tensor:
    """Return the product of the dims' slices, read from a file piece by piece.

    The result is a copy: safetensors returns views of the mapped file, which keep the full tensor alive.
    """

    def read(chosen: tuple[slice, ...]) -> torch.Tensor:
        dim = len(chosen)
        if dim == len(slices):
            return (source[chosen] if chosen else source[:]).clone(memory_format=torch.contiguous_format)
        pieces = [read((*chosen, piece)) for piece in slices[dim]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    return read(())
