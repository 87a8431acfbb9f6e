"""Optimizers by the names of parameters: their groups, their state, and state that a checkpoint is loaded into."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._plan import Row, rows_by_name
from shardlib.checkpoint._items import Item, RankMesh, elsewhere, first_names, item_of, rank_mesh_of
from shardlib.checkpoint._manifest import Saved
from shardlib.checkpoint._values import Get, Put, decode, encode
from shardlib.engine import _torch
from shardlib.engine.data.full_step import MASTER
from shardlib.engine.data.optimizer import steps_whole_tensors
from shardlib.engine.data.params import ParamState
from shardlib.engine.sharded import param_state_of
from shardlib.errors import CheckpointError, nearest

__all__ = [
    "Known",
    "describe",
    "groups_for",
    "inner_of",
    "joined",
    "known",
    "make_state",
    "master_items",
    "optimizer_items",
]

# How a machine computes the update, which is not part of it: another run may choose otherwise.
_OF_THE_MACHINE = {"foreach", "fused", "capturable", "differentiable"}
_NO_OPTIONS = {"params", "param_names"}
# Classes with the same state. Which of their updates is meant, these options say; a class without one has it True.
_ADAMS = {"Adam", "AdamW", "CPUAdam", "FusedAdam", "HybridAdam"}
_UPDATE_OF_ADAM = ("bias_correction", "decoupled_weight_decay")


@dataclass(frozen=True)
class Known:
    """The parameters of an optimizer: their names, and the layouts of their state.

    Attributes:
        names: id of a parameter -> its name.
        rows: name -> row of the plan, where the model was sharded by one.
        mesh: the device mesh of that plan.
        elsewhere: names of parameters that other stages of a pipeline have.
    """

    names: Mapping[int, str]
    rows: Mapping[str, Row]
    mesh: Any
    elsewhere: Set[str] = frozenset()

    def name(self, param: torch.Tensor, place: str) -> str:
        if id(param) not in self.names:
            raise CheckpointError(
                f"The optimizer holds a parameter of shape {tuple(param.shape)} ({place}) that the model does not "
                "have: it cannot be named. Build the optimizer from model.parameters(), after shard_model."
            )
        return self.names[id(param)]


def known(model: nn.Module) -> Known:
    """Return the names and the plan of a model, sharded or not."""
    from shardlib.engine import apply

    first = first_names(model)
    names = {id(param): first.get(name, name) for name, param in model.named_parameters()}
    if not apply.is_sharded(model):
        return Known(names, {}, None)
    rows = rows_by_name(apply.get_plan(model).rows)
    return Known(names, rows, apply.record_of(model).mesh, elsewhere(model))


def _params(optimizer: torch.optim.Optimizer, of: Known) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            yield of.name(param, f"group {g}, place {i}"), param, group


def optimizer_items(optimizer: torch.optim.Optimizer, of: Known, size: int) -> Iterator[Item]:
    """Iterate over tensors of the optimizer's state as items "state.<parameter>.<key>"."""
    whole = steps_whole_tensors(inner_of(optimizer))
    for name, param, _ in _params(optimizer, of):
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield _state_item(f"state.{name}.{key}", param, value, size, whole=whole)
        param_state = param_state_of(param)
        if param_state is not None and param_state.mutable.master is not None and MASTER not in state:
            yield _master_item("optimizer", f"state.{name}.{MASTER}", param_state, param_state.mutable.master)


def master_items(model: nn.Module) -> Iterator[tuple[str, ParamState, Item]]:
    """Iterate over the parameters with a master copy: name, parameter state, and an empty copy to fill."""
    first = first_names(model)
    for here, param in model.named_parameters():
        param_state, name = param_state_of(param), first.get(here, here)
        if param_state is not None and param_state.master_dtype is not None:
            room = torch.empty(param_state.shard_shape, dtype=param_state.master_dtype, device=param_state.state_device)
            yield name, param_state, _master_item("model", name, param_state, room)


def _master_item(section: str, name: str, param_state: ParamState, local: torch.Tensor) -> Item:
    rank_mesh = rank_mesh_of(param_state.mesh)
    layout = param_state.layout.with_axes_dropped(param_state.layout.axes - set(rank_mesh.mesh.names))
    return Item(section, name, tuple(param_state.param.shape), local.dtype, layout, rank_mesh, local)


def _rank_mesh(param: torch.Tensor, size: int) -> RankMesh:
    """Return the ranks that replicate the plain tensors of a parameter's state."""
    param_state = param_state_of(param)
    return (
        rank_mesh_of(param_state.mesh)
        if param_state is not None and param_state.pipeline_group is not None
        else RankMesh.everywhere(size)
    )


def _state_item(name: str, param: torch.Tensor, value: torch.Tensor, size: int, *, whole: bool) -> Item:
    """Return an entry of state as an item. A plain tensor beside a sharded parameter is this rank's shard, unless its
    optimizer steps on full tensors: then it is replicated."""
    item = item_of("optimizer", name, value, _rank_mesh(param, size))
    if whole or isinstance(value, DTensor) or not isinstance(param, DTensor):
        return item
    if not value.ndim or value.shape == param.shape:
        return item
    of_param = item_of("optimizer", name, param, _rank_mesh(param, size))
    by_engine = param_state_of(param) is not None  # which makes DTensors of what is split
    if value.numel() == 1 and (by_engine or of_param.local.numel() != 1):  # a count of steps, torch.zeros(1)
        return item
    if value.shape != of_param.local.shape:
        raise CheckpointError(
            f'Optimizer state "{name}" is a plain tensor of shape {tuple(value.shape)}, but its parameter is sharded: '
            f"global shape {tuple(param.shape)}, local shape {tuple(of_param.local.shape)}. The layout of the state is "
            "unknown; let the optimizer keep it as a DTensor."
        )
    return Item("optimizer", name, of_param.shape, value.dtype, of_param.layout, of_param.rank_mesh, value.detach())


def describe(optimizer: torch.optim.Optimizer, of: Known, put: Put) -> dict[str, Any]:
    """Describe an optimizer without its state's tensors, as JSON: class, groups with names, other state."""
    groups = []
    for g, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        names = [of.name(param, f"group {g}, place {i}") for i, param in enumerate(group["params"])]
        groups.append({"params": names, "options": encode(options, f"optimizer.groups.{g}", put)})
    values = {
        name: encode(other, f"optimizer.state.{name}", put)
        for name, param, _ in _params(optimizer, of)
        if (other := {k: v for k, v in optimizer.state.get(param, {}).items() if not isinstance(v, torch.Tensor)})
    }
    made = {"class": _class_of(optimizer), "groups": groups, "values": values}
    for name, kept in getattr(optimizer, "stateful", {}).items():
        made[name] = encode(kept.state_dict(), f"optimizer.{name}", put)
    return made


def joined(descriptions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the descriptions of several stages' ranks into one, of an optimizer over all their parameters.

    Raises:
        CheckpointError: other numbers of groups.
    """
    first = descriptions[0]
    if any(len(each["groups"]) != len(first["groups"]) for each in descriptions):
        counts = ", ".join(str(len(each["groups"])) for each in descriptions)
        raise CheckpointError(
            f"The optimizers of the ranks have {counts} groups, and are saved as one. Give each the same groups, in "
            "the same order."
        )
    groups = [
        {**group, "params": list(dict.fromkeys(name for each in descriptions for name in each["groups"][g]["params"]))}
        for g, group in enumerate(first["groups"])
    ]
    return {**first, "groups": groups, "values": {k: v for each in descriptions for k, v in each["values"].items()}}


def _class_of(optimizer: Any) -> str:
    """Return the class name of an optimizer, or of the one that it wraps."""
    return type(inner_of(optimizer)).__name__


def inner_of(optimizer: Any) -> Any:
    return optimizer.unwrap() if callable(getattr(optimizer, "unwrap", None)) else optimizer


def groups_for(
    optimizer: torch.optim.Optimizer, of: Known, saved: Mapping[str, Any], aliases: Mapping[str, str], get: Get
) -> list[dict[str, Any]]:
    """Return the saved options for each group of the optimizer. Groups may be divided differently, if options are the
    same. Of Adam's classes one may take what another has saved, if both make the same update.

    Raises:
        CheckpointError: another kind of optimizer, unknown parameters, options that differ within a group, or options
            of other types than the optimizer's own.
    """
    before, here = saved["class"], _class_of(optimizer)
    if before != here and not {before, here} <= _ADAMS:
        raise CheckpointError(
            f"The checkpoint holds the state of {before}, and is loaded into {here}. Use the same optimizer, or load "
            "the model alone."
        )
    options = [decode(group["options"], get) for group in saved["groups"]]
    at = {name: g for g, group in enumerate(saved["groups"]) for name in group["params"]}
    wanted = [[aliases.get(name, name) for name in _names_of(group, of)] for group in optimizer.param_groups]
    missing = [name for names in wanted for name in names if name not in at]
    unknown = set(at) - {name for names in wanted for name in names} - of.elsewhere
    if missing or unknown:
        raise CheckpointError(_other_parameters(missing, sorted(unknown), at))
    found = [_one_of(g, [options[at[name]] for name in names]) for g, names in enumerate(wanted)]
    for g, group in enumerate(optimizer.param_groups):
        if before != here:
            found[g] = _of_the_same_update(g, found[g], group, f"saved by {before} and loaded into {here}")
        _check_options(g, found[g], group)
    return found


def _of_the_same_update(g: int, saved: Mapping[str, Any], group: Mapping[str, Any], how: str) -> dict[str, Any]:
    """Return the options that one of Adam's classes takes from another.

    Raises:
        CheckpointError: the two make another update of the same state.
    """
    for key in _UPDATE_OF_ADAM:
        told, now = saved.get(key, True), group.get(key, True)
        if told != now and (key == "bias_correction" or saved.get("weight_decay")):
            raise CheckpointError(
                f"Group {g} of the optimizer, {how}, has {key}={told!r} in the checkpoint and {now!r} here: the update "
                "would be another one. Build the optimizer with the same, or load the model alone."
            )
    return {key: value for key, value in saved.items() if key not in _UPDATE_OF_ADAM}


def _names_of(group: dict[str, Any], of: Known) -> list[str]:
    return [of.name(param, f"place {i} of its group") for i, param in enumerate(group["params"])]


def _other_parameters(missing: list[str], unknown: list[str], saved: Mapping[str, Any]) -> str:
    text = "The optimizer that was saved had other parameters."
    if missing:
        text += f" It had no {_listed(missing)}.{nearest(missing[0], saved)}"
    if unknown:
        text += f" It had {_listed(unknown)} in addition."
    return text + " Build the optimizer over the same parameters, or load the model alone."


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _one_of(g: int, options: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [{k: v for k, v in each.items() if k not in _OF_THE_MACHINE} for each in options]
    if any(repr(each) != repr(kept[0]) for each in kept):
        raise CheckpointError(
            f"Group {g} of the optimizer joins parameters that were saved with different options. Make groups as they "
            "were, or of parameters that had equal options."
        )
    return kept[0] if kept else {}


def _check_options(g: int, saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        # A scheduler's "initial_lr" is not in a group that no scheduler has seen.
        now = group.get(key, group.get("lr") if key.endswith("lr") else None)
        if key in _NO_OPTIONS or not _fits(value, now):
            raise CheckpointError(
                f'Option "{key}" of group {g} of the optimizer is {_short(value)} in the checkpoint, which is not '
                f"{'an option' if key in _NO_OPTIONS else f'of the kind of {_short(now)} here'}. The checkpoint is "
                "damaged, or of an optimizer that takes other options: use another one, or load the model alone."
            )


def _fits(saved: Any, now: Any) -> bool:
    """Return whether a saved option may replace one of the optimizer; anything may replace None."""
    if now is None:
        return True
    if isinstance(now, bool):
        return isinstance(saved, bool)
    if isinstance(now, torch.Tensor) and now.numel() != 1:
        return isinstance(saved, torch.Tensor) and saved.shape == now.shape
    if isinstance(now, Real | torch.Tensor):
        return _is_number(saved)
    if isinstance(now, tuple | list):
        several = isinstance(saved, tuple | list) and (len(saved) == len(now) or isinstance(now, list))
        return several and all(map(_fits, saved, now))
    return isinstance(saved, type(now))


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, which a tensor may hold."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex() and _is_number(value.item())
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 1 << 63
    return isinstance(value, float) and value == value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def make_state(
    optimizer: torch.optim.Optimizer,
    of: Known,
    saved: Mapping[str, Saved],
    values: Mapping[str, Any],
    aliases: Mapping[str, str],
    get: Get,
    size: int,
    *,
    kept: Set[str] = frozenset(),
) -> tuple[list[tuple[str, Item]], dict[torch.Tensor, dict[str, Any]]]:
    """Return the items to read saved state into, by saved name, and the resulting `optimizer.state`.

    A saved copy in more bits goes into the parameter where that has these bits itself and no copy is stepped on.
    Tensors that `kept` names keep their dtype, where others may take that of their parameter.
    """
    items, state = list[tuple[str, Item]](), dict[torch.Tensor, dict[str, Any]]()
    whole = steps_whole_tensors(inner_of(optimizer))
    by_param: dict[str, list[str]] = {}
    for name in saved:
        by_param.setdefault(name.removeprefix("state.").rpartition(".")[0], []).append(name)
    for name, param, group in _params(optimizer, of):
        old = aliases.get(name, name)
        held: dict[str, Any] = dict(decode(values[old], get)) if old in values else {}
        for full in by_param.get(old, []):
            key = full.rpartition(".")[2]
            if key == MASTER and not _has_master(param):
                if saved[full].dtype == param.dtype:
                    items.append((full, item_of("optimizer", full, param, _rank_mesh(param, size))))
                continue
            now = optimizer.state.get(param, {}).get(key)
            dtype = saved[full].dtype if full in kept else _dtype(now, param, of.rows.get(name), saved[full])
            tensor = _room(full, key, now, param, of.rows.get(name), of, saved[full], group, dtype, whole=whole)
            held[key] = tensor
            items.append((full, _state_item(full, param, tensor, size, whole=whole)))
        if held:
            state[param] = held
    return items, state


def _has_master(param: torch.Tensor) -> bool:
    param_state = param_state_of(param)
    return param_state is not None and param_state.master_dtype is not None


def _room(
    full: str,
    key: str,
    now: Any,
    param: torch.Tensor,
    row: Row | None,
    of: Known,
    saved: Saved,
    group: dict[str, Any],
    dtype: torch.dtype,
    *,
    whole: bool,
) -> torch.Tensor:
    """Return an empty tensor of state, in the layout of the plan, the parameter or the present state.

    An optimizer that steps on full tensors (`whole`) has state of other shapes, such as rows and columns, on all ranks.
    """
    if key == "step" and saved.shape == ():
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=saved.dtype, device=_device(param) if on_device else "cpu")
    if isinstance(now, torch.Tensor) and tuple(now.shape) == saved.shape:
        return torch.empty_like(now, dtype=dtype)
    split = isinstance(param, DTensor) or bool(_splitting(row, of))
    if saved.shape != tuple(param.shape):
        if split and math.prod(saved.shape) != 1 and not whole:
            raise CheckpointError(
                f'Optimizer state "{full}" has shape {saved.shape}, and its parameter, of global shape '
                f"{tuple(param.shape)}, is sharded: the layout of this state is not known. Step the optimizer once "
                "before loading, so that it makes its state, or load on one rank."
            )
        return torch.empty(saved.shape, dtype=saved.dtype, device=_device(param))
    if split:
        return _like_state(param, row, of, dtype)
    return torch.empty_like(param.detach(), dtype=dtype, device=_device(param))


def _device(param: torch.Tensor) -> torch.device:
    """Return the device of a parameter's optimizer state."""
    param_state = param_state_of(param)
    return param.device if param_state is None else param_state.state_device


def _dtype(now: Any, param: torch.Tensor, row: Row | None, saved: Saved) -> torch.dtype:
    if isinstance(now, torch.Tensor):
        return now.dtype
    if row is not None and row.state is not None and row.state.dtype is not None:
        return row.state.dtype
    return param.dtype if saved.dtype.is_floating_point and saved.shape == tuple(param.shape) else saved.dtype


def _splitting(row: Row | None, of: Known) -> set[str]:
    """Return the axes that split the state of a row's parameter."""
    axes = row.state.axes if row is not None and row.state is not None else ()
    return {axis for axis in axes if of.mesh[axis].size() > 1}


def _like_state(param: torch.Tensor, row: Row | None, of: Known, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty DTensor in the state layout, on the parameter's own mesh where that has its axes, else on the
    full mesh."""
    shape = tuple(param.shape)
    mesh: Any = param.device_mesh if isinstance(param, DTensor) else of.mesh
    if isinstance(param, DTensor) and (row is None or row.state is None or row.state.axes == row.stored.axes):
        local = torch.empty_like(_torch.local_of(param), dtype=dtype, device=_device(param))
        return _torch.wrap(local, _torch.spec(mesh, param.placements, shape, dtype))
    assert row is not None and row.state is not None
    if not _splitting(row, of) <= set(mesh.mesh_dim_names):
        mesh = of.mesh
    layout = row.state.with_axes_dropped(row.state.axes - set(mesh.mesh_dim_names))
    coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    local = torch.empty(layout.local_shape(shape, mesh, coordinate), dtype=dtype, device=_device(param))
    return _torch.wrap(local, _torch.spec(mesh, layout.placements(mesh), shape, dtype))
