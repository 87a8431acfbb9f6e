"""The forward of a sharded model draws exactly; so does what activation checkpointing computes again in backward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.exact._mode import ExactMode, bound
from shardlib.engine.exact._place import Place
from shardlib.errors import ShardingError

__all__ = ["MODES", "check_mode", "draw_exactly"]

MODES = ("fast", "exact")


def check_mode(rng: str) -> None:
    """Refuse a kind of randomness that is none.

    Raises:
        ShardingError: neither "exact" nor "fast".
    """
    if rng not in MODES:
        raise ShardingError(f"rng={rng!r} was given; give " + " or ".join(f'"{mode}"' for mode in MODES) + ".")


def draw_exactly(model: nn.Module, place: Place) -> list[Any]:
    """Hooks that turn exact randomness on for each forward of the root, on the data rank at `place`."""
    _torch.rebind_checkpointed(bound)
    thread = threading.local()

    def enter(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        thread.entered = [
            *getattr(thread, "entered", ()),
            ExactMode(Place(place.index, place.count, _rows(args, kwargs))),
        ]
        thread.entered[-1].__enter__()

    def leave(_model: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if getattr(thread, "entered", None):  # not if a hook before ours raised
            thread.entered.pop().__exit__(None, None, None)

    return [
        model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(leave, always_call=True),
    ]


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """How many examples a batch has: the leading dim of the first tensor in it."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((tensor.shape[0] for tensor in tensors), None)
