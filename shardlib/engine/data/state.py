"""State dicts of sharded models: canonical names, global shapes, DTensor values; plain state dicts can be loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.data.params import local_of
from shardlib.engine.ranks import lost
from shardlib.engine.sharded import is_sharded, param_state_of, record_of
from shardlib.engine.torn import refuse_torn
from shardlib.errors import CheckpointError

__all__ = ["full_state_dict", "shard_plain_tensors"]


def full_state_dict(
    model: nn.Module, *, cpu: bool = True, names: Collection[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the state dict of the single-device model: plain, full tensors on every rank.

    Collective: every rank must call it; if some do not, the others raise `CheckpointError`. Tensors are all-gathered
    one at a time.

    Args:
        model: a sharded model (or any module).
        cpu: copy each tensor to host memory as soon as it is all-gathered.
        names: the entries to return, the same on all ranks; None for all.

    Example:
        >>> state = full_state_dict(torch.nn.Linear(2, 2))
        >>> sorted(state)
        ['bias', 'weight']
    """
    refuse_torn("full_state_dict", model)
    if is_sharded(model):
        ranks = _torch.ranks_of_mesh(_torch.root_mesh(record_of(model).mesh))
        which = "" if names is None else f" of {len(names)} tensors"
        if why := lost.come("sl.full_state_dict", task=which, ranks=ranks):
            raise CheckpointError(f"Gathering full tensors failed: {why}")
    params = dict(model.named_parameters(remove_duplicate=False))
    wanted = {name: value for name, value in model.state_dict().items() if names is None or name in names}
    full = {name: _full(value, params.get(name), cpu=cpu) for name, value in wanted.items()}
    pipeline = record_of(model).pipeline if is_sharded(model) else None
    return full if pipeline is None else pipeline.stages.full_state(full, names)


def _full(value: Any, param: torch.Tensor | None, *, cpu: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    param_state = None if param is None else param_state_of(param)
    if param_state is not None and param_state.is_stored_sharded:
        full = param_state.full_tensor(local_of(param_state.param))
    else:
        full = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
    return full.cpu() if cpu else full


def shard_plain_tensors(
    model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_unused: Any
) -> None:
    """Replace the plain tensors of a state dict by shards, before `model.load_state_dict` loads it.

    Raises:
        CheckpointError: the load would assign tensors, or a tensor has another shape than in the model.
    """
    if metadata.get("assign_to_params_buffers"):
        raise CheckpointError(
            "load_state_dict(assign=True) would replace the sharded parameters by the loaded tensors. Load without "
            "assign: values are copied into the shards, and each rank takes its shard of plain tensors."
        )
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name, tensor in tensors.items():
        given = state.get(prefix + name)
        if isinstance(tensor, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
            state[prefix + name] = _sharded_like(name, tensor, given)


def _sharded_like(name: str, tensor: DTensor, given: torch.Tensor) -> DTensor:
    if given.shape != tensor.shape:
        raise CheckpointError(
            f'The state dict has "{name}" with shape {tuple(given.shape)}; the model has it with global shape '
            f"{tuple(tensor.shape)} (local shape {tuple(_torch.local_of(tensor).shape)} on this rank). Load a state "
            "dict of the same model: full tensors, or DTensors."
        )
    param_state = param_state_of(tensor)
    if param_state is not None and param_state.is_stored_sharded:
        return param_state.wrap(param_state.take(given).to(local_of(tensor).device))
    return _torch.wrap(_torch.shard(given, tensor.device_mesh, tensor.placements), _torch.spec_of(tensor))
