"""Exact random numbers in the forward of a sharded model, and in its recomputation by activation checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.feature.exact._data_rank import DataRank
from shardlib.engine.feature.exact._mode import ExactMode, bound, current
from shardlib.errors import ShardingError

__all__ = ["MODES", "batch_rows", "check_mode", "draw_exactly", "enter_exact", "leave_exact"]

MODES = ("fast", "exact")


def check_mode(rng: str) -> None:
    """Refuse an unknown kind of randomness.

    Raises:
        ShardingError: neither "exact" nor "fast".
    """
    if rng not in MODES:
        raise ShardingError(f"rng={rng!r} was given; give " + " or ".join(f'"{mode}"' for mode in MODES) + ".")


def draw_exactly(model: nn.Module, data_rank: DataRank) -> list[Any]:
    """Register hooks that turn exact randomness on, on this data rank, for the outermost module of a model in a call.

    That is the model itself, or a module that is called outside of the model's forward.
    """
    _torch.rebind_checkpointed(bound)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            enter_exact(module, model, data_rank, args, kwargs)

    def leave(module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if not torch.compiler.is_compiling():
            leave_exact(module)

    return [
        handle
        for module in model.modules()
        for handle in (
            module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        )
    ]


def enter_exact(
    module: nn.Module, model: nn.Module, data_rank: DataRank, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Turn exact randomness on as a module of `model` is called, unless it is on for a module around it."""
    mode = current()
    if mode is None or mode.model is not model:
        rank = DataRank(data_rank.index, data_rank.count, batch_rows(args, kwargs))
        ExactMode(rank, model, module).__enter__()
    elif mode.outermost is module:
        mode.depth += 1


def leave_exact(module: nn.Module) -> None:
    """Turn exact randomness off at the end of the call that turned it on.

    A call whose first hook raised has turned nothing on.
    """
    mode = current()
    if mode is None or mode.outermost is not module:
        return
    if mode.depth:
        mode.depth -= 1
    else:
        mode.__exit__(None, None, None)


def batch_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of examples of a batch: the leading dim of its first tensor."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((tensor.shape[0] for tensor in tensors), None)
