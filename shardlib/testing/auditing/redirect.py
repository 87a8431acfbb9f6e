"""Runs code that was written for accelerators on CPU ranks over gloo, in float64 and without dropout, and notes what it
changed."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

from shardlib.engine._torch import TorchDispatchMode
from shardlib.testing.auditing.accelerators import answers

__all__ = ["ACCELERATOR", "BACKENDS", "FLOATS", "Collectives", "Original", "Redirected", "redirected"]

M = TypeVar("M", bound=nn.Module)

ACCELERATOR = re.compile(r"(cuda|hip|xpu|npu|hpu|mps|gpu)(:\d+)?")
BACKENDS = re.compile(r"nccl|rccl|xccl|hccl|cpu:gloo,cuda:nccl")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CASTS: dict[Any, str] = {torch.Tensor.half: "float16", torch.Tensor.bfloat16: "bfloat16", torch.Tensor.float: ""}
_MOVES = {torch.Tensor.cuda, torch.Tensor.xpu}
_DROPS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
_BY_NAME = frozenset({*_CASTS, *_MOVES, *_DROPS, torch.device, torch.Tensor.to, torch.Tensor.backward})
_BY_ARGUMENT = frozenset({torch.dtype, torch.device})


class Redirected(TorchFunctionMode):
    """Inside the block, torch functions that are asked for an accelerator use the CPU, those that are asked for a
    coarser dtype make float64, and dropout leaves its input as it is.

    Attributes:
        notes: what was changed, a sentence each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        self.notes.setdefault(text)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _BY_NAME:
            if not _BY_ARGUMENT.isdisjoint(map(type, args)):
                args = tuple(map(self._argument, args))
            if kwargs:
                return func(*args, **{name: self._keyword(name, value) for name, value in kwargs.items()})
            return func(*args)
        kwargs = kwargs or {}
        if func in _CASTS:
            self._cast(_CASTS[func])
            return torch.Tensor.double(*args)
        if func in _MOVES:
            self.note("cuda: tensors stay on the CPU")
            return args[0]
        if func in _DROPS:
            return self._undropped(func, args, kwargs)
        if func is torch.Tensor.backward:
            again = args[0].numel() == 1 and kwargs["inputs"] is None
            return self._backward(args[0], **kwargs) if again else func(*args, **kwargs)
        if func is torch.device:
            made = func(*args, **kwargs)
            return made if _is_torch(inspect.currentframe()) else self._device(made)
        args = (args[0], *(self._device(self._argument(arg)) for arg in args[1:]))
        return func(*args, **{name: self._keyword(name, value) for name, value in kwargs.items()})

    def _keyword(self, name: str, value: Any) -> Any:
        if name == "device":
            return self._device(value)
        if name == "dropout_p" and value:
            self._note_dropout()
            return 0.0
        return self._argument(value)

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.dtype:
            if value in FLOATS:
                self._cast("" if value is torch.float32 else str(value).removeprefix("torch."))
                return torch.float64
        elif kind is torch.device:
            return self._device(value)
        return value

    def _device(self, value: Any) -> Any:
        """Return the CPU for an accelerator, for its name or its number."""
        kind = type(value)
        named = kind is str and ACCELERATOR.fullmatch(value)
        if kind is int or named or (kind is torch.device and value.type not in ("cpu", "meta")):
            self.note("cuda: tensors stay on the CPU")
            return torch.device("cpu")
        return value

    def _cast(self, dtype: str) -> None:
        if dtype:  # float32 is asked for by many models, in norms and losses; it says nothing of how they are trained
            self.note(f"{dtype}: everything is computed in float64")

    def _backward(self, loss: torch.Tensor, gradient: Any, inputs: Any, **kwargs: Any) -> None:
        """Run a backward pass inside the block, where checkpointing computes again what it computed there.

        No mode is in force while a function that it was called for runs; an edge in the place of the loss calls none.
        """
        gradient = torch.ones_like(loss) if gradient is None else gradient
        edge = get_gradient_edge(loss)
        with self:
            torch.autograd.backward(edge, gradient, **kwargs)

    def undropped_model(self, model: M) -> M:
        """Set the dropout of modules to zero that hand it on to kernels."""
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout:
                module.dropout = 0.0
                self._note_dropout()
        return model

    def _undropped(self, func: Any, args: Any, kwargs: Any) -> Any:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        if p and training:
            self._note_dropout()
        kwargs = {name: value for name, value in kwargs.items() if name not in ("p", "training")}
        return func(args[0], 0.0, True, *args[3:], **kwargs)

    def _note_dropout(self) -> None:
        self.note("dropout is off: ranks that draw other masks than one device are no mistake of the sharding")


class Collectives(TorchDispatchMode):
    """Inside the block, `names` has the collectives that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace in ("c10d", "_c10d_functional"):
            self.names.append(str(op).partition(".")[2].partition(".")[0])
        return op(*args, **(kwargs or {}))


def _is_torch(current: FrameType | None) -> bool:
    """Return whether code of torch called a frame: it names accelerators that it does not use."""
    frame = None if current is None else current.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


@contextmanager
def redirected() -> Iterator[Redirected]:
    """Redirect everything inside the block.

    Modules that are imported inside may take functions of torch over by name: what they take works as the original
    outside of the block.
    """
    mode = Redirected()
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        for owner, name, make in _REPLACED:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name), mode)))
        for owner, name, answer in answers():
            stack.enter_context(mock.patch.object(owner, name, answer))
        # Without it, Accelerate does not see the other ranks of a machine that has no accelerator.
        stack.enter_context(mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true", DS_ACCELERATOR="cpu"))
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, default)
        torch.compiler.set_stance("force_eager")
        stack.callback(torch.compiler.set_stance, "default")
        stack.enter_context(mode)
        yield mode


Original = Callable[..., Any]


def _init_process_group(original: Original, mode: Redirected) -> Original:
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original(*args, **kwargs)
        elif backend := _backend(args, kwargs):
            mode.note(f"{backend}: ranks meet over gloo")

    return init_process_group


def _new_group(original: Original, mode: Redirected) -> Original:
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if BACKENDS.search(str(kwargs.get("backend") or "")):
            kwargs["backend"] = None
        return original(*args, **kwargs)

    return new_group


def _backend(args: Any, kwargs: Any) -> str:
    found = BACKENDS.search(str(args[0] if args else kwargs.get("backend") or ""))
    return found[0] if found else ""


def _mesh_init(original: Original, mode: Redirected) -> Original:
    def __init__(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        if ACCELERATOR.fullmatch(device_type):
            mode.note("cuda: meshes are of the CPU")
            device_type = "cpu"
        original(self, device_type, *args, **kwargs)

    return __init__


def _policy_init(original: Original, mode: Redirected) -> Original:
    def __init__(self: MixedPrecisionPolicy, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, name) is not None:
                mode.note("MixedPrecisionPolicy: everything is computed in float64")
                object.__setattr__(self, name, None)

    return __init__


def _autocast_init(original: Original, mode: Redirected) -> Original:
    def __init__(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        if not _is_torch(inspect.currentframe()):  # checkpointing restores the state of autocast
            mode.note("autocast: everything is computed in float64")
        original(self, "cpu", enabled=False)

    return __init__


_REPLACED: tuple[tuple[Any, str, Callable[[Original, Redirected], Original]], ...] = (
    (dist, "init_process_group", _init_process_group),
    (dist.distributed_c10d, "init_process_group", _init_process_group),
    (dist, "new_group", _new_group),
    (DeviceMesh, "__init__", _mesh_init),
    (MixedPrecisionPolicy, "__init__", _policy_init),
    (torch.autocast, "__init__", _autocast_init),
)
