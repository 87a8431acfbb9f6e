"""`copy.deepcopy` of a sharded model: another model, sharded by the same plan, with the same values."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import Row, rows_by_name
from shardlib.engine import _torch
from shardlib.engine.data.params import local_of
from shardlib.engine.ranks import agree
from shardlib.engine.sharded import Sharded, record_of
from shardlib.engine.torn import refuse_torn
from shardlib.engine.undo import Undo, bare
from shardlib.errors import ShardingError

__all__ = ["allow_copies", "bare_again", "on_meta_again"]


def allow_copies(model: nn.Module, shard_again: Callable[..., nn.Module], undo: Undo) -> None:
    """Let `copy.deepcopy` of a sharded model shard a second one, with the same local shards.

    Nothing is sent, but for the groups of a pipeline: there every rank must copy. As of any parameter, hooks and
    gradients of parameters are not copied.

    `shard_again` shards a model on `meta`; its `values` are local shards by name. `undo` takes away what was installed
    on the modules of the model, which the copy gets from `shard_again`.
    """
    model.__dict__["__deepcopy__"] = functools.partial(_copied, model, shard_again, undo)
    undo.callback(model.__dict__.pop, "__deepcopy__", None)


def _copied(model: nn.Module, shard_again: Callable[..., nn.Module], undo: Undo, memo: dict[int, Any]) -> nn.Module:
    """Return a copy of a sharded model.

    Raises:
        ShardingError: parameters were added, replaced or removed since the model was sharded.
    """
    refuse_torn("copy.deepcopy", model)
    record = record_of(model)
    _refuse_changed(model, record)
    if record.updates is not None:
        record.updates.wait()
    rows = rows_by_name(record.full_plan.rows)
    on_meta = _on_meta(model, rows)
    tensors = {name: tensor for name, tensor in agree.named_tensors(model).items() if id(tensor) in on_meta}
    values = {name: local_of(tensor).to(rows[name].dtype, copy=True) for name, tensor in tensors.items()}
    other = _plain_copy(model, undo, on_meta, memo)
    shard_again(other, values=values)
    copies = agree.named_tensors(other)
    memo.update({id(tensor): copies[name] for name, tensor in tensors.items()})
    _copy_state(record, record_of(other))
    return other


def on_meta_again(model: nn.Module) -> nn.Module:
    """Return a copy of a sharded model as it was before it was sharded, with full tensors on `meta`."""
    record = record_of(model)
    _refuse_changed(model, record)
    return _plain_copy(model, record.installed, _on_meta(model, rows_by_name(record.full_plan.rows)), {})


def bare_again(model: nn.Module) -> None:
    """Make a sharded model what it was before it was sharded, in place, with all of its tensors on `meta`."""
    record = record_of(model)
    on_meta = _on_meta(model, rows_by_name(record.full_plan.rows), torch.Tensor)
    record.installed.run()
    for module in model.modules():
        for own, key, tensor in _torch.registered_tensors(module):
            own[key] = on_meta.get(id(tensor), tensor)
        for key, tensor in _placeholders(module):
            vars(module)[key] = on_meta[id(tensor)]
    _put_in_place(model, on_meta)
    for module in model.modules():
        _torch.find_weights_again(module)


def _plain_copy(model: nn.Module, undo: Undo, on_meta: Mapping[int, torch.Tensor], memo: dict[int, Any]) -> nn.Module:
    memo.update(on_meta)
    with bare(model, undo):
        other = copy.deepcopy(model, memo)
    _put_in_place(other, on_meta)
    return other


def _refuse_changed(model: nn.Module, record: Sharded) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {name for row in record.plan.rows if row.kind == "parameter" for name in row.tied}
    changed = [name for name, param in parameters.items() if name not in known or id(param) not in record.param_states]
    changed += sorted(known - parameters.keys())
    if changed:
        raise ShardingError(
            f'"{changed[0]}" of this sharded {type(model).__name__} was added, replaced or removed after shard_model, '
            "and copy.deepcopy shards the copy by the plan of the model as it was. Change the model before you shard "
            "it; or build a second model, shard it, and load the state dict of the first."
        )


def _on_meta(model: nn.Module, rows: Mapping[str, Row], kinds: Any = nn.Parameter | DTensor) -> dict[int, torch.Tensor]:
    """Return a full tensor on `meta` for each tensor of these kinds and placeholder of another stage, by id."""
    found: dict[int, torch.Tensor] = {}
    by_row: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        registered = _torch.registered_tensors(module)
        own = [(key, tensor) for _, key, tensor in registered if isinstance(tensor, kinds)]
        for key, tensor in (*own, *_placeholders(module)):
            row = rows[f"{prefix}.{key}".lstrip(".")]
            found[id(tensor)] = by_row.setdefault(row.name, _full_on_meta(row))
        for _, tensor in own:
            found[id(tensor)].requires_grad_(tensor.requires_grad)
    return found


def _placeholders(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of other stages, which are attributes of the module on this rank."""
    attributes = [(key, value) for key, value in vars(module).items() if isinstance(value, torch.Tensor)]
    return [(key, value) for key, value in attributes if not _torch.has_values(value)]


def _full_on_meta(row: Row) -> torch.Tensor:
    full = torch.empty(row.global_shape, dtype=row.dtype, device="meta")
    return nn.Parameter(full) if row.kind == "parameter" else full


def _put_in_place(model: nn.Module, on_meta: Mapping[int, torch.Tensor]) -> None:
    """Register the tensors of other stages, which were attributes, as parameters and buffers."""
    full = {id(tensor) for tensor in on_meta.values()}
    for module in model.modules():
        parameters, buffers = _torch.own_tensors(module)
        for key, value in list(vars(module).items()):
            if id(value) in full:
                del vars(module)[key]
                (parameters if isinstance(value, nn.Parameter) else buffers)[key] = value


def _copy_state(source: Sharded, target: Sharded) -> None:
    for one, other in zip(source.reducer.param_states, target.reducer.param_states, strict=True):
        master = one.mutable.master
        other.keep_master(None if master is None else master.clone())
    for name, kept in source.stateful.items():
        target.stateful[name].load_state_dict(kept.state_dict())
