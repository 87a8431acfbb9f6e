"""Runs code that was written for accelerators on CPU ranks over gloo, in float64 and without dropout, and notes what it
changed."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.overrides import TorchFunctionMode

from shardlib.engine._torch import TorchDispatchMode
from shardlib.testing.auditing.accelerators import answers
from shardlib.testing.auditing.hosts import begin_anew, forget_groups

__all__ = ["Collectives", "Redirected", "libraries_redirected", "redirected"]

_ACCELERATOR = re.compile(r"(cuda|hip|xpu|npu|hpu|mps|gpu)(:\d+)?")
_BACKENDS = re.compile(r"nccl|rccl|xccl|hccl|cpu:gloo,cuda:nccl")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
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
            if value in _FLOATS:
                self._cast("" if value is torch.float32 else str(value).removeprefix("torch."))
                return torch.float64
        elif kind is torch.device:
            return self._device(value)
        return value

    def _device(self, value: Any) -> Any:
        """Return the CPU for an accelerator, for its name or its number."""
        kind = type(value)
        named = kind is str and _ACCELERATOR.fullmatch(value)
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


@contextmanager
def libraries_redirected(mode: Redirected, function: Callable[..., Any]) -> Iterator[None]:
    """Redirect what libraries decide by themselves, inside the block: those that are imported by now, and those that
    the file of a function names."""
    with ExitStack() as stack:
        for module, owner, name, make in _OF_LIBRARIES:
            if module in sys.modules or _names(function, module.partition(".")[0]):
                found = getattr(importlib.import_module(module), owner)
                stack.enter_context(mock.patch.object(found, name, make(vars(found)[name], mode)))
        yield


def _names(function: Callable[..., Any], library: str) -> bool:
    """Return whether the file of a function imports a library that is there."""
    while isinstance(function, functools.partial):
        function = function.func
    file = Path(getattr(getattr(function, "__code__", None), "co_filename", ""))
    text = file.read_text(errors="replace") if file.is_file() else ""
    return bool(re.search(rf"^\s*(import|from) {library}\b", text, re.MULTILINE)) and find_spec(library) is not None


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
        if _BACKENDS.search(str(kwargs.get("backend") or "")):
            kwargs["backend"] = None
        return original(*args, **kwargs)

    return new_group


def _backend(args: Any, kwargs: Any) -> str:
    found = _BACKENDS.search(str(args[0] if args else kwargs.get("backend") or ""))
    return found[0] if found else ""


def _mesh_init(original: Original, mode: Redirected) -> Original:
    def __init__(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        if _ACCELERATOR.fullmatch(device_type):
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


def _from_pretrained(original: Any, mode: Redirected) -> Any:
    """Load in float64: threads, in which no mode of torch functions works, read the files."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("dtype", "torch_dtype"):
            asked = kwargs.get(name)
            if (asked if isinstance(asked, torch.dtype) else getattr(torch, str(asked), None)) in _FLOATS:
                mode.note(f"{str(asked).removeprefix('torch.')}: everything is computed in float64")
                kwargs[name] = torch.float64
        return original.__func__(cls, *args, **kwargs)

    return classmethod(from_pretrained)


def _connector_init(original: Original, mode: Redirected) -> Original:
    """Let Fabric's connector choose the CPU and float64."""

    def __init__(self: Any, accelerator: Any = "auto", *args: Any, precision: Any = None, **kwargs: Any) -> None:
        if isinstance(accelerator, str) and _ACCELERATOR.fullmatch(accelerator):
            mode.note(f'Fabric(accelerator="{accelerator}"): it is "cpu"')
            accelerator = "cpu"
        if precision is not None:
            mode.note(f'Fabric(precision="{precision}"): everything is computed in float64')
            precision = "64-true"
        original(self, accelerator, *args, precision=precision, **kwargs)

    return __init__


def _compiled_flex_attn(original: Any, mode: Redirected) -> Any:
    """Compute torchtitan's FlexAttention by products and a softmax, under the same mask.

    On CPUs flex_attention has no backward.
    """
    from torch.nn.attention.flex_attention import AuxOutput, create_mask

    def compiled_flex_attn(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: float | None, **kwargs: Any
    ) -> Any:
        if kwargs["score_mod"] is not None:
            return original.__func__(q, k, v, block_mask=block_mask, scale=scale, **kwargs)
        mode.note("FlexAttention: products and a softmax compute it, under the same mask")
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mask = create_mask(block_mask.mask_mod, len(q), q.shape[1], q.shape[2], k.shape[2], device="cpu")
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v, AuxOutput(lse=scores.logsumexp(-1))

    return staticmethod(compiled_flex_attn)


def _grouped_mm(original: Any, mode: Redirected) -> Any:
    """Compute torchtitan's products of experts one after another: torch has no grouped product in float64."""

    def _grouped_mm(self: Any, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        *rows, rest = A.tensor_split(offs.tolist())
        return torch.cat([*(a @ b for a, b in zip(rows, B_t, strict=True)), A.new_zeros(len(rest), B_t.shape[-1])])

    return _grouped_mm


def _accelerator_state_init(original: Original, mode: Redirected) -> Original:
    """Let Accelerate shard by FSDP2 where it is asked to.

    On CPUs it wraps the model in DistributedDataParallel in place of that, without a word, and refuses a
    `ParallelismConfig`.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    begin_anew()

    def __init__(self: Any, mixed_precision: Any = None, cpu: bool = False, *args: Any, **kwargs: Any) -> None:
        if mixed_precision not in (None, "no"):
            mode.note(f'Accelerator(mixed_precision="{mixed_precision}"): everything is computed in float64')
            mixed_precision = "no"
        asked = [name for name in ("fsdp_plugin", "parallelism_config") if kwargs.get(name) is not None]
        if asked and not self.initialized:
            mode.note("Accelerate is told of accelerators, on which alone it shards by FSDP2")
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        original(self, mixed_precision, True, *args, **kwargs)

    return __init__


def _bar_init(original: Original, mode: Redirected) -> Original:
    """Draw no progress bars, of each rank, between the lines of a report."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__get__(self)(*args, **{**kwargs, "disable": True})  # some libraries leave a partial method there

    return __init__


def _config_params(original: Original, mode: Redirected) -> Original:
    """Let DeepSpeed's config say float64, and what of its optimizer and offloading needs nothing compiled."""
    forget_groups()

    def _initialize_params(self: Any, params: dict[str, Any]) -> None:
        params = copy.deepcopy(params)
        for name in ("bf16", "bfloat16", "fp16", "amp", "torch_autocast"):
            if params.pop(name, {}).get("enabled"):
                mode.note(f'"{name}" in DeepSpeed\'s config: everything is computed in float64')
        for name in ("communication_data_type", "data_types"):
            params.pop(name, None)
        if params.pop("scheduler", None):
            mode.note('"scheduler" in DeepSpeed\'s config: the learning rate is that of the optimizer')
        optimizer = params.get("optimizer", {})
        if str(optimizer.get("type")).lower() in ("adam", "adamw"):
            optimizer.setdefault("params", {})["torch_adam"] = True
            mode.note(f"\"{optimizer['type']}\" in DeepSpeed's config: it is torch's, in place of FusedAdam")
        for name in ("offload_optimizer", "offload_param"):
            if params.get("zero_optimization", {}).pop(name, None):
                mode.note(f'"{name}" in DeepSpeed\'s config: everything is on the CPU')
        original(self, params)

    return _initialize_params


def _backend_init(original: Original, mode: Redirected) -> Original:
    """Let DeepSpeed's backend be gloo, without the extension for shared memory, which each rank would compile."""

    def __init__(self: Any, backend: Any, *args: Any, **kwargs: Any) -> None:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if _BACKENDS.search(str(backend)):
            mode.note(f"{backend}: ranks meet over gloo")
            backend = "gloo"
        original(self, backend, *args, **kwargs)

    return __init__


def _float_tensor(_original: Any, _mode: Redirected) -> Any:
    """Let norms be float64."""
    return property(lambda self: torch.DoubleTensor)


def _in_mode(original: Original, mode: Redirected) -> Original:
    """Let ZeRO's hooks reduce in float64: inside of a backward pass no mode of torch functions works."""

    def in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return original(*args, **kwargs)

    return in_mode


def _supported_dtypes(_original: Original, _mode: Redirected) -> Original:
    return lambda self: [torch.double]


_REPLACED: tuple[tuple[Any, str, Callable[[Original, Redirected], Original]], ...] = (
    (dist, "init_process_group", _init_process_group),
    (dist.distributed_c10d, "init_process_group", _init_process_group),
    (dist, "new_group", _new_group),
    (DeviceMesh, "__init__", _mesh_init),
    (MixedPrecisionPolicy, "__init__", _policy_init),
    (torch.autocast, "__init__", _autocast_init),
)

_OF_LIBRARIES: tuple[tuple[str, str, str, Callable[[Any, Redirected], Any]], ...] = (
    ("tqdm.std", "tqdm", "__init__", _bar_init),
    ("transformers.modeling_utils", "PreTrainedModel", "from_pretrained", _from_pretrained),
    ("lightning.fabric.connector", "_Connector", "__init__", _connector_init),
    ("accelerate.state", "AcceleratorState", "__init__", _accelerator_state_init),
    ("torchtitan.models.common.attention", "FlexAttention", "compiled_flex_attn", _compiled_flex_attn),
    ("torchtitan.models.common.moe", "GroupedExperts", "_grouped_mm", _grouped_mm),
    ("deepspeed.runtime.config", "DeepSpeedConfig", "_initialize_params", _config_params),
    ("deepspeed.comm.torch", "TorchBackend", "__init__", _backend_init),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "_backward_post_hook", _in_mode),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "process_gradients", _in_mode),
    (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "reduce_ready_partitions_and_remove_grads",
        _in_mode,
    ),
    ("deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator", "FloatTensor", _float_tensor),
    ("deepspeed.accelerator.cpu_accelerator", "CPU_Accelerator", "supported_dtypes", _supported_dtypes),
)
