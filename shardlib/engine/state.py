"""State dicts of sharded models: global names and shapes, DTensor values; a plain one loads as it is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.held import held_of, local_of
from shardlib.engine.sharded import is_sharded, record_of
from shardlib.errors import CheckpointError

__all__ = ["accept_plain_state", "full_state_dict"]


def accept_plain_state(model: nn.Module) -> Any:
    """Let `model.load_state_dict` take the state dict of the single-device model; returns the hook's handle."""
    return model.register_load_state_dict_pre_hook(_cut_plain_tensors)


def full_state_dict(
    model: nn.Module, *, cpu: bool = True, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """The state dict that the single-device model would have: plain, whole tensors, on every rank.

    Collective: every rank must call it. One tensor at a time is gathered.

    Args:
        model: a sharded model (or any module).
        cpu: copy each tensor to host memory as soon as it is whole.
        names: of the entries that are wanted, the same on all ranks; None is all.

    Example:
        >>> state = full_state_dict(torch.nn.Linear(2, 2))
        >>> sorted(state)
        ['bias', 'weight']
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name: value for name, value in model.state_dict().items() if names is None or name in names}
    whole = {name: _whole(value, params.get(name), cpu=cpu) for name, value in wanted.items()}
    pipeline = record_of(model).pipeline if is_sharded(model) else None
    return whole if pipeline is None else pipeline.whole_state(whole, names)


def _whole(value: Any, param: torch.Tensor | None, *, cpu: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    held = None if param is None else held_of(param)
    if held is not None and held.is_stored_in_parts:
        whole = held.gathered(local_of(held.param))
    else:
        whole = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
    return whole.cpu() if cpu else whole


def _cut_plain_tensors(
    model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_unused: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise CheckpointError(
            "load_state_dict(assign=True) would replace the sharded parameters by the loaded tensors. Load without "
            "assign: values are copied into the shards, and plain tensors are cut on the way."
        )
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in held.items():
        given = state.get(prefix + name)
        if isinstance(tensor, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
            state[prefix + name] = _cut(name, tensor, given)


def _cut(name: str, tensor: DTensor, given: torch.Tensor) -> DTensor:
    if given.shape != tensor.shape:
        raise CheckpointError(
            f'The state dict has "{name}" with shape {tuple(given.shape)}; the model has it with global shape '
            f"{tuple(tensor.shape)} (local shape {tuple(_torch.local_of(tensor).shape)} on this rank). Load a state "
            "dict of the same model: whole tensors, or DTensors."
        )
    held = held_of(tensor)
    if held is not None and held.is_stored_in_parts:
        return held.wrap(held.take(given).to(local_of(tensor).device))
    return _torch.wrap(_torch.shard(given, tensor.device_mesh, tensor.placements), _torch.spec_of(tensor))
