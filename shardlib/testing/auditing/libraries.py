"""Redirection of what libraries decide by themselves: devices, dtypes, back ends, kernels."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from shardlib.testing.auditing.hosts import begin_anew, forget_groups
from shardlib.testing.auditing.redirect import ACCELERATOR, BACKENDS, FLOATS, Original, Redirected

__all__ = ["libraries_redirected"]


@contextmanager
def libraries_redirected(mode: Redirected) -> Iterator[None]:
    """Redirect libraries inside the block: those that are imported by now, and any other at its import."""
    with ExitStack() as stack:

        def redirect(module: ModuleType) -> None:
            for owner, name, make in _OF_LIBRARIES[module.__name__]:
                found = getattr(module, owner)
                stack.enter_context(mock.patch.object(found, name, make(vars(found)[name], mode)))

        for name, reset in _RESETS.items():
            if name in sys.modules:
                reset()
        for name in [name for name in _OF_LIBRARIES if name in sys.modules]:
            redirect(sys.modules[name])
        finder = _OnImport(redirect)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


class _OnImport(MetaPathFinder):
    """Finds modules that are to be redirected as Python does, and redirects each once its code has run."""

    def __init__(self, redirect: Callable[[ModuleType], None]) -> None:
        self.redirect = redirect

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _OF_LIBRARIES else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.redirect(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _from_pretrained(original: Any, mode: Redirected) -> Any:
    """Load in float64: threads, in which no mode of torch functions works, read the files."""

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("dtype", "torch_dtype"):
            asked = kwargs.get(name)
            if (asked if isinstance(asked, torch.dtype) else getattr(torch, str(asked), None)) in FLOATS:
                mode.note(f"{str(asked).removeprefix('torch.')}: everything is computed in float64")
                kwargs[name] = torch.float64
        return original.__func__(cls, *args, **kwargs)

    return classmethod(from_pretrained)


def _connector_init(original: Original, mode: Redirected) -> Original:
    """Let Fabric's connector choose the CPU and float64."""

    def __init__(self: Any, accelerator: Any = "auto", *args: Any, precision: Any = None, **kwargs: Any) -> None:
        if isinstance(accelerator, str) and ACCELERATOR.fullmatch(accelerator):
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
        if BACKENDS.search(str(backend)):
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


_Make = Callable[[Any, Redirected], Any]

# By module: a class of it, an attribute, and what makes the new one from it.
_OF_LIBRARIES: dict[str, tuple[tuple[str, str, _Make], ...]] = {
    "tqdm.std": (("tqdm", "__init__", _bar_init),),
    "transformers.modeling_utils": (("PreTrainedModel", "from_pretrained", _from_pretrained),),
    "lightning.fabric.connector": (("_Connector", "__init__", _connector_init),),
    "accelerate.state": (("AcceleratorState", "__init__", _accelerator_state_init),),
    "torchtitan.models.common.attention": (("FlexAttention", "compiled_flex_attn", _compiled_flex_attn),),
    "torchtitan.models.common.moe": (("GroupedExperts", "_grouped_mm", _grouped_mm),),
    "deepspeed.runtime.config": (("DeepSpeedConfig", "_initialize_params", _config_params),),
    "deepspeed.comm.torch": (("TorchBackend", "__init__", _backend_init),),
    "deepspeed.runtime.engine": (("DeepSpeedEngine", "_backward_post_hook", _in_mode),),
    "deepspeed.runtime.zero.stage_1_and_2": (("DeepSpeedZeroOptimizer", "process_gradients", _in_mode),),
    "deepspeed.runtime.zero.stage3": (
        ("DeepSpeedZeroOptimizer_Stage3", "reduce_ready_partitions_and_remove_grads", _in_mode),
    ),
    "deepspeed.accelerator.cpu_accelerator": (
        ("CPU_Accelerator", "FloatTensor", _float_tensor),
        ("CPU_Accelerator", "supported_dtypes", _supported_dtypes),
    ),
}
_RESETS = {"accelerate.state": begin_anew, "deepspeed.comm.comm": forget_groups}
