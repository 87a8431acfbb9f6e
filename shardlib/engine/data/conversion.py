"""Conversions of a sharded model, as `model.to(...)`, and pickles of it: all but no-ops are refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.sharded import param_state_of
from shardlib.engine.undo import Undo
from shardlib.errors import ShardingError

__all__ = ["refuse_conversions", "refuse_pickles"]


def refuse_conversions(model: nn.Module, undo: Undo) -> None:
    """Refuse conversions of a model and of each of its modules that would change a tensor."""
    for module in model.modules():
        undo.callback(_torch.replace_conversion(module, _refuse_change))


def _refuse_change(
    module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """Do nothing, if the conversion would not change a tensor.

    Raises:
        ShardingError: it would change one. Nothing has been changed.
    """
    for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
        before = _as_computed_with(tensor)
        with torch.no_grad():
            after = convert(before)
        if after is not before:
            raise ShardingError(
                f'A conversion of a sharded {type(module).__name__} would make "{name}", which is '
                f"{_described(before)}, {_change(before, after)}. Nothing was changed: gradient buckets and optimizer "
                "state were made for its present dtype and device. Move and cast a model before shard_model or boost; "
                "or choose dtypes with precision(), and what is kept in host memory with offload()."
            )
    return module


def refuse_pickles(model: nn.Module, undo: Undo) -> None:
    """Refuse pickles of a sharded model, which is tied to process groups, and shared memory.

    `copy.copy`, which asks for the same as a pickle, shares all that the model has.
    """

    def refuse_pickle(given: Any) -> Any:
        frame = inspect.currentframe()
        if frame is not None and frame.f_back is not None and frame.f_back.f_code is copy.copy.__code__:
            return object.__reduce_ex__(model, given)
        raise ShardingError(
            f"This {type(model).__name__} is sharded: it is tied to process groups, and cannot be pickled. For a "
            "second one on these ranks, use copy.deepcopy. To keep it, use shardlib.save, or torch.save of "
            "shardlib.full_state_dict(model)."
        )

    def refuse_sharing() -> nn.Module:
        if not any(isinstance(param, DTensor) for param in model.parameters()):
            return nn.Module.share_memory(model)
        raise ShardingError(
            f"This {type(model).__name__} is sharded: each process has its own local shards, and share_memory() would "
            "give them to processes outside of the process groups. Share the memory of an unsharded model that loaded "
            "shardlib.full_state_dict(model)."
        )

    for name, refuse in (("__reduce_ex__", refuse_pickle), ("share_memory", refuse_sharing)):
        setattr(model, name, refuse)
        undo.callback(model.__dict__.pop, name, None)


def _as_computed_with(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device that computes with it, also for a parameter that is stored on the host."""
    param_state = param_state_of(tensor)
    if param_state is None or "stored" not in param_state.offloaded:
        return tensor
    return torch.empty((0,) * tensor.ndim, dtype=tensor.dtype, device=param_state.device)


def _change(before: torch.Tensor, after: torch.Tensor) -> str:
    same = (before.dtype, before.device) == (after.dtype, after.device)
    return "a tensor in other memory" if same else _described(after)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
