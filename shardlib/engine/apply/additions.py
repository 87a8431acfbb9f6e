"""Parameters that are added to a sharded model: no rule lays them out, and no reducer averages their gradients."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardlib.engine import _torch
from shardlib.engine.sharded import Sharded
from shardlib.errors import ShardingError

__all__ = ["refuse_additions"]

_records: WeakKeyDictionary[nn.Module, weakref.ref[Sharded]] = WeakKeyDictionary()  # of the modules of sharded models
_hooks: list[RemovableHandle] = []


def refuse_additions(model: nn.Module, record: Sharded) -> None:
    """Let `module.name = value` raise for a new parameter that trains, where ranks have to agree on its gradient.

    Without data ranks and stages each rank trains the parameter as one device would.
    """
    if record.plan.mesh.data_ranks == 1 and record.pipeline is None:
        return
    _records.update(dict.fromkeys(model.modules(), weakref.ref(record)))
    for hook in _hooks:  # registered anew: a caller may have cleared all hooks of modules
        hook.remove()
    _hooks[:] = [_torch.watch_new_parameters(_check), _torch.watch_new_modules(_check)]


def _check(module: nn.Module, name: str, new: nn.Parameter | nn.Module | None) -> None:
    record = _records[module]() if module in _records else None
    if new is None or record is None:
        return
    where = f"{type(module).__name__}.{name} is part of a model that shard_model has sharded"
    params = new.named_parameters(name) if isinstance(new, nn.Module) else [(name, new)]
    for key, param in params:
        if not param.requires_grad:
            continue
        if id(param) not in record.param_states:
            raise ShardingError(
                f'"{key}" is a new parameter, and {where}: no rule lays it out, and its gradient would stay that of '
                "this rank's examples. Change the model before shard_model; or freeze the new parameters first, by "
                "requires_grad_(False)."
            )
        if record.pipeline is not None:
            raise ShardingError(
                f'"{key}" gets another place, and {where} into stages: the other stages would not have it there. '
                "Change the model before shard_model."
            )
    if isinstance(new, nn.Module):
        _records.update(dict.fromkeys(new.modules(), weakref.ref(record)))
