"""Correct results for every op on DTensors: by shardlib's sharding rules, or else by gathering the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlib.engine._torch import (
    DTensorSpec,
    Op,
    OpInfo,
    backward_id,
    clear_propagation_cache,
    holding_patches,
    intercept_data,
    intercept_propagation,
    intercept_reads,
    intercept_redistribution,
    move_handlers,
    patch,
    replace_handler,
    replace_kernels,
    restore_handlers,
    unpatch,
)
from shardlib.engine.ops import _rules
from shardlib.engine.ops._dispatch import drawing_by, drawn, forget_decisions, forget_statics, policy, remember_statics
from shardlib.engine.ops._foreach import UNSCALE, unscale
from shardlib.engine.ops._gather import GatheredOp, ShardlibGatherWarning, record
from shardlib.engine.ops._operands import is_fused_beside_others, redistributed
from shardlib.engine.ops._rows import P, R, S, row, rule, ruled_ops
from shardlib.engine.ops._stored import mean_of_gradient, refuse_local_tensors, written_whole
from shardlib.engine.ops.redistribute import assign_data, to_full_tensor
from shardlib.engine.ranks.lost import naming_lost_ranks_in_operations

__all__ = [
    "GatheredOp",
    "P",
    "R",
    "S",
    "ShardlibGatherWarning",
    "disable",
    "drawing_by",
    "drawn",
    "enable",
    "enabled",
    "record",
    "restored",
    "row",
    "rule",
]

assert _rules
_MESHES: set[DeviceMesh] = set()
_STORED: set[DeviceMesh] = set()  # meshes on which parameters are stored in shards over data axes
_HANDLED = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.argmin.default,
    torch.ops.aten.argmax.default,
)


def enable(mesh: DeviceMesh, *, stored: bool = False) -> None:
    """Use shardlib's op rules for DTensors on this mesh: every op is sharded by a rule, or its operands are
    all-gathered.

    DTensors on other meshes keep PyTorch's own behaviour. Enabling a mesh twice has no effect.

    Args:
        mesh: the mesh.
        stored: DTensors on it are parameters, gradients and state in shards over data axes. A plain tensor beside them
            may be an activation of this rank's examples, and is refused where it looks like one.
    """
    patch(_install, _install)
    known = _STORED if stored else _MESHES
    if mesh not in known:
        known.add(mesh)
        _forget()


def disable(mesh: DeviceMesh | None = None) -> None:
    """Restore PyTorch's own rules for a mesh (by default for all meshes)."""
    meshes = _MESHES | _STORED if mesh is None else {mesh}
    _MESHES.difference_update(meshes)
    _STORED.difference_update(meshes)
    if not (_MESHES or _STORED):
        unpatch(_install)
    _forget()


@contextmanager
def restored() -> Iterator[None]:
    """Disable after the block the meshes that were enabled inside it."""
    before = _MESHES | _STORED
    with holding_patches():
        try:
            yield
        finally:
            for mesh in (_MESHES | _STORED) - before:
                disable(mesh)


def enabled(mesh: DeviceMesh) -> bool:
    """Return whether a mesh is enabled."""
    return mesh in _MESHES


def _has_rules(mesh: DeviceMesh) -> bool:
    return mesh in _MESHES or mesh in _STORED


@naming_lost_ranks_in_operations
def _redistribute(original: Any, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec, **options: Any) -> Any:
    """Redistribute correctly where PyTorch is wrong: fused splits on several axes, or axes in another order; and a
    gradient of this data rank's examples to shards of the mean over data ranks."""
    if source.mesh in _STORED and backward_id() != -1 and (mean := mean_of_gradient(local, source, target)) is not None:
        return mean
    if _has_rules(source.mesh) and is_fused_beside_others(source, target.placements):
        return redistributed(local, source, target.placements)
    return original(local, source, target, **options)


def _assign_data(original: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not isinstance(tensor, DTensor):
        original(tensor, to_full_tensor(value) if isinstance(value, DTensor) else value)
    elif _has_rules(tensor.device_mesh):
        assign_data(tensor, value)
    else:
        original(tensor, value)


def _forget() -> None:
    clear_propagation_cache()
    forget_decisions()


def _install() -> Callable[[], None]:
    """Have DTensor ask our rules; return an undo function."""
    # DTensor calls custom handlers before its sharding cache, for any mesh: replaced handlers are called after it.
    handlers = move_handlers(_HANDLED)

    def propagate(original: Any, op: Op, args: Any, kwargs: Any, info: OpInfo, try_cache: bool) -> Any:
        mesh = info.compute_mesh
        if mesh in _STORED:
            if (result := written_whole(op, args, kwargs)) is not NotImplemented:
                return result
            refuse_local_tensors(op, args)
        if _has_rules(mesh):
            return policy(op, args, kwargs, info)
        if op in handlers:
            return handlers[op](op, args, kwargs)
        return original(op, args, kwargs, info, try_cache)

    stack = ExitStack()
    stack.callback(_forget)
    for undo in (
        intercept_propagation(propagate),
        intercept_redistribution(_redistribute),
        intercept_data(_assign_data),
        intercept_reads(to_full_tensor),
        replace_handler(UNSCALE, unscale),
        _replace_composites(),
        partial(restore_handlers, handlers),
    ):
        stack.callback(undo)
    for op in ruled_ops():
        remember_statics(op)
    stack.callback(forget_statics)
    stack.callback(_MESHES.clear)
    stack.callback(_STORED.clear)
    return stack.close


def _replace_composites() -> Callable[[], None]:
    """Replace kernels of composite ops that fail before DTensor's dispatch; return an undo function.

    One reads the data pointer of a tensor, which a DTensor does not have; others do not write to an `out=` that is not
    a plain tensor.
    """
    kernels: dict[str, Callable[..., Any]] = {"tensor_split.tensor_indices_or_sections": _tensor_split}
    for overload, functional in _RANKS.items():
        kernels[f"linalg_matrix_rank.{overload}"] = _writing(getattr(torch.ops.aten.linalg_matrix_rank, functional))
    keys = [f"Autograd{device}" for device in ("CPU", "CUDA")]
    return replace_kernels({(name, key): kernel for name, kernel in kernels.items() for key in keys})


_RANKS = {
    "out": "default",
    "atol_rtol_tensor_out": "atol_rtol_tensor",
    "atol_rtol_float_out": "atol_rtol_float",
    "out_tol_tensor": "tol_tensor",
}


def _writing(functional: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make the `out=` variant of a functional op."""

    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found = functional(*args, **kwargs)
        if out.shape != found.shape:
            out.resize_(found.shape)
        return out.copy_(found)

    return kernel


def _tensor_split(x: torch.Tensor, sections: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Split at indices, or into a number of sections, given as a tensor."""
    return x.tensor_split(int(sections) if sections.ndim == 0 else [int(index) for index in sections.unbind()], dim)
