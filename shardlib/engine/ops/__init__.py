"""Every op right on DTensors: by a sharding rule of ours, or else by gathering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardlib.engine._torch import (
    DTensorSpec,
    Op,
    OpInfo,
    clear_propagation_cache,
    intercept_propagation,
    intercept_redistribution,
    move_handlers,
    restore_handlers,
)
from shardlib.engine.ops import _rules
from shardlib.engine.ops._composite import install as replace_composites
from shardlib.engine.ops._dispatch import drawing_by, forget_decisions, policy, remember_statics
from shardlib.engine.ops._operands import is_fused_beside_others, redistributed
from shardlib.engine.ops._record import GatheredOp, ShardlibGatherWarning, record
from shardlib.engine.ops._rows import P, R, S, row, rule, ruled_ops

__all__ = [
    "GatheredOp",
    "P",
    "R",
    "S",
    "ShardlibGatherWarning",
    "disable",
    "drawing_by",
    "enable",
    "enabled",
    "read_global_values",
    "record",
    "restored",
    "row",
    "rule",
]

assert _rules
_MESHES: set[DeviceMesh] = set()
_READ: set[DeviceMesh] = set()  # on which only reading one value is ours
_UNDO: list[Callable[[], Any]] = []
_HANDLED = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.argmin.default,
    torch.ops.aten.argmax.default,
)


def enable(mesh: DeviceMesh) -> None:
    """From now on every op on DTensors of this mesh is right: sharded by our rules, or gathered.

    DTensors on other meshes keep PyTorch's own behaviour. Enabling a mesh twice does nothing.
    """
    if mesh in _MESHES:
        return
    if not (_MESHES or _READ):
        _install()
    _MESHES.add(mesh)
    _forget()


def read_global_values(mesh: DeviceMesh) -> None:
    """From now on `float(x)` and `x.item()` of a DTensor of this mesh give the global value, as of a sum of all ranks'.

    PyTorch's own give what this rank has. All other ops stay as they are. All ranks of the mesh read, or none.
    """
    if not (_MESHES or _READ):
        _install()
    _READ.add(mesh)
    _forget()


def disable(mesh: DeviceMesh | None = None) -> None:
    """Give a mesh (all meshes) back to PyTorch's own rules."""
    meshes = set(_MESHES) if mesh is None else {mesh}
    _MESHES.difference_update(meshes)
    _READ.difference_update(meshes if mesh is not None else set(_READ))
    if not (_MESHES or _READ):
        _uninstall()
    _forget()


@contextmanager
def restored() -> Iterator[None]:
    """What is enabled inside the block is given back after it; what was enabled before stays so."""
    before = _MESHES | _READ
    try:
        yield
    finally:
        for mesh in (_MESHES | _READ) - before:
            disable(mesh)


def enabled(mesh: DeviceMesh) -> bool:
    """Whether a mesh was given to `enable`."""
    return mesh in _MESHES


def _by_our_own_way(
    original: Any, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, **options: Any
) -> Any:
    """PyTorch's way is wrong for fused splits beside other axes, and for axes in another order than the mesh's."""
    if source.mesh in _MESHES and is_fused_beside_others(source, target.placements):
        return redistributed(local, source, target.placements)
    return original(local, source, target, **options)


def _forget() -> None:
    clear_propagation_cache()
    forget_decisions()


def _install() -> None:
    # Handlers come before the sharding cache and know nothing of meshes: those that we replace move behind it.
    handlers = move_handlers(_HANDLED)

    def ours(original: Any, op: Op, args: Any, kwargs: Any, info: OpInfo, try_cache: bool) -> Any:
        if op is torch.ops.aten._local_scalar_dense.default and info.compute_mesh in _READ:
            return op(args[0].full_tensor())
        if info.compute_mesh in _MESHES:
            return policy(op, args, kwargs, info)
        if op in handlers:
            return handlers[op](op, args, kwargs)
        return original(op, args, kwargs, info, try_cache)

    _UNDO.append(intercept_propagation(ours))
    _UNDO.append(intercept_redistribution(_by_our_own_way))
    _UNDO.append(replace_composites())
    _UNDO.append(lambda: restore_handlers(handlers))
    for op in ruled_ops():
        remember_statics(op)


def _uninstall() -> None:
    while _UNDO:
        _UNDO.pop()()
