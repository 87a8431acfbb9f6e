"""`model.to(...)`, `.cpu()`, `.half()` and the like on a sharded model: nothing to do, or refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine.held import held_of
from shardlib.errors import ShardingError

__all__ = ["refuse_conversions"]


def refuse_conversions(model: nn.Module) -> Callable[[], None]:
    """Let a model, and each module of it, be converted only to what it already is; returns what undoes it."""
    undo = ExitStack()
    for module in model.modules():
        undo.callback(_torch.replace_conversion(module, _look))
    return undo.close


def _look(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Do nothing, if a conversion does nothing.

    Raises:
        ShardingError: it would change a tensor. None has been changed.
    """
    for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
        before = _as_computed_with(tensor)
        with torch.no_grad():
            after = convert(before)
        if after is not before:
            raise ShardingError(
                f'A conversion of a sharded {type(module).__name__} would make "{name}", which is '
                f"{_described(before)}, {_change(before, after)}. Nothing was changed: buckets of gradients and the "
                "optimizer's state are laid out for what it is. Move and cast a model before shard_model; or choose "
                "dtypes with precision(), and what lies on the host with offload()."
            )
    return module


def _as_computed_with(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter that is stored on the host counts as being where it is computed with."""
    held = held_of(tensor)
    if held is None or "stored" not in held.hosted:
        return tensor
    return torch.empty((0,) * tensor.ndim, dtype=tensor.dtype, device=held.device)


def _change(before: torch.Tensor, after: torch.Tensor) -> str:
    same = (before.dtype, before.device) == (after.dtype, after.device)
    return "a tensor in other memory" if same else _described(after)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} on {tensor.device}"
