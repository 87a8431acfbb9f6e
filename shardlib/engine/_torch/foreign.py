"""Meshes, the reducer of DDP and a look at each DTensor, for other libraries' code in a world of fake ranks."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardlib.engine._torch._private import private
from shardlib.engine._torch.collectives import AsyncTensor
from shardlib.engine._torch.fake import _DryMode, give_fused_splits_real_offsets, is_fake_tensor
from shardlib.engine._torch.patches import holding_patches
from shardlib.engine._torch.trees import leaves_of

private(
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    why="to make meshes in a dry run of code that makes its own, and to say which op has no fake kernel",
    without="such code cannot be audited without ranks",
)
private(
    "torch.distributed.device_mesh.DeviceMesh._rank_map",
    why="to give init_device_mesh the ranks that it numbers among fake tensors",
    without="code that makes a mesh in its forward cannot be audited without ranks",
    optional=True,
)
private(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.utils._python_dispatch._disable_current_modes",
    why="to count no op that DTensor runs to learn a shape",
    without="products would be counted more than once, and with global shapes",
)
private(
    "torch.distributed._verify_params_across_processes",
    "torch.nn.parallel.DistributedDataParallel._pre_forward",
    why="to let DDP reduce gradients that have no values",
    without="a model in DDP cannot be audited without ranks",
)

private(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    why="to find the gradients that fully_shard keeps until a later step, and has not reduced",
    without="a dry audit would not say that they are not summed",
)
private(
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._partial_reduce_output",
    why="to find gradients that fully_shard has scattered, and keeps; both are made in __init__",
    without="a dry audit would not say that they are not summed",
    optional=True,
)

from torch._subclasses.fake_tensor import (
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "bare_tensor",
    "foreign_code",
    "foreign_mode",
    "no_fake_kernel_errors",
    "storage_of",
    "watch_dtensors",
    "withheld_gradients",
]

_METAS = ShardingPropagator._propagate_tensor_meta_non_cached

Seen = Callable[[torch.Tensor, DeviceMesh, Sequence[Any]], object]
"""Is given a local tensor, the mesh and the placements of the DTensor that is made of it, or that it is taken from."""


class _ForeignMode(_DryMode):
    """Leaves tensors with values alone while no other meets them: DDP reads from one which parameters are unused."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in leaves_of(args, kwargs or {}) if isinstance(leaf, torch.Tensor)]
        if (
            not tensors or any(map(is_fake_tensor, tensors)) or "lift_fresh" in func.name()
        ):  # the last by `torch.tensor`
            return super().dispatch(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def foreign_mode() -> Any:
    """Make a mode whose tensors have no values. They meet real ones inside of it and outside."""
    return _ForeignMode(allow_non_fake_inputs=True)


def no_fake_kernel_errors() -> tuple[type[Exception], ...]:
    """Return what fake tensors raise where an op does not say the shape of its result."""
    return (UnsupportedOperatorException, UnsupportedFakeTensorException)


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor that is not a wrapper of others."""
    return bare_tensor(tensor).untyped_storage()


def bare_tensor(tensor: Any) -> torch.Tensor:
    """Return what a collective has written to, of a tensor that waits for it; any other tensor as it is."""
    return tensor.elem if isinstance(tensor, AsyncTensor) else tensor


@contextmanager
def foreign_code(device_type: str) -> Iterator[None]:
    """Let meshes be made on `device_type` whatever is asked for, with and without fake tensors, and let DDP run.

    What fake tensors log of an op that raises is not shown: the exception says it too.
    """
    with ExitStack() as undo, holding_patches():
        log = logging.getLogger("torch._subclasses.fake_tensor")
        undo.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        give_fused_splits_real_offsets()
        for name, method in list(vars(DeviceMesh).items()):
            if (real := _with_values(method)) is not None:
                _swap(undo, DeviceMesh, name, real)
        _swap(undo, DeviceMesh, "__init__", _mesh_on(device_type, DeviceMesh.__init__))
        _swap(undo, dist, "_verify_params_across_processes", lambda *_args, **_kwargs: None)
        _swap(undo, DistributedDataParallel, "__init__", _without_devices(DistributedDataParallel.__init__))
        _swap(undo, ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen(_METAS))
        hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        register, run = DistributedDataParallel.register_comm_hook, DistributedDataParallel._pre_forward
        _swap(undo, DistributedDataParallel, "register_comm_hook", _noting(register, hooked))
        _swap(undo, DistributedDataParallel, "_pre_forward", _with_hook(run, hooked))
        yield


@contextmanager
def watch_dtensors(made: Seen, taken: Seen) -> Iterator[None]:
    """Call `made` for every DTensor that Python code makes of a local tensor, `taken` for each that `to_local` takes.

    Those that C++ makes, the results of ops, are not among them.
    """
    new, to_local = DTensor.__new__, DTensor.to_local

    def watched(cls: Any, local: torch.Tensor, spec: Any, **kwargs: Any) -> Any:
        made(local, spec.mesh, spec.placements)
        return new(cls, local, spec, **kwargs)

    def take(self: DTensor, **kwargs: Any) -> torch.Tensor:
        local = to_local(self, **kwargs)
        taken(local, self.device_mesh, self.placements)
        return local

    with ExitStack() as undo:
        _swap(undo, DTensor, "__new__", staticmethod(watched))
        _swap(undo, DTensor, "to_local", take)
        yield


def withheld_gradients(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Iterate over parameters whose gradients `fully_shard` has not reduced, or not over all axes (2.13.0).

    Beside each are its gradient, or a buffer that it is in, and whether that is scattered already.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                kept = each.unsharded_accumulated_grad if whole is None or whole.grad is None else whole.grad
                if kept is not None:
                    yield each.sharded_param, kept, False
                elif (scattered := getattr(group, "_partial_reduce_output", None)) is not None:
                    yield each.sharded_param, scattered, True


def _swap(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    setattr(owner, name, value)
    undo.callback(setattr, owner, name, before)


def _with_values(method: Any) -> Any:
    """Return a method of a mesh, which is a tensor of ranks, that makes real tensors; None for what is no method."""
    if isinstance(method, property):
        return property(_real(method.fget))
    if isinstance(method, staticmethod | classmethod):
        return type(method)(_real(method.__func__))
    return _real(method) if isinstance(method, types.FunctionType) else None


def _real(function: Any) -> Any:
    @functools.wraps(function)
    def with_values(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return with_values


def _unseen(function: Any) -> Any:
    """Return a function whose ops no mode sees: DTensor runs an op on global shapes before it is run on local ones."""

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return unseen


def _mesh_on(there: str, make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def init(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        ranks: Any = kwargs.get("_rank_map")
        if is_fake_tensor(ranks):  # `init_device_mesh`, which numbers the ranks from 0, was called among fake tensors
            with unset_fake_temporarily():
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
        make(self, there, *args, **kwargs)

    return init


def _without_devices(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        make(self, args[0], **kwargs) if args else make(self, **kwargs)

    return init


def _noting(register: Callable[..., Any], hooked: Any) -> Callable[..., Any]:
    @functools.wraps(register)
    def register_comm_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        hooked.add(self)
        register(self, *args, **kwargs)

    return register_comm_hook


def _with_hook(run: Callable[..., Any], hooked: Any) -> Callable[..., Any]:
    """Reduce each bucket by a hook: what the reducer does itself reads from the work of a real group (2.13.0)."""

    @functools.wraps(run)
    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in hooked:
            self.register_comm_hook(self.process_group, _reduce)
        return run(self, *args, **kwargs)

    return pre_forward


def _reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced = bucket.buffer()
    dist.all_reduce(reduced, group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(reduced)
    return done


_reduce.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})  # DDP asks
