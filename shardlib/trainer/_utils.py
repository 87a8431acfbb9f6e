"""Helpers for custom training loops beside the engine: checkpoints of an epoch, and the ranks of the job."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import nn

from shardlib import checkpoint as checkpoints
from shardlib.checkpoint import Saving
from shardlib.trainer._context import ParallelMode, global_context

__all__ = ["free_port", "is_using_ddp", "is_using_pp", "load_checkpoint", "print_rank_0", "save_checkpoint"]


def save_checkpoint(
    file: str | os.PathLike[str],
    epoch: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
) -> Saving:
    """Save the state of training. Collective: every rank calls it.

    Args:
        file: the path of a folder, as for `shardlib.save`.
        epoch: a number that `load_checkpoint` returns.
        model: the engine's model.
        optimizer: the same.
        lr_scheduler: the one that drives it.

    >>> import tempfile
    >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save_checkpoint(f"{folder}/epoch_3", 3, first)
    ...     load_checkpoint(f"{folder}/epoch_3", second)
    3
    """
    return checkpoints.save(file, model, optimizer, lr_scheduler=lr_scheduler, extra={"epoch": int(epoch)})


def load_checkpoint(
    file: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
) -> int:
    """Load a checkpoint of `save_checkpoint` or `shardlib.save`, on any number of ranks, with any config. Collective.

    Args:
        file: the folder.
        model: the model, which is overwritten, as are the other objects.
        optimizer: see there.
        lr_scheduler: see there.
        strict: raise if a name is only in the model or only in the checkpoint.

    Returns:
        The saved epoch; -1 if there is none.

    >>> load_checkpoint("nowhere", nn.Linear(2, 2))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardlib.errors.CheckpointError: ...
    """
    loaded = checkpoints.load(file, model, optimizer, lr_scheduler=lr_scheduler, strict=strict, cast=True)
    return int(loaded.extra["epoch"]) if isinstance(loaded.extra, dict) and "epoch" in loaded.extra else -1


def free_port() -> int:
    """Return a port of this machine that is free now, for `launch` of a job on this machine alone.

    >>> 1024 <= free_port() <= 65535
    True
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def is_using_ddp() -> bool:
    """Return whether several ranks have examples of their own.

    >>> is_using_ddp()
    False
    """
    return global_context.get_world_size(ParallelMode.DATA) > 1


def is_using_pp() -> bool:
    """Return whether there are several stages.

    >>> is_using_pp()
    False
    """
    return global_context.get_world_size(ParallelMode.PIPELINE) > 1


def print_rank_0(message: str) -> None:
    """Print on the first rank.

    >>> print_rank_0("epoch 3")
    epoch 3
    """
    if global_context.get_global_rank() == 0:
        print(message, flush=True)
