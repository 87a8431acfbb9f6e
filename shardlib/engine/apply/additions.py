"""Parameters that are added to a sharded model: no rule lays them out, and no reducer averages their gradients.

peft gives an adapter the sizes of a layer's local weight, which are those of a shard where the layer is split.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.tensor import DTensor

from shardlib.engine import _torch
from shardlib.engine.sharded import Sharded
from shardlib.errors import ShardingError

__all__ = ["refuse_additions"]

_records: WeakKeyDictionary[nn.Module, weakref.ref[Sharded]] = WeakKeyDictionary()  # of the modules of sharded models


def refuse_additions(model: nn.Module, record: Sharded) -> None:
    """Let `module.name = value` raise for a new parameter that trains, where ranks have to agree on its gradient, and
    for an adapter of peft around a layer that is split.

    Otherwise, without data ranks and stages, each rank trains the parameter as one device would.
    """
    if record.plan.mesh.world_size == 1 and record.pipeline is None:
        return
    _records.update(dict.fromkeys(model.modules(), weakref.ref(record)))
    _torch.patch(refuse_additions, _watch, anew=True)


def _watch() -> Callable[[], None]:
    handles = [_torch.watch_new_parameters(_check), _torch.watch_new_modules(_check)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _check(module: nn.Module, name: str, new: nn.Parameter | nn.Module | None) -> None:
    record = _records[module]() if module in _records else None
    if new is None or record is None:
        return
    where = f"{type(module).__name__}.{name} is part of a model that shard_model has sharded"
    params = dict(new.named_parameters(name)) if isinstance(new, nn.Module) else {name: new}
    alone = record.plan.mesh.data_ranks == 1 and record.pipeline is None
    if alone:
        _refuse_adapter(new, params, where)
        return
    for key, param in params.items():
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


def _refuse_adapter(new: nn.Module | nn.Parameter, params: Mapping[str, nn.Parameter], where: str) -> None:
    split = [
        key for key, param in params.items() if isinstance(param, DTensor) and param.to_local().shape != param.shape
    ]
    if split and type(new).__module__.partition(".")[0] == "peft":
        raise ShardingError(
            f'peft adds an adapter around "{split[0]}", of which this rank has a shard, and {where}: the adapter would '
            "have the sizes of the shard. Call peft.get_peft_model before shard_model; the adapter then is split as "
            "its layer is."
        )
