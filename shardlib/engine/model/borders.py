"""Module input and output layouts ("borders"): hooks that redistribute activations as the plan says.

There are two kinds. One redistributes a value: a row-parallel product is a partial sum, which is all-reduced or
reduce-scattered here. The other redistributes a gradient: the output of a module with replicated parameters is
replicated, and its consumers that are sharded over a model axis return partial sums; these are reduced once, before the
module's backward. Together they give Megatron's count: four collectives per transformer block and step (Shoeybi et al.,
arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardlib.engine import _torch
from shardlib.engine._torch import _StridedShard
from shardlib.engine.ops._operands import pieces_of
from shardlib.engine.ops.redistribute import redistribute, redistribute_gradient
from shardlib.errors import InputError, LayoutError
from shardlib.layout import Layout

__all__ = ["border_placements", "install_gradient_border", "install_input_border", "install_output_border"]


# Placements are computed in advance, so that a compiled block reads them from a tuple; torch's kernels take 64 dims.
_MAX_DIMS = 64

Hook = Callable[..., Any]


def install_output_border(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> Any:
    """Redistribute the module's first output tensor to `layout`; its gradient returns to the original layout."""
    return module.register_forward_hook(_output_hook(layout, mesh), prepend=True)


def install_input_border(module: nn.Module, layout: Layout, mesh: DeviceMesh) -> Any:
    """Redistribute the module's first floating-point input, positional or by keyword, to `layout`."""
    return module.register_forward_pre_hook(_input_hook(layout, mesh), with_kwargs=True)


def install_gradient_border(module: nn.Module) -> Any:
    """Reduce partial sums in the gradient of the module's output; the output itself is unchanged."""
    return module.register_forward_hook(_gradient_hook, prepend=True)


# Output hooks are prepended: where a module is a region too, its output is redistributed before it becomes plain.
# All modules with the same layout share one hook object, so that blocks of one class share a compiled graph.


@_torch.cached_by_mesh
def _output_hook(layout: Layout, mesh: DeviceMesh) -> Hook:
    lay_out = _laid_out(layout, mesh)
    return lambda _module, _args, output: _map_first(lay_out, output)


@_torch.cached_by_mesh
def _input_hook(layout: Layout, mesh: DeviceMesh) -> Hook:
    lay_out = _laid_out(layout, mesh)
    return lambda _module, args, kwargs: _map_first(lay_out, (args, kwargs))


def _gradient_hook(_module: nn.Module, _args: Any, output: Any) -> Any:
    return _map_first(_reduce_gradient, output)


@_torch.cached_by_mesh
def border_placements(layout: Layout, mesh: DeviceMesh) -> tuple[tuple[Placement, ...] | None, ...]:
    """Return the placements of an activation by its number of dims; None where the layout does not fit."""
    return tuple(_placements(layout, mesh, ndim) for ndim in range(_MAX_DIMS + 1))


def _laid_out(layout: Layout, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    by_ndim = border_placements(layout, mesh)

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        target = by_ndim[tensor.ndim]
        if target is None:
            raise _unfit(layout, mesh, tuple(tensor.shape))
        if tensor.placements == target:
            return tensor
        if torch.compiler.is_compiling():
            return tensor.redistribute(placements=target)
        return _LayOut.apply(tensor, target)

    pieces = tuple({} if target is None else _equal_pieces(target, mesh) for target in by_ndim)

    def checked(tensor: torch.Tensor) -> torch.Tensor:
        _refuse_uneven(tensor, pieces[tensor.ndim], layout, mesh)
        return lay_out(tensor)

    return checked if any(pieces) else lay_out


def _placements(layout: Layout, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...] | None:
    if ... not in layout.dims and len(layout.dims) != ndim:
        return None
    try:
        return tuple(layout.placements(mesh, ndim=ndim))
    except LayoutError:
        return None


def _unfit(layout: Layout, mesh: DeviceMesh, global_shape: tuple[int, ...]) -> InputError:
    try:
        layout.placements(mesh, ndim=len(global_shape))
    except LayoutError as error:
        return InputError(f"{error} It was given to an activation of global shape {global_shape}.")
    raise AssertionError("it fits")


def _equal_pieces(placements: tuple[Placement, ...], mesh: DeviceMesh) -> dict[int, int]:
    """Return dims that are fused, or split over axes in another order than the mesh's, with their number of pieces."""
    found = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            ranks = pieces_of(placement.dim, placements, mesh.shape)
            found[placement.dim] = max(ranks, int(placement.split_factor) * mesh.size(axis))
    return found


def _refuse_uneven(tensor: torch.Tensor, pieces: dict[int, int], layout: Layout, mesh: DeviceMesh) -> None:
    """Refuse uneven activations, as `apply/check.py` does for parameters: their sizes are known only here."""
    for dim, count in pieces.items():
        if tensor.shape[dim] % count:
            raise InputError(
                f'The layout "{layout}" was given to an activation of global shape {tuple(tensor.shape)}: as a fused '
                f"dim, or over axes in another order than the mesh's ({', '.join(mesh.mesh_dim_names or ())}), it "
                f"shards dim {dim}, which {count} does not divide. Give the dim a size that {count} divides, or shard "
                "the unfused dim, over axes in the mesh's order."
            )


def _reduce_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor) or not tensor.requires_grad:
        return tensor
    placements = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
    if torch.compiler.is_compiling():
        return tensor.redistribute(placements=placements)

    def reduce(grad: torch.Tensor) -> torch.Tensor | None:
        # Autograd makes plain gradients too, the same on all ranks, as behind a packed sequence.
        if not isinstance(grad, DTensor) or grad.placements == placements:
            return None
        return redistribute_gradient(grad, placements)

    tensor.register_hook(reduce)
    return tensor


class _LayOut(torch.autograd.Function):
    """`x.redistribute` whose local results have the strides that the spec implies, forward and backward.

    PyTorch's own may return a slice of a larger buffer (with the padding of an uneven gather) under the strides of a
    contiguous tensor; a view of it then fails. The gradient of a partial sum is replicated.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, target: tuple[Placement, ...]) -> DTensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.mesh = x.device_mesh
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        return redistribute(x, target)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[DTensor | None, None]:  # type: ignore[override]
        if grad is None:
            return None, None
        return redistribute_gradient(_torch.as_replicated(grad, ctx.mesh), ctx.placements), None


def _map_first(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Apply `fn` to the first floating-point tensor of a module's output or input; leave all others unchanged."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    pending = [fn]

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return pending.pop()(tensor) if pending and tensor.is_floating_point() else tensor

    return _torch.map_tensors(change, tree)
