"""Training steps on gloo ranks, of shardlib, torch and DeepSpeed, and the memory that they take."""

from __future__ import annotations

import functools
import gc
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _beside_models import Case, Training, build, example, unit_names, units
from _harness import live as allocated
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

import shardlib as sl
from shardlib.transforms import Transform

MIB = 2**20
Step = Callable[[Any], None]


class NotThere(Exception):
    """This library does not train in this configuration."""


class Meter(TorchDispatchMode):
    """A meter of the bytes of live tensors: of all storages that an op has returned, at the size that they have now.

    It knows nothing of any library. It has to be entered before a model is built. `fully_shard` frees storages by
    resizing them, which is no op; so `resize_` of storages is watched too.

    Attributes:
        now, peak: bytes of live tensors.
        most_allocated: the most MiB that the process had of glibc's allocator after an op, for comparison.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.most_allocated = 0.0
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}

    def reset_peak(self) -> None:
        self.peak, self.most_allocated = self.now, allocated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) or is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._seen(leaf.untyped_storage())
        self.most_allocated = max(self.most_allocated, allocated())
        return result

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        meter, original = self, self._resize

        @functools.wraps(original)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            meter._seen(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)

    def _seen(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._refs:
            self._refs[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._refs[key]


def by_shardlib(case: Case) -> Step:
    """The step of `sl.shard_model`."""
    model: nn.Module = build(case)
    model = sl.shard_model(model, sl.mesh(dp=-1), {"**": None}, transforms=transforms(case))
    return _plain_step(model, torch.optim.AdamW(model.parameters(), fused=True))


def transforms(case: Case) -> list[Transform]:
    """Return the transforms of shardlib for a case."""
    zero = {f"zero{stage}": sl.zero(stage) for stage in (1, 2, 3)}
    made = [({"replicate": sl.replicate(), "fsdp": sl.fsdp()} | zero)[case.sharding]]
    if case.recompute:  # named, since blocks in a Sequential are no units of a plan
        made.append(sl.checkpoint_activations(unit_names(case)))
    return made + ([sl.precision("bf16")] if case.dtype == "bf16" else [])


def by_torch(case: Case) -> Step:
    """The step of `DistributedDataParallel` or of `fully_shard`."""
    if case.sharding == "replicate" and case.dtype == "fp32":
        model: nn.Module = nn.parallel.DistributedDataParallel(_recomputed(case), gradient_as_bucket_view=True)
    elif case.sharding == "fsdp":
        model = fully_sharded(case, init_device_mesh("cpu", (case.ranks,)))
    else:
        raise NotThere("DistributedDataParallel in float32, and fully_shard, are what runs here")
    return _plain_step(model, torch.optim.AdamW(model.parameters(), fused=True))


def fully_sharded(case: Case, mesh: DeviceMesh) -> nn.Module:
    """Return the model of a case with `fully_shard` on each block and on the whole."""
    model = _recomputed(case)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.dtype == "bf16" else MixedPrecisionPolicy()
    for block in units(case, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def by_deepspeed(case: Case) -> Step:
    """The step of DeepSpeed's ZeRO, with the sizes of buckets that transformers sets for "auto"."""
    if not case.sharding.startswith("zero") or case.dtype != "bf16":
        raise NotThere("stages 1 to 3 in bf16 are what runs here")
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError:
        raise NotThere("DeepSpeed is not installed") from None

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at the first start
    model = _recomputed(case)
    embed = max(p.shape[-1] for p in units(case, model)[0].parameters() if p.ndim == 1)
    config = {
        "train_micro_batch_size_per_gpu": example(case)[0].shape[0],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": int(case.sharding[-1]),
            "reduce_bucket_size": embed * embed,
            "allgather_bucket_size": embed * embed,
            "stage3_prefetch_bucket_size": int(0.9 * embed * embed),
            "stage3_param_persistence_threshold": 10 * embed,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Any) -> None:
        engine.backward(engine(*batch))
        engine.step()

    return step


RUNS: dict[str, Callable[[Case], Step]] = {"shardlib": by_shardlib, "torch": by_torch, "deepspeed": by_deepspeed}


def measure(library: str, case: Case) -> dict[str, Any]:
    """Return the memory of the second step: bytes at the peak, and between steps with gradients forgotten."""
    gc.collect()
    before = allocated()
    with Meter() as meter:
        step = RUNS[library](case)
        step(example(case))
        batch = example(case)
        gc.collect()
        meter.reset_peak()
        between = meter.now
        step(batch)
        return {
            "peak": meter.peak,
            "between_steps": between,
            "allocator_peak": int(MIB * (meter.most_allocated - before)),
        }


def run(library: str, file: Path, chosen: Sequence[Case]) -> None:
    """Run on every rank all cases of this number of ranks; rank 0 writes what it measured."""
    warnings.simplefilter("ignore")  # of names that the libraries use and torch has deprecated
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for case in chosen:
        if case.ranks != dist.get_world_size():
            continue
        try:
            found.append({"case": vars(case), **measure(library, case)})
        except NotThere:
            continue
        except Exception as error:
            found.append({"case": vars(case), "error": f"{type(error).__name__}: {error}".splitlines()[0]})
        if dist.get_rank() == 0:
            print(f"{library}: {case}: {found[-1].get('peak', found[-1].get('error'))}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.destroy_process_group()


def _recomputed(case: Case) -> Training:
    model = build(case)
    if case.recompute:
        blocks = {id(block) for block in units(case, model)}
        apply_activation_checkpointing(model, check_fn=lambda module: id(module) in blocks)
    return model


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Any) -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
