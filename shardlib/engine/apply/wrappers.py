"""Wrappers of torch around a sharded model: they would move parameters and gradients that shard_model moves already."""

from __future__ import annotations

from torch import nn

from shardlib.engine import _torch
from shardlib.engine.sharded import is_sharded
from shardlib.engine.undo import Undo
from shardlib.errors import ShardingError

__all__ = ["refuse_wrappers"]

_WRAPPERS = "DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"  # of torch, some not imported yet


def refuse_wrappers(model: nn.Module, undo: Undo) -> None:
    """Let torch's data-parallel wrappers raise where they are given a sharded model, or a module that contains one.

    `DistributedDataParallel`, `DataParallel`, and for each module of the model `fully_shard` and `replicate` raise
    before they change anything. `FullyShardedDataParallel` flattens parameters first, where it can.
    """
    for module in model.modules():
        undo.callback(_torch.refuse_composition(module, _refuse))
    _torch.patch(_check, lambda: _torch.watch_new_modules(_check).remove, anew=True)


def _check(wrapper: nn.Module, name: str, new: nn.Module | None) -> None:
    kinds = [kind.__name__ for kind in type(wrapper).__mro__ if kind.__module__.startswith("torch.")]
    if kinds[0] in _WRAPPERS and new is not None and any(map(is_sharded, new.modules())):
        _refuse(kinds[0])


def _refuse(wrapper: str) -> None:
    raise ShardingError(
        f"{wrapper} was given a model that shard_model has sharded. Train the model itself, without a wrapper: its "
        "gradients are averaged over the data axes when backward() returns, and transforms=sl.zero(2), sl.fsdp() and "
        "others shard it further. Where a trainer wraps models, use the one in shardlib.integrations."
    )
