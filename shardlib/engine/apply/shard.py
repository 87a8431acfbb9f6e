"""Every parameter and buffer of a model becomes this rank's local shard: here a parameter becomes a DTensor.

A tensor is a DTensor where ranks hold different shards of it, and in the regions that compute on DTensors; elsewhere it
stays plain, and is on this rank's device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import Row
from shardlib.engine import _torch, offload
from shardlib.engine.apply.rank_plan import RankPlan
from shardlib.engine.held import local_of
from shardlib.layout import Layout, cut

__all__ = ["Replaced", "local_shard", "named_tensors", "shard_tensors"]


@dataclass(frozen=True, eq=False)
class Replaced:
    """What sharding has made of a model's parameters.

    Attributes:
        parameters: those that were replaced, by name: before and after.
        masters: by name, this rank's shard of the wide copy that the optimizer steps on, where rounding a parameter
            took something away.
    """

    parameters: Mapping[str, tuple[nn.Parameter, nn.Parameter]]
    masters: Mapping[str, torch.Tensor]


def shard_tensors(model: nn.Module, here: RankPlan, values: Mapping[str, torch.Tensor], undo: ExitStack) -> Replaced:
    """Put this rank's local shards in the place of a model's tensors.

    Args:
        model: with whole tensors, or tensors on `meta`.
        here: the plan on this rank.
        values: this rank's shards of the tensors on `meta`, by name.
        undo: puts the tensors back.
    """
    after: dict[int, torch.Tensor] = {}
    parameters: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
    masters: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        new = after[id(tensor)] = _rounded(here, name, _placed(here, name, tensor, values.get(name)), masters)
        if isinstance(tensor, nn.Parameter) and isinstance(new, nn.Parameter) and new is not tensor:
            parameters[name] = tensor, new
    for module in model.modules():
        undo.callback(_torch.find_weights_again, module)
        for own in _torch.own_tensors(module):
            _swap(own, after, undo)
        _torch.find_weights_again(module)
    return Replaced(parameters, masters)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their first name, each tensor once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _swap(own: dict[str, Any], after: Mapping[int, torch.Tensor], undo: ExitStack) -> None:
    for key, tensor in own.items():
        if tensor is not None and after[id(tensor)] is not tensor:
            undo.callback(own.__setitem__, key, tensor)
            own[key] = after[id(tensor)]


def _placed(here: RankPlan, name: str, tensor: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    """Return what a tensor becomes: a DTensor inside a region or of experts, else a plain tensor on this rank's
    device."""
    if here.is_stored_in_parts(name):
        return _stored(here, name, tensor, local)
    compute_mesh = here.mesh_for(name, tensor)
    if compute_mesh is None:
        return _moved(here, tensor, local)
    layout = here.layout(name, tensor)
    local = local_shard(here, name, tensor) if local is None else local
    stride = torch.empty(tensor.shape, device="meta").stride()
    placements = layout.placements(compute_mesh)
    after = DTensor.from_local(
        local.to(here.device), compute_mesh, placements, run_check=False, shape=tensor.shape, stride=stride
    )
    return _as_parameter(after, tensor) if isinstance(tensor, nn.Parameter) else after


def _stored(here: RankPlan, name: str, tensor: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor:
    """Return a parameter as it is kept between steps: a DTensor on the whole mesh."""
    row = here.rows[name]
    placements = tuple(here.on_active_axes(row.stored).placements(here.mesh))
    local = _at_home(here, row, local_shard(here, name, tensor) if local is None else local)
    after = _torch.wrap(local, _torch.spec(here.mesh, placements, tuple(row.global_shape), local.dtype))
    return _as_parameter(after, tensor)


def _moved(here: RankPlan, tensor: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    if value is None and tensor.device.type == here.device.type:
        return tensor
    moved = (tensor.detach() if value is None else value).to(here.device)
    return _as_parameter(moved, tensor) if isinstance(tensor, nn.Parameter) else moved


def _rounded(here: RankPlan, name: str, tensor: torch.Tensor, masters: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a parameter in the dtype that it is stored in. What rounding takes away stays in `masters`."""
    row = here.rows.get(name)
    if not isinstance(tensor, nn.Parameter) or row is None or row.stored.dtype in (None, tensor.dtype):
        return tensor
    wide, dtype = local_of(tensor), row.stored.dtype
    if row.state is not None and row.has_master:
        stored, state = here.on_active_axes(row.stored), here.on_active_axes(row.state)
        division = cut(stored, state, row.global_shape, here.shape, here.coordinate)
        mine = (
            wide if division is None else division.take(wide, here.executor.transport(here.added(stored, state)).index)
        )
        away = "state" in offload.hosted(row, here.device)
        home = offload.HOST if away else mine.device
        masters[name] = mine.to(home, row.state.dtype or row.dtype, copy=True)
    assert dtype is not None
    low = _at_home(here, row, wide.to(dtype))
    if not isinstance(tensor, DTensor):
        return _as_parameter(low, tensor)
    spec = _torch.spec(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), dtype)
    return _as_parameter(_torch.wrap(low, spec), tensor)


def _at_home(here: RankPlan, row: Row, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter in the memory that it is stored in."""
    if "stored" in offload.hosted(row, here.device):
        return offload.on_host(local, here.device)
    return local.to(here.device)


def _as_parameter(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


def local_shard(here: RankPlan, name: str, whole: Any) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, or of a slice of a safetensors file, of which no more is read."""
    shape = tuple(whole.shape) if isinstance(whole, torch.Tensor) else tuple(whole.get_shape())
    layout = here.rows[name].stored if name in here.rows else Layout.replicate(len(shape))
    layout = here.on_active_axes(layout)
    if isinstance(whole, torch.Tensor):
        return layout.take(whole.detach(), here.shape, here.coordinate).clone()
    return _read(whole, layout.local_slices(shape, here.shape, here.coordinate))


def _read(source: Any, slices: tuple[tuple[slice, ...], ...]) -> torch.Tensor:
    """Return the product of the dims' slices, read from a file piece by piece.

    Copied: what safetensors gives is a view of the mapped file, which keeps the whole tensor alive.
    """

    def read(chosen: tuple[slice, ...]) -> torch.Tensor:
        dim = len(chosen)
        if dim == len(slices):
            return (source[chosen] if chosen else source[:]).clone(memory_format=torch.contiguous_format)
        parts = [read((*chosen, part)) for part in slices[dim]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    return read(())
