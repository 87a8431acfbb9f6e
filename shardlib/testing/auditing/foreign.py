"""Calls of code that knows nothing of shardlib: what its parameters are given, and what it may not return."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan
from shardlib.errors import InputError, ShardlibError, nearest
from shardlib.testing.auditing.hosts import Host, host_of

__all__ = [
    "RaisedAlone",
    "call_shard",
    "check_shard",
    "first_line",
    "modules_of",
    "plan_of",
    "save_checkpoint",
    "wants",
]

_MESHES = ("mesh", "device_mesh", "world_mesh")
_FOLDERS = ("folder", "path", "checkpoint", "model_path", "checkpoint_path", "pretrained")
_MODELS = ("model", "module", "net")


class RaisedAlone(Exception):
    """An exception of one rank alone: the others go on, and wait for it in vain."""


def wants(shard: Callable[..., Any]) -> dict[str, str]:
    """Return what each parameter of `shard` is given: "model", "mesh" or "folder".

    >>> wants(lambda model, mesh: model)
    {'model': 'model', 'mesh': 'mesh'}
    >>> wants(lambda folder: folder)
    {'folder': 'folder'}

    Raises:
        InputError: a parameter without a default of which nothing is known.
    """
    found: dict[str, str] = {}
    for parameter in inspect.signature(shard).parameters.values():
        name, optional = parameter.name, parameter.default is not parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in _MESHES:
            found[name] = "mesh"
        elif name in _FOLDERS:
            found[name] = "folder"
        elif name in _MODELS or (not found and not optional):
            found[name] = "model"
        elif not optional:
            raise InputError(
                f'shard= takes "{name}", of which an audit knows nothing.{nearest(name, [*_MESHES, *_FOLDERS])} It '
                "gives the model to the first parameter, a DeviceMesh to `mesh`, and the folder of a checkpoint to "
                "`folder`; give others a default."
            )
    return found


def check_shard(shard: Any) -> None:
    """Check that `shard` can be called.

    Raises:
        InputError: it cannot, or takes neither a model nor a folder.
    """
    if not callable(shard) or isinstance(shard, nn.Module):
        raise InputError(f"audit() was given shard={type(shard).__name__}; give a function (model, mesh) -> model.")
    if not {"model", "folder"} & set(wants(shard).values()):
        raise InputError(
            "shard= takes neither a model nor the folder of a checkpoint. Let its first parameter be the model, or "
            "call one `folder`."
        )


def save_checkpoint(model: nn.Module, folder: Path) -> None:
    """Save a model on one device into a folder as its users would: by save_pretrained where it has one."""
    folder.mkdir(exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        torch.save(model.state_dict(), folder / "model.pt")


def call_shard(shard: Callable[..., Any], model: nn.Module, mesh: MeshShape, folder: Path) -> Host:
    """Call `shard`, and return the host of what it returns."""
    arguments: dict[str, Any] = {}
    for name, what in wants(shard).items():
        match what:
            case "model":
                arguments[name] = model
            case "mesh":
                arguments[name] = make_mesh(mesh)
            case _:
                arguments[name] = str(folder)
    made = shard(**arguments)
    if made is None:
        raise InputError(
            "shard= returned nothing; it has to return the sharded model, also where it changes it in place."
        )
    return host_of(made)


def first_line(error: BaseException) -> str:
    """Return an exception's type, the first line of its message, and the user's line that led there."""
    if isinstance(error, RaisedAlone):
        return str(error)
    lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    own = next((f for f in reversed(frames) if "shardlib" not in Path(f.filename).parts), None)
    where = f" ({Path(own.filename).name}, line {own.lineno})" if own else ""
    return f"{type(error).__name__}: {text}{where}"


def modules_of(error: BaseException) -> list[nn.Module]:
    """Return the modules whose methods an exception came through."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return [owner for frame in frames if isinstance(owner := frame.f_locals.get("self"), nn.Module)]


def plan_of(model: nn.Module, mesh: MeshShape) -> Plan | None:
    """Return the plan of a sharded model; None where its DTensors have meshes of other axes."""
    try:
        return Plan.of(model, mesh)
    except ShardlibError:
        return None
