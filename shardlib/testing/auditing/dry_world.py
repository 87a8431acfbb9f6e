"""A world of fake ranks in which foreign code runs as it stands, whatever devices and process groups it asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from shardlib._mesh_shape import MeshShape
from shardlib.engine import _torch
from shardlib.testing.auditing.accelerators import answers

__all__ = ["foreign_world"]

_ACCELERATORS = ("cuda", "xpu", "hpu", "npu", "mps")
_NUMBERED = (*_ACCELERATORS, "cpu")  # fake tensors on "cpu" and "cpu:0" do not meet
_MANY_CHUNKS = 16


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what is made for an accelerator or moved to one.

    While `sharding`, chunks of equal size are one tensor, and so are empty ones. `fully_shard` cuts each parameter into
    as many as there are ranks and keeps its own; thousands of fake tensors each would take minutes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharding = True
        self._empty: dict[Any, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if self.sharding and func is torch.Tensor.new_empty and args[1:] == (0,) and not kwargs:
            key = args[0].dtype, args[0].device
            if key not in self._empty:
                self._empty[key] = func(*args)
            return self._empty[key]
        if func is torch.Tensor.to and _torch.is_fake_tensor(args[0]):
            args = tuple(map(_not_meta, args))
        args, kwargs = tuple(map(_on_cpu, args)), {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if self.sharding and func in (torch.chunk, torch.Tensor.chunk) and _is_many(*args[1:2], **kwargs):
            return _equal_chunks(func, *args, **kwargs)
        return func(*args, **kwargs)


def _not_meta(value: Any) -> Any:
    """Return the CPU for meta: a fake tensor takes no memory either, and may not become one on meta in its place."""
    is_meta = value == "meta" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "meta"
    return "cpu" if is_meta else value


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type in _NUMBERED:
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] in _NUMBERED:
        return "cpu"
    return value


def _is_many(chunks: Any = 0, **kwargs: Any) -> bool:
    return int(kwargs.get("chunks", chunks)) > _MANY_CHUNKS


def _equal_chunks(func: Any, tensor: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return the chunks of a tensor, of which all but a smaller last one are the same object."""
    size = -(-tensor.shape[dim] // chunks) if tensor.ndim else 0
    if not size or (tensor.requires_grad and torch.is_grad_enabled()):
        return tuple(func(tensor, chunks, dim))
    whole, rest = divmod(tensor.shape[dim], size)
    equal = (tensor.narrow(dim, 0, size),) * whole
    return (*equal, tensor.narrow(dim, whole * size, rest)) if rest else equal


@contextmanager
def foreign_world(shape: MeshShape, rank: int, notes: list[str]) -> Iterator[tuple[DeviceMesh, Any]]:
    """Be one rank of a fake world; give its mesh, and the mode that is told when sharding is over.

    Inside the block process groups are those of the world, whichever back end is asked for, every device is the CPU,
    and nothing is compiled. All of it is undone at its end.
    """
    mode = _OnCpu()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.callback(torch.set_default_device, torch.get_default_device() if _has_default() else None)
        mesh = stack.enter_context(_torch.fake_world(dict(shape.items()), "cpu", rank))
        stack.enter_context(_torch.foreign_code("cpu"))
        stack.enter_context(mock.patch.dict(os.environ, _environment(shape, rank)))
        for owner, name, value in _replaced(notes):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mode)
        yield mesh, mode


def _has_default() -> bool:
    """Return whether a default device was chosen."""
    return torch.get_default_device().type != "cpu"


def _environment(shape: MeshShape, rank: int) -> Mapping[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": shape.world_size, "LOCAL_WORLD_SIZE": 1}
    return {**{name: str(value) for name, value in ranks.items()}, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def _replaced(notes: list[str]) -> list[tuple[Any, str, Callable[..., Any]]]:
    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def eager(model: Any = None, **_kwargs: Any) -> Any:
        if (note := "torch.compile was left out: the step ran eagerly.") not in notes:
            notes.append(note)
        return model if model is not None else lambda function: function

    def compile_module(self: nn.Module, *_args: Any, **_kwargs: Any) -> None:
        eager(self)

    swap = torch.utils.swap_tensors

    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        if not _torch.is_fake_tensor(one):
            swap(one, other)
        elif one is not other:  # `Module.to` among others; torch refuses to swap fake tensors, to which modes refer
            one.data = other

    return [
        *answers(),
        (torch.utils, "swap_tensors", swap_tensors),
        (dist, "init_process_group", nothing),
        (torch, "compile", eager),
        (nn.Module, "compile", compile_module),
    ]
