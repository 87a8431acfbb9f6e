"""Exact random numbers in the forward of a sharded model, and in its recomputation by activation checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.exact._data_rank import DataRank
from shardlib.engine.exact._mode import ExactMode, bound, current
from shardlib.errors import ShardingError

__all__ = ["MODES", "batch_rows", "check_mode", "draw_exactly"]

MODES = ("fast", "exact")


def check_mode(rng: str) -> None:
    """Refuse an unknown kind of randomness.

    Raises:
        ShardingError: neither "exact" nor "fast".
    """
    if rng not in MODES:
        raise ShardingError(f"rng={rng!r} was given; give " + " or ".join(f'"{mode}"' for mode in MODES) + ".")


def draw_exactly(model: nn.Module, data_rank: DataRank) -> list[Any]:
    """Register hooks that turn exact randomness on for each forward of the root, on this data rank."""
    _torch.rebind_checkpointed(bound)

    def enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ExactMode(DataRank(data_rank.index, data_rank.count, batch_rows(args, kwargs)), model).__enter__()

    def leave(model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        mode = current()
        if mode is not None and mode.model is model:  # not if a hook before ours raised
            mode.__exit__(None, None, None)

    return [
        model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]


def batch_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of examples of a batch: the leading dim of its first tensor."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((tensor.shape[0] for tensor in tensors), None)
