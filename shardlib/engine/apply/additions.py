"""Parameters that are added to a sharded model: no rule lays them out, and nobody averages their gradients."""

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

    Without data ranks and stages each rank trains the parameter alike, as one device would.
    """
    if record.plan.mesh.data_ranks == 1 and record.pipeline is None:
        return
    _records.update(dict.fromkeys(model.modules(), weakref.ref(record)))
    for hook in _hooks:  # registered anew: a caller may have cleared all hooks of modules
        hook.remove()
    _hooks[:] = [_torch.watch_new_parameters(_on_parameter), _torch.watch_new_modules(_on_module)]


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if param is not None and (record := _record_of(module)) is not None:
        _refuse(record, module, name, [(name, param)])


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is not None and (record := _record_of(module)) is not None:
        _refuse(record, module, name, [(f"{name}.{key}", param) for key, param in child.named_parameters()])
        _records.update(dict.fromkeys(child.modules(), weakref.ref(record)))


def _record_of(module: nn.Module) -> Sharded | None:
    found = _records.get(module)
    return None if found is None else found()


def _refuse(record: Sharded, module: nn.Module, name: str, params: list[tuple[str, nn.Parameter]]) -> None:
    trained = [(key, param) for key, param in params if param.requires_grad]
    where = f"{type(module).__name__}.{name} is part of a model that shard_model has sharded"
    for key, param in trained:
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
