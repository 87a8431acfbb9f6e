"""Calls of code that knows nothing of shardlib: what its parameters are given, and what it may not return."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan
from shardlib.engine import _torch
from shardlib.errors import InputError, ShardlibError, nearest
from shardlib.testing.auditing.hosts import Host, host_of

__all__ = [
    "ChangedCode",
    "RaisedAlone",
    "call_shard",
    "check_meshes",
    "check_shard",
    "first_line",
    "modules_of",
    "not_on_cpus",
    "plan_of",
    "save_checkpoint",
    "wants",
]

_NOT_ON_CPUS = {
    "SyncBatchNorm": (
        "SyncBatchNorm has no kernel for CPUs. Audit the model without convert_sync_batchnorm; an audit on ranks then "
        "says where the statistics of each rank's own rows matter."
    ),
    "flash_attention_for_cpu.default does not have a sharding strategy": (
        "torch's context_parallel has no attention for CPUs. Audit the model without it, or with ring attention of "
        "your own, in products and a softmax."
    ),
}
_MESHES = ("mesh", "device_mesh", "world_mesh")
_FOLDERS = ("folder", "path", "checkpoint", "model_path", "checkpoint_path", "pretrained")
_MODELS = ("model", "module", "net")


class ChangedCode(InputError):
    """Refusal of code that has changed what one device computes in this process, too."""


class RaisedAlone(Exception):
    """An exception of one rank alone: the others go on, and wait for it in vain."""


def not_on_cpus(said: str) -> str:
    """Return what there is to say where an error is one of CPUs alone; else an empty text."""
    return next((text for pattern, text in _NOT_ON_CPUS.items() if pattern in said), "")


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
        known = name.lstrip("_")  # of a parameter that is not used
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if known in _MESHES:
            found[name] = "mesh"
        elif known in _FOLDERS:
            found[name] = "folder"
        elif known in _MODELS or (not found and not optional):
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
        raise InputError(f"shard= was given as a {type(shard).__name__}; give a function (model, mesh) -> model.")
    if not {"model", "folder"} & set(wants(shard).values()):
        raise InputError(
            "shard= takes neither a model nor the folder of a checkpoint. Let its first parameter be the model, or "
            "call one `folder`."
        )


def check_meshes(tensors: Mapping[str, torch.Tensor], mesh: MeshShape) -> None:
    """Check that each axis of DTensors' meshes has the ranks of the axis of that name of the audit's mesh.

    Raises:
        InputError: it has others: `shard` numbers the ranks in another order.
    """
    rank = dist.get_rank()
    for name, tensor in tensors.items():
        own = tensor.device_mesh if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() else None
        for axis in (own.mesh_dim_names or ()) if own is not None else ():
            if own is None or axis not in mesh:
                continue
            found, expected = sorted(dist.get_process_group_ranks(own.get_group(axis))), _ranks_along(mesh, axis, rank)
            if found != expected:
                root = _torch.root_mesh(own)
                order = ",".join(f"{a}={n}" for a, n in zip(root.mesh_dim_names or (), root.shape, strict=False))
                raise InputError(
                    f'On mesh "{mesh}" rank {rank} is on {axis} with ranks {_first(expected)}; the mesh of "{name}", '
                    f'"{order}", has it with {_first(found)}. Give the axes in the order of the mesh that shard= '
                    f'makes: "{order}".'
                )


@functools.cache
def _ranks_along(mesh: MeshShape, axis: str, rank: int) -> list[int]:
    here = mesh.coordinate(rank)
    return sorted(each for each in mesh.ranks if {**mesh.coordinate(each), axis: here[axis]} == here)


def _first(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + ", ..." * (len(ranks) > 4)


def save_checkpoint(model: nn.Module, folder: Path) -> None:
    """Save a model on one device into a folder as its users would: by save_pretrained where it has one."""
    folder.mkdir(exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        torch.save(model.state_dict(), folder / "model.pt")


def call_shard(shard: Callable[..., Any], model: nn.Module, mesh: MeshShape, folder: Path) -> Host:
    """Call `shard`, and return the host of what it returns."""
    make = {"model": lambda: model, "mesh": lambda: make_mesh(mesh), "folder": lambda: str(folder)}
    made = shard(**{name: make[what]() for name, what in wants(shard).items()})
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
