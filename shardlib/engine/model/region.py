"""DTensor regions: conversion between plain tensors and DTensors at module inputs and outputs.

`choose_regions.py` finds the modules that are regions. A region converts

    plain, the same on all model ranks  ->  DTensor, replicated      (its inputs)
    DTensor of any layout               ->  plain, full tensor       (its outputs)

and backward is the transpose: the gradient of an input is a full gradient, summed over the model axes where consumers
were sharded. Where a region has several outputs, those after the first are gathered when read (`LazyFullTensor`).
Integer and boolean inputs stay plain: they have no gradient, and a plain tensor inside counts as replicated.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlib.engine import _torch
from shardlib.engine._torch import pytree
from shardlib.engine.data.params import local_of
from shardlib.engine.data.units import IN_BUFFER, read_sentinel
from shardlib.engine.model.lazy_full_tensor import LazyFullTensor
from shardlib.engine.ops._operands import redistributed
from shardlib.engine.ops.redistribute import to_full_tensor

__all__ = ["install_region", "unwrap_dtensor", "wrap_replicated"]


def wrap_replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Wrap a plain tensor that does not enter a region through its module's arguments; integers stay plain."""
    if isinstance(tensor, DTensor) or not tensor.is_floating_point():
        return tensor
    return _WrapReplicated.apply(tensor, mesh)


def unwrap_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """Convert an output of the root to a plain tensor.

    It is a `LazyFullTensor` that was not read, or a DTensor because a sharded parameter was read outside of its region,
    as in `F.linear(x, self.embed.weight)`.
    """
    return _UnwrapDTensor.apply(tensor, False, True) if isinstance(tensor, DTensor) else tensor.view_as(tensor)


def install_region(module: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Let a module compute on DTensors over `mesh`, with plain tensors as inputs and outputs."""
    enter, leave, after_all = _hooks(mesh)
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, prepend=True, with_kwargs=True),
        module.register_forward_hook(after_all, always_call=True),
    ]


@_torch.cached_by_mesh
def _hooks(mesh: DeviceMesh) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the hooks that all regions of a mesh share, so that blocks of one class share a compiled graph."""
    replicated = (Replicate(),) * mesh.ndim
    opened: dict[nn.Module, list[_Containers]] = {}  # of the regions that run

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        if torch.compiler.is_compiling():
            return DTensor.from_local(tensor, mesh, replicated, run_check=False)
        passed = _wrap_replicated(tensor, mesh)
        if torch.is_grad_enabled():
            setattr(passed, _GIVEN, tensor)
        return passed

    def unwrap(tensor: torch.Tensor, others: Any, lazy: bool = False) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if torch.compiler.is_compiling():
            return tensor.full_tensor(grad_placements=replicated)
        found: Any = read_sentinel(tensor)
        if IN_BUFFER in vars(found):  # the module returns a weight
            found = found.clone()
        return _unwrap_dtensor(found, lazy, _shares_memory(found, others))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_compiling():
            _torch.set_implicit_replication(True)  # `generate` calls an encoder without the root
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return (wrap(args[0]),), kwargs
        if torch.compiler.is_compiling():
            return _torch.map_tensors(wrap, (args, kwargs))  # no block that is given containers is compiled
        containers = _Containers()
        passed = containers.pass_in(wrap, args), {name: containers.pass_in(wrap, one) for name, one in kwargs.items()}
        if containers.given:
            opened.setdefault(module, []).append(containers)
        return passed

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given: tuple[Any, ...] = ()
        if not torch.compiler.is_compiling():
            _take_over_writes(args, kwargs)
            given = close(module)
        if isinstance(output, torch.Tensor):
            return unwrap(output, (args, kwargs))
        is_given = (lambda value: any(value is one for one in given)) if given else None
        leaves, spec = pytree.tree_flatten(output, is_given)
        split = [i for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
        plain = {i: unwrap(leaves[i], (args, kwargs, leaves[:i], leaves[i + 1 :]), i != split[0]) for i in split}
        return pytree.tree_unflatten([plain.get(i, leaf) for i, leaf in enumerate(leaves)], spec)

    def close(module: nn.Module) -> tuple[Any, ...]:
        """Give containers back plain tensors; also after a forward that has raised."""
        if not opened.get(module):
            return ()
        containers = opened[module].pop()
        if not opened[module]:
            del opened[module]
        containers.take_out(lambda tensor: unwrap(tensor, ()))
        return tuple(containers.given.values())

    def after_all(module: nn.Module, _args: Any, _output: Any) -> None:
        close(module)

    return enter, leave, after_all


class _Containers:
    """The lists and dicts that a region is given. While it runs they hold DTensors, so that the region may store
    others there, as caches of keys and values are filled.

    Attributes:
        given: the containers, by id.
    """

    def __init__(self) -> None:
        self.given: dict[int, Any] = {}
        self._plain: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor inside of the region, by its id

    def pass_in(self, wrap: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            passed = wrap(value)
            self._plain[id(passed)] = passed, value
            return passed
        return self._change(functools.partial(self.pass_in, wrap), value, self.given)

    def take_out(self, unwrap: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put plain tensors in the place of DTensors; for those that were passed in, the ones that were given."""
        seen: dict[int, Any] = {}

        def out(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return self._change(out, value, seen)
            if id(value) not in self._plain:
                self._plain[id(value)] = value, unwrap(value)
            return self._plain[id(value)][1]

        for one in self.given.values():
            out(one)

    def _change(self, change: Callable[[Any], Any], value: Any, seen: dict[int, Any]) -> Any:
        """Change what containers hold, in place where they can be written to."""
        if not isinstance(value, list | dict | deque):
            return _torch.map_elements(change, value)
        if id(value) in seen:
            return value
        seen[id(value)] = value
        for key, before in [*(value.items() if isinstance(value, dict) else enumerate(value))]:
            after = change(before)
            if after is not before:
                value[key] = after
        return value


def _take_over_writes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let autograd know what a region has written into the tensors that it was given: their memory is the same."""
    for passed in _torch.leaves_of(args, kwargs):
        if isinstance(passed, DTensor):
            given = passed.__dict__.pop(_GIVEN, None)
            if given is not None and passed._version and passed.requires_grad:
                _Written.apply(given, passed)


_GIVEN = "_shardlib_given"  # the attribute of a DTensor in a region that has the plain tensor


def _shares_memory(tensor: DTensor, others: Any) -> bool:
    """Return whether a replicated output shares memory with another tensor that is visible outside of the region."""
    if not all(p.is_replicate() for p in tensor.placements):
        return False  # it will be gathered
    if tensor.is_leaf and tensor.requires_grad:
        return True
    local = _torch.local_of(tensor)
    given = (other for other in _torch.leaves_of(others) if isinstance(other, torch.Tensor))
    return any(_torch.share_memory(local, local_of(other)) for other in given)


class _WrapReplicated(torch.autograd.Function):
    """`DTensor.from_local(x, mesh, Replicate)` at a fraction of its cost; its gradient is a full gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return _torch.wrap(x.detach(), _torch.replicated_spec(x, mesh))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        if grad is None:
            return None, None
        if torch.is_grad_enabled() and isinstance(grad, DTensor):  # create_graph=True
            return _UnwrapDTensor.apply(grad, False, True), None
        return to_full_tensor(grad), None


class _Written(torch.autograd.Function):
    """Give a plain tensor the autograd history of the DTensor over its memory, into which a region has written."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, passed: DTensor) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.mesh = passed.device_mesh
        ctx.mark_dirty(given)
        return given

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:  # type: ignore[override]
        if grad is None:
            return None, None
        if torch.is_grad_enabled():  # create_graph=True
            return None, grad if isinstance(grad, DTensor) else _WrapReplicated.apply(grad, ctx.mesh)
        full = to_full_tensor(grad)
        return None, _torch.wrap(full, _torch.replicated_spec(full, ctx.mesh))


class _UnwrapDTensor(torch.autograd.Function):
    """`x.full_tensor()`; its gradient, the same on all model ranks, is returned in the layout that `x` had.

    The result may be written in place, as by `y += residual`: to autograd it is not a view. Where another visible
    tensor shares its memory it is a view, and torch refuses the write: on one device the values and gradients of the
    other tensor would change too, which autograd does not track through this function.

    Where a module reads a sharded parameter of another module, DTensors occur outside of regions, and the gradient may
    be one.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, lazy: bool, shared: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.mesh = x.device_mesh
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        if all(p.is_replicate() for p in x.placements):
            local = _torch.local_of(x)
            return local.view_as(local) if shared else local.detach()
        return (
            LazyFullTensor(_torch.wrap(_torch.local_of(x), _torch.spec_of(x))) if lazy else to_full_tensor(x).detach()
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:  # type: ignore[override]
        if grad is None:
            return None, None, None
        if torch.is_grad_enabled():
            grad = grad if isinstance(grad, DTensor) else _WrapReplicated.apply(grad, ctx.mesh)
            return grad.redistribute(placements=ctx.placements), None, None
        grad = to_full_tensor(grad)
        replicated = _torch.replicated_spec(grad, ctx.mesh)
        local = redistributed(grad, replicated, ctx.placements)
        return _torch.wrap(local, _torch.spec_with(replicated, ctx.placements)), None, None


_wrap_replicated, _unwrap_dtensor = _torch.direct_apply(_WrapReplicated), _torch.direct_apply(_UnwrapDTensor)
