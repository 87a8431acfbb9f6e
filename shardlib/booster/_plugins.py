"""Plugins: each one chooses the mesh, the rules and the transforms that a model is sharded by."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib import layouts
from shardlib._mesh import default_device_type, mesh
from shardlib._mesh_shape import MeshShape
from shardlib._plan import as_rules
from shardlib.booster._data import DataLoader, prepared
from shardlib.booster._options import NotThere, Options, keyword, met, recipe, refused
from shardlib.booster._precision import Transforms, precision_of, scale_of
from shardlib.booster._recompute import GradientCheckpointConfig, recomputed_by
from shardlib.booster._stages import PipelineStageManager
from shardlib.engine.ranks.groups import group_over
from shardlib.errors import MeshError, PlanError, nearest
from shardlib.rules import Balanced, Rules, tensor_mode
from shardlib.transforms import LossScale, Transform, fit_memory, fsdp, hsdp, offload, pipeline, replicate, zero

__all__ = [
    "OVERLAPS",
    "DPPluginBase",
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]

_SENT = 'gradients are sent in their own dtype, or in communication_dtype="bfloat16".'
OVERLAPS = "gradients are always reduced while backward runs."
_KERNELS = (
    "torch chooses the kernel of scaled_dot_product_attention and of norms, with or without this keyword, and blocks "
    "that are sharded over a model axis are compiled. A model of transformers calls it unless it has "
    'attn_implementation="eager".'
)
_CHUNKS = "parameters are unsharded by units, the model's repeated blocks; there are no chunks."


# ColossalAI's ways to split a sequence, and the modes of rules that do it (docs/sequence.md).
_SEQUENCE_AXES = ("sp", "cp")
_SEQUENCE_MODES = {"split_gather": "sequence", "ring": "sequence", "all_to_all": "ulysses", "ring_attn": "ring"}


# What scripts read of ColossalAI's plugins and is not here, each with what to write.
_NOT_HERE = {
    "shard_config": "rules give the layout of a model on the mesh, and shardlib.get_plan(model) is the resolved plan. "
    "A loss on unsharded logits needs no change",
    "sp_size": "only HybridParallelPlugin shards a sequence over ranks of its own",
    "logger": "call get_dist_logger()",
}


class _GroupsOfRanks:
    """The one question that scripts put to ColossalAI's mesh. `device_mesh()` answers all others."""

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """Return the ranks of a group, in its order."""
        return dist.get_process_group_ranks(group)


class Plugin(Options):
    """A way to train: a mesh, rules and transforms. Your own is a subclass that overrides `mesh_shape`, and the methods
    that differ."""

    controls_precision: ClassVar[bool] = False
    """Whether it has a `precision` of its own, so that `Booster` takes none."""
    max_norm: float = 0.0
    """What `step` clips the norm of gradients to; 0 is not at all."""
    norm_type: float = 2.0
    verbose: bool = False

    def mesh_shape(self) -> MeshShape:
        """Return the mesh; one size is -1, and is the number of processes divided by the other sizes."""
        raise NotImplementedError

    def rules(self, model: nn.Module) -> Any:
        """Return the rules of the model on model axes, as `shard_model` takes them."""
        return {"**": None}

    def transforms(self, model: nn.Module) -> Transforms:
        """Return the transforms of the plan."""
        return ()

    def bucket_mb(self) -> float | None:
        """Return the bucket size of one collective in MiB."""
        return None

    @property
    def dp_size(self) -> int:
        """The number of ranks, or groups of them, that train on different examples."""
        return self._shape().data_ranks

    @property
    def tp_size(self) -> int:
        """The number of ranks over which a layer is sharded."""
        return math.prod(self._shape()[axis] for axis in self._tensor_axes_here())

    @property
    def pp_size(self) -> int:
        """The number of ranks along the pipeline axis."""
        return math.prod(self._shape()[axis] for axis in self._shape().pipeline_axes)

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that train on different examples and are equal in all else. The first of these groups that is asked
        for before `boost` makes the mesh: every rank asks."""
        return group_over(self._shape().data_axes, self.device_mesh())

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The ranks over which a layer is sharded; this rank alone, if it is not."""
        return group_over(self._tensor_axes_here(), self.device_mesh())

    @property
    def pp_group(self) -> dist.ProcessGroup:
        """The ranks that have the stages of one pipeline; this rank alone, if there are none."""
        return group_over(self._shape().pipeline_axes, self.device_mesh())

    @property
    def sp_group(self) -> dist.ProcessGroup:
        """The ranks over which sequences are sharded: those of an axis of their own, else of tp, if rules shard them
        over tp; this rank alone, if none do."""
        return group_over(self._sequence_axes_here(), self.device_mesh())

    @property
    def mixed_dp_group(self) -> dist.ProcessGroup:
        """The ranks over which gradients are summed: those that train on different examples, or on parts of a sequence
        along an axis of its own."""
        return group_over((*self._shape().data_axes, *self._own_sequence_axes()), self.device_mesh())

    @property
    def pg_mesh(self) -> _GroupsOfRanks:
        """The ranks of a group, as scripts ask for them: `plugin.pg_mesh.get_ranks_in_group(plugin.pp_group)`."""
        return _GroupsOfRanks()

    @property
    def stage_manager(self) -> PipelineStageManager | None:
        """This rank's place in a pipeline; None without one."""
        return PipelineStageManager(self._shape(), _of_job("RANK", 0)) if self.pp_size > 1 else None

    def device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the mesh over the running ranks. Collective where it is made, which is once in a job."""
        made: dict[Any, DeviceMesh] = vars(self).setdefault("_device_meshes", {})
        device_type = device_type or next((kind for _, kind in made), default_device_type())
        if (dist.group.WORLD, device_type) not in made:
            created = mesh(self.mesh_shape(), device_type=device_type)
            made.clear()
            made[dist.group.WORLD, device_type] = created
        return made[dist.group.WORLD, device_type]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_device_meshes"}

    def _shape(self) -> MeshShape:
        return self.mesh_shape().resolve(_of_job("WORLD_SIZE", 1))

    def _tensor_axes_here(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._shape().model_axes if axis not in _SEQUENCE_AXES)

    def _own_sequence_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self._shape().model_axes if axis in _SEQUENCE_AXES)

    def _sequence_axes_here(self) -> tuple[str, ...]:
        along_tp = getattr(self, "enable_sequence_parallelism", False)
        return self._own_sequence_axes() or (self._tensor_axes_here() if along_tp else ())

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise NotThere(f'{type(self).__name__} has no attribute "{name}": {_NOT_HERE[name]}.')
        return object.__getattribute__(self, name)  # raises what it raised before

    def control_precision(self) -> bool:
        """Return whether the plugin has a `precision` of its own."""
        return self.controls_precision

    def support_no_sync(self) -> bool:
        """Return whether gradients can be accumulated without a reduction: always."""
        return True

    def support_lora(self) -> bool:
        """Return whether `booster.enable_lora` works: always."""
        return True

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: Any = None,
        **options: Any,
    ) -> DataLoader:
        """Return a dataloader over this rank's share of a data set.

        The data axes of the mesh divide the examples; ranks that differ only on model axes get the same ones. The
        loader has a `state_dict` with its position, for `shardlib.save(..., dataloader=loader)`.

        Args:
            dataset: a data set with a length and items by number.
            batch_size: the number of examples per data rank.
            shuffle: use another order in each epoch, if `loader.sampler.set_epoch(epoch)` is called.
            seed: the seed of that order, and of the workers' random streams, which differ between data ranks and
                workers.
            drop_last: leave out the last batch if it is smaller.
            pin_memory: as for torch's `DataLoader`.
            num_workers: likewise.
            distributed_sampler_cls: a replacement of torch's `DistributedSampler`, called with `(dataset,
                num_replicas=, rank=, shuffle=)`.
            **options: options of torch's `DataLoader`.
        """
        shape = self.mesh_shape().resolve(_of_job("WORLD_SIZE", 1))
        place = shape.data_place(shape.coordinate(_of_job("RANK", 0)))
        return prepared(
            dataset,
            place,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            sampler=distributed_sampler_cls,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **options,
        )


def _of_job(name: str, alone: int) -> int:
    """Return this rank, or the number of ranks: of the process group, else of the launcher's environment."""
    if dist.is_initialized():
        return dist.get_rank() if name == "RANK" else dist.get_world_size()
    return int(os.environ.get(name, alone))


class OneProcess(Plugin):
    """The behaviour of a Booster without a plugin: one process, without sharding."""

    def __repr__(self) -> str:
        return "Booster()"

    def mesh_shape(self) -> MeshShape:
        return MeshShape(dp=1)


class DPPluginBase(Plugin):
    """The base of plugins whose ranks are for data: without a `mesh_shape` of its own, all of them on one axis."""

    def mesh_shape(self) -> MeshShape:
        return MeshShape(dp=-1)


@recipe
class TorchDDPPlugin(DPPluginBase):
    """Data parallel: every rank holds the full model, gradients are averaged.

    BatchNorm uses the statistics of all data ranks' examples (SyncBN), in every plugin.

    >>> TorchDDPPlugin(bucket_cap_mb=50)
    TorchDDPPlugin(bucket_cap_mb=50)
    """

    broadcast_buffers: bool = refused(
        "buffers are equal on all ranks, because BatchNorm uses all examples.", default=True
    )
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False  # always found
    check_reduction: bool = met("step always raises for a gradient that was not reduced.", default=False)
    gradient_as_bucket_view: bool = met("large gradients are always reduced in place.", default=False)
    static_graph: bool = met("each backward pass may use other parameters.", default=False)
    fp8_communication: bool = refused("gradients are sent in their own dtype.", default=False)

    def bucket_mb(self) -> float | None:
        return self.bucket_cap_mb


@recipe
class _WithPrecision(Plugin):
    """The base of plugins that have a `precision` of their own."""

    controls_precision: ClassVar[bool] = True

    precision: str = keyword(default="fp16")
    master_weights: bool = keyword(default=True)
    initial_scale: float = keyword(default=2.0**16)
    min_scale: float = keyword(default=1.0)
    growth_factor: float = keyword(default=2.0)
    backoff_factor: float = keyword(default=0.5)
    growth_interval: int = keyword(default=1000)
    hysteresis: int = keyword(default=2)
    max_scale: float = keyword(default=2.0**32)
    max_norm: float = keyword(default=0.0)
    norm_type: float = keyword(default=2.0)
    use_fp8: bool = keyword(default=False)
    verbose: bool = keyword(default=False)
    fp8_communication: bool = refused(_SENT, default=False)

    def precision_transforms(self, model: nn.Module, reduce: Any = None) -> Transforms:
        """Return the transforms of `precision` and related keywords."""
        return precision_of(
            type(self).__name__,
            self.precision,
            model,
            scale_of(self),
            master=self.master_weights,
            reduce=reduce,
            fp8=self.use_fp8,
        )

    def megabytes(self, millions: float) -> float:
        """Convert millions of gradients, which ColossalAI counts as 2**20 each, to MiB."""
        low = self.precision in ("bf16", "fp16_naive", "fp8") or (self.precision == "fp16" and not self.master_weights)
        return millions * (2 if low else 4)


@recipe
class LowLevelZeroPlugin(_WithPrecision, DPPluginBase):
    """ZeRO: `zero(1)` or `zero(2)`, over all data ranks or over groups of them.

    >>> LowLevelZeroPlugin(stage=2, precision="bf16", cpu_offload=True).transforms(nn.Linear(2, 2))
    (zero(2), precision("bf16"), offload())
    """

    stage: int = 1
    reduce_bucket_size_in_m: float = 12
    communication_dtype: Any = None
    overlap_communication: bool = met(OVERLAPS, default=True)
    overlap_allgather: bool = False
    cpu_offload: bool = False
    cast_inputs: bool = refused(
        "inputs are always cast to the model's compute dtype; cast them back in your model.", default=True
    )
    extra_dp_size: int = 1

    def mesh_shape(self) -> MeshShape:
        return _zero_mesh(self.extra_dp_size)

    def transforms(self, model: nn.Module) -> Transforms:
        if self.stage not in (1, 2):
            raise PlanError(f"{self}: the stages are 1 and 2; stage 3 is GeminiPlugin() or TorchFSDPPlugin().")
        divide = zero(self.stage, axis=_zero_axis(self.extra_dp_size), overlap=self.overlap_allgather)
        away = (offload("state"),) if self.cpu_offload else ()
        return (divide, *self.precision_transforms(model, self.communication_dtype), *away)

    def bucket_mb(self) -> float | None:
        return self.megabytes(self.reduce_bucket_size_in_m)


def _zero_mesh(copies: int, **model_axes: int) -> MeshShape:
    """Return a mesh of `copies` groups, each of which shards over its ranks."""
    data = {"dp": -1} if copies == 1 else {"replicate": copies, "zero": -1}
    return MeshShape({**data, **model_axes})


def _zero_axis(copies: int) -> str | None:
    return None if copies == 1 else "zero"


@recipe
class TorchFSDPPlugin(DPPluginBase):
    """FSDP: `fsdp()`, or the transform of the sharding strategy.

        FULL_SHARD, None     fsdp(reshard_after_forward=True)
        SHARD_GRAD_OP        fsdp(reshard_after_forward=False)
        NO_SHARD             replicate()
        HYBRID_SHARD         hsdp(shard="fsdp", replicate="replicate"), where fsdp is the ranks of one node
        _HYBRID_SHARD_ZERO2  fsdp("fsdp", reshard_after_forward=False), on the same mesh

    >>> TorchFSDPPlugin(sharding_strategy="SHARD_GRAD_OP").transforms(nn.Linear(2, 2))
    (fsdp(reshard_after_forward=False),)
    """

    controls_precision: ClassVar[bool] = True

    process_group: Any = refused("the mesh always has all processes.", default=None)
    sharding_strategy: Any = None
    cpu_offload: Any = None
    auto_wrap_policy: Any = met("units are the model's repeated blocks; plan.units lists them.", default=None)
    backward_prefetch: Any = met("a unit is always unsharded while the one before it computes.", default=None)
    mixed_precision: Any = None
    ignored_modules: Any = refused(
        'name what is sharded, by the transform sl.fsdp(only=["blocks", "head"]).', default=None
    )
    param_init_fn: Any = refused("initialize before boost, or by sl.shard_model(init=...).", default=None)
    sync_module_states: bool = False  # rank 0's count, always
    fp8_communication: bool = refused("set reduce_dtype of mixed_precision.", default=False)

    def mesh_shape(self) -> MeshShape:
        if not self._strategy().startswith(("HYBRID", "_HYBRID")):
            return super().mesh_shape()
        return MeshShape(replicate=-1, fsdp=_of_job("LOCAL_WORLD_SIZE", 1) if not dist.is_initialized() else _node())

    def transforms(self, model: nn.Module) -> Transforms:
        away = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        return (_STRATEGIES[self._strategy()], *self._precision(model), *((offload("all"),) if away else ()))

    def _strategy(self) -> str:
        name = str(getattr(self.sharding_strategy, "name", self.sharding_strategy or "FULL_SHARD"))
        if name not in _STRATEGIES:
            raise PlanError(f"{self}: the strategies are {', '.join(_STRATEGIES)}.{nearest(name, _STRATEGIES)}")
        return name

    def _precision(self, model: nn.Module) -> Transforms:
        """Return the transforms of a `torch.distributed.fsdp.MixedPrecision`, or of a name."""
        given = self.mixed_precision
        if given is None or isinstance(given, str):
            return precision_of(type(self).__name__, given or "fp32", model, LossScale())
        buffers = any(buffer.is_floating_point() for buffer in model.buffers())
        if getattr(given, "buffer_dtype", None) not in (None, torch.float32) and buffers:
            raise PlanError(f"{self}: buffers keep their dtype here; leave buffer_dtype out, or convert them first.")
        names = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        dtype = getattr(given, "param_dtype", None)
        if dtype not in names:
            raise PlanError(f"{self}: param_dtype is one of {', '.join(str(known) for known in names)}.")
        return precision_of(
            type(self).__name__, names[dtype], model, LossScale(), reduce=getattr(given, "reduce_dtype", None)
        )


_STRATEGIES: dict[str, Transform] = {
    "FULL_SHARD": fsdp(reshard_after_forward=True),
    "SHARD_GRAD_OP": fsdp(reshard_after_forward=False),
    "NO_SHARD": replicate(),
    "HYBRID_SHARD": hsdp(shard="fsdp", replicate="replicate"),
    "_HYBRID_SHARD_ZERO2": fsdp("fsdp", reshard_after_forward=False),
}


def _node() -> int:
    """Return the number of ranks of one node, where its launcher sets it; else of all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


@recipe
class GeminiPlugin(_WithPrecision, DPPluginBase):
    """ZeRO with offloading: stage 3 for the largest parameters, stage 2 for the rest.

        shard_param_frac     fraction of the parameters' bytes that is stored sharded: 1 is stage 3, 0 is stage 2
        offload_optim_frac   fraction of the optimizer's state in host memory
        offload_param_frac   fraction of the sharded parameters and gradients in host memory; their state is there too

    With `placement_policy="auto"` as little as possible is offloaded (`shardlib.fit_memory`): everything except
    activations may use the fraction `steady_cuda_cap_ratio` of `memory_budget`, by default the memory of the device.
    Where the device is a CPU, nothing is offloaded without a budget.

    >>> GeminiPlugin(precision="bf16", offload_optim_frac=0.5).transforms(nn.Linear(2, 2))
    (zero(3), precision("bf16"), offload(fraction=0.5))
    >>> GeminiPlugin(placement_policy="auto", memory_budget=40e9).transforms(nn.Linear(2, 2))[-1]
    fit_memory(36000000000)
    """

    chunk_config_dict: Any = met(_CHUNKS, default=None)
    chunk_init_device: Any = met(_CHUNKS, default=None)
    placement_policy: str = "static"
    enable_gradient_accumulation: bool = False  # always possible: booster.no_sync
    max_prefetch: int = met("the next unit is always unsharded while one computes.", default=0)
    shard_param_frac: float = 1.0
    offload_optim_frac: float = 0.0
    offload_param_frac: float = 0.0
    warmup_non_model_data_ratio: float = met(
        "there is no warm-up; the fractions determine what is offloaded.", default=0.8
    )
    steady_cuda_cap_ratio: float = 0.9
    memory_budget: float | None = None
    pin_memory: bool = False  # always so, where there is an accelerator
    force_outputs_fp32: bool = False  # always so
    strict_ddp_mode: bool = False
    search_range_m: float = met(_CHUNKS, default=32)
    hidden_dim: Any = met(_CHUNKS, default=None)
    min_chunk_size_m: float = met(_CHUNKS, default=32)
    memstats: Any = met(
        "sl.get_plan(model).memory() computes it; the fractions determine what is offloaded.", default=None
    )
    gpu_margin_mem_ratio: float = met("the fractions determine what is offloaded.", default=0.0)
    tp_size: int = 1
    extra_dp_size: int = 1
    enable_all_optimization: bool = met(_KERNELS, default=False)
    enable_fused_normalization: bool = met(_KERNELS, default=False)
    enable_flash_attention: bool = met(_KERNELS, default=False)
    enable_sequence_parallelism: bool = False
    enable_jit_fused: bool = met(_KERNELS, default=False)
    enable_async_reduce: bool = met(OVERLAPS, default=True)

    def mesh_shape(self) -> MeshShape:
        return _zero_mesh(self.extra_dp_size, **({"tp": self.tp_size} if self.tp_size != 1 else {}))

    def rules(self, model: nn.Module) -> Any:
        if self.enable_sequence_parallelism:
            if self.tp_size == 1:
                raise PlanError(f"{self}: the sequence is sharded over the ranks of tp; give tp_size above 1.")
            return layouts.for_model(model, "sequence")
        return {"**": None} if self.tp_size == 1 else None

    def transforms(self, model: nn.Module) -> Transforms:
        self._check()
        return (*self._divide(model), *self.precision_transforms(model), *self._away())

    def _check(self) -> None:
        if self.placement_policy not in ("static", "auto"):
            raise PlanError(
                f'{self}: placement_policy is "static" or "auto". What "cuda" and "cpu" were is "static" with '
                "offload_optim_frac=0, offload_param_frac=0 and with both 1."
            )
        if self.placement_policy == "auto":
            self._check_auto()
        elif self.memory_budget is not None or self.steady_cuda_cap_ratio != 0.9:
            raise PlanError(f'{self}: a budget is what placement_policy="auto" keeps to; "static" keeps to fractions.')
        if self.strict_ddp_mode and self.tp_size > 1:
            raise PlanError(f"{self}: strict_ddp_mode is data parallel alone, and tp_size is {self.tp_size}.")
        for name in ("shard_param_frac", "offload_optim_frac", "offload_param_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise PlanError(f"{self}: {name} is from 0 to 1.")
        if self.offload_param_frac > self.offload_optim_frac:
            raise PlanError(
                f"{self}: the state of offloaded parameters is offloaded too; give offload_optim_frac at least "
                "offload_param_frac."
            )
        if self.offload_param_frac and self.shard_param_frac < 1:
            raise PlanError(f"{self}: parameters are offloaded only where all are sharded; give shard_param_frac=1.")

    def _check_auto(self) -> None:
        if self.offload_optim_frac or self.offload_param_frac:
            raise PlanError(f'{self}: "auto" chooses what is offloaded; give fractions with placement_policy="static".')
        if not 0 < self.steady_cuda_cap_ratio <= 1:
            raise PlanError(f"{self}: steady_cuda_cap_ratio is a fraction of the budget, above 0 and up to 1.")

    def _divide(self, model: nn.Module) -> Transforms:
        axis = _zero_axis(self.extra_dp_size)
        if self.shard_param_frac in (0, 1):
            return (zero(3 if self.shard_param_frac else 2, axis=axis),)
        going = tuple(f"^{name}" for name in _largest(model, self.shard_param_frac))
        return (zero(3, axis=axis, only=going), zero(2, axis=axis))

    def _away(self) -> Transforms:
        if self.placement_policy == "auto":
            budget = _device_memory() if self.memory_budget is None else self.memory_budget
            return () if budget is None else (fit_memory(budget * self.steady_cuda_cap_ratio),)
        state = (offload("state", fraction=self.offload_optim_frac),) if self.offload_optim_frac else ()
        return (*state, *((offload("all", fraction=self.offload_param_frac),) if self.offload_param_frac else ()))


def _device_memory() -> float | None:
    """Return the bytes of this rank's accelerator; None without one."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.get_memory_info()[1]


def _largest(model: nn.Module, fraction: float) -> list[str]:
    """Return the names of the largest parameters that together have a fraction of all bytes."""
    sizes = {name: param.nbytes for name, param in model.named_parameters()}
    wanted, going, chosen_bytes = fraction * sum(sizes.values()), list[str](), 0
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if chosen_bytes >= wanted:
            break
        going.append(name)
        chosen_bytes += sizes[name]
    return going


@recipe
class HybridParallelPlugin(_WithPrecision):
    """Tensor parallel, pipelines and data parallel, with ZeRO of any stage. The rules are those of the model's class
    (`layouts.for_model`), or `custom_policy`. Stages are balanced by parameters, or have `num_layers_per_stage`, or are
    named by the rules of `custom_policy`. Sequences are sharded over tp ("split_gather", or "ring") or over an axis of
    their own ("all_to_all" or "ring_attn", with sp_size). A `tensor_mode`, such as "2d" or a registered one, shards
    over its own axes, which have tp_size ranks together.

    >>> HybridParallelPlugin(tp_size=2, zero_stage=1, precision="bf16").mesh_shape()
    MeshShape("dp=-1,tp=2")
    >>> HybridParallelPlugin(tp_size=8, tensor_mode="2.5d", tensor_sizes={"depth": 2}).mesh_shape()
    MeshShape("dp=-1,depth=2,row=2,col=2")
    >>> plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, pp_style="interleaved", num_model_chunks=2)
    >>> plugin.mesh_shape(), plugin.transforms(nn.Linear(2, 2))[-1]
    (MeshShape("dp=-1,pp=2,tp=1"), pipeline("interleaved", microbatches=4))
    """

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int | None = None
    zero_stage: int = 0
    enable_all_optimization: bool = met(_KERNELS, default=False)
    enable_fused_normalization: bool = met(_KERNELS, default=False)
    enable_flash_attention: bool = met(_KERNELS, default=False)
    enable_jit_fused: bool = met(_KERNELS, default=False)
    enable_sequence_parallelism: bool = False
    sequence_parallelism_mode: str | None = None
    parallel_output: bool = True  # outputs are unsharded in either case
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    broadcast_buffers: bool = refused(
        "buffers are equal on all ranks, because BatchNorm uses all examples.", default=True
    )
    ddp_bucket_cap_mb: float = 25
    find_unused_parameters: bool = False  # always found
    check_reduction: bool = met("step always raises for a gradient that was not reduced.", default=False)
    gradient_as_bucket_view: bool = met("large gradients are always reduced in place.", default=False)
    static_graph: bool = met("each backward pass may use other parameters.", default=False)
    zero_bucket_size_in_m: float = 12
    cpu_offload: bool = False
    communication_dtype: Any = None
    overlap_communication: bool = met(OVERLAPS, default=True)
    custom_policy: Any = None
    pp_style: str = "1f1b"
    num_model_chunks: int = 1
    scheduler_nodes: Any = refused("pp_style determines the order of a schedule.", default=None)
    num_layers_per_stage: Sequence[int] | None = None
    gradient_checkpoint_config: GradientCheckpointConfig | None = None
    enable_metadata_cache: bool = met("shapes of messages are known before the first one is sent.", default=True)
    make_vocab_size_divisible_by: int = met("a vocabulary of any size is sharded, unevenly if needed.", default=64)
    dp_outside: bool = True
    overlap_p2p: bool = met("messages are always sent while a rank computes.", default=True)
    overlap_allgather: bool = False
    tensor_mode: str | None = None
    tensor_sizes: Mapping[str, int] | None = None
    inner_ring_size: Any = met('"ring_attn" is one ring over all ranks of cp.', default=None)

    def mesh_shape(self) -> MeshShape:
        for name, size in (("tp_size", self.tp_size), ("pp_size", self.pp_size), ("sp_size", self.sp_size or 1)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"{self}: {name} is a number of ranks, from 1 up.")
        own_axis = (self.sp_size or 1) > 1 and self._mode() != "sequence"
        sequence = {"cp" if self._mode() == "ring" else "sp": int(self.sp_size or 1)} if own_axis else {}
        split = dict(self._tensor_axes().items())
        if self.pp_size == 1:
            return MeshShape({"dp": -1, **split, **sequence})
        outer = {"dp": -1, "pp": self.pp_size} if self.dp_outside else {"pp": self.pp_size, "dp": -1}
        return MeshShape({**outer, **split, **sequence})

    def _tensor_axes(self) -> MeshShape:
        """Return the mesh axes of one copy of a layer.

        Raises:
            PlanError: a tensor mode together with a split sequence.
            RuleError: no such tensor mode.
            MeshError: its axes cannot have tp_size ranks.
        """
        if self.tensor_mode is None:
            if self.tensor_sizes:
                raise PlanError(f"{self}: tensor_sizes are those of a tensor_mode's axes; give one.")
            return MeshShape(tp=self.tp_size)
        if self.enable_sequence_parallelism:
            raise PlanError(f"{self}: tensor_mode and enable_sequence_parallelism both set what is sharded; give one.")
        return tensor_mode(self.tensor_mode).mesh_shape(self.tp_size, **(self.tensor_sizes or {}))

    def _mode(self) -> str | None:
        """Return the mode of rules that splits the sequence; None without one.

        Raises:
            PlanError: an unknown way to split, or one that contradicts the sizes.
        """
        way, own_axis = self.sequence_parallelism_mode, (self.sp_size or 1) > 1
        if not self.enable_sequence_parallelism:
            # Scripts give a way in either case; sp_size=1 says that nothing is split.
            if (way is not None and self.sp_size != 1) or (own_axis and self.custom_policy is None):
                raise PlanError(f"{self}: the sequence is sharded with enable_sequence_parallelism=True.")
            return None
        way = way or ("all_to_all" if own_axis else "split_gather")
        if way not in _SEQUENCE_MODES:
            raise PlanError(
                f"{self}: sequence_parallelism_mode is one of {', '.join(map(repr, _SEQUENCE_MODES))}."
                f"{nearest(way, _SEQUENCE_MODES)}"
            )
        mode = _SEQUENCE_MODES[way]
        if mode == "sequence" and (self.tp_size == 1 or self.sp_size not in (None, 1, self.tp_size)):
            raise PlanError(
                f"{self}: {way!r} shards the sequence over the ranks of tp; give tp_size above 1, and no sp_size."
            )
        if mode in ("ulysses", "ring") and not own_axis:
            raise PlanError(f"{self}: {way!r} shards the sequence over ranks of its own; give sp_size above 1.")
        return mode

    def rules(self, model: nn.Module) -> Any:
        given, mode = self._policy(), self._mode()
        if mode is not None:
            given = layouts.for_model(model, mode) if given is None else as_rules(given).mode(mode)
        if self.tensor_mode is not None:
            given = tensor_mode(self.tensor_mode).rules(layouts.for_model(model) if given is None else as_rules(given))
        if self.pp_size == 1:
            return given
        rules = layouts.for_model(model) if given is None else as_rules(given)
        if self.num_layers_per_stage is not None:
            return rules.with_stages(Balanced(self.num_layers_per_stage))
        return rules if rules.stages is not None else rules.with_stages(Balanced(per_rank=self.num_model_chunks))

    def _policy(self) -> Any:
        given = self.custom_policy
        if given is not None and not isinstance(given, Rules | dict | str | os.PathLike):
            raise PlanError(
                f"{type(self).__name__}: custom_policy is a {type(given).__name__}; here it is rules: a mapping from "
                'patterns to layouts, such as {"mlp.up": "colwise", "mlp.down": "rowwise"}, or a layout file.'
            )
        return given if given is not None or self.tp_size > 1 or self._mode() or self.tensor_mode else {"**": None}

    def transforms(self, model: nn.Module) -> Transforms:
        if self.zero_stage not in (0, 1, 2, 3):
            raise PlanError(f"{self}: zero_stage is 0, 1, 2 or 3.")
        if self.overlap_allgather and self.zero_stage not in (1, 2):
            raise PlanError(f"{self}: overlap_allgather is for zero_stage 1 and 2; at 3 it is always so.")
        divide = (zero(self.zero_stage, overlap=self.overlap_allgather),) if self.zero_stage else ()
        away = (offload("state"),) if self.cpu_offload else ()
        brought = () if self.tensor_mode is None else tensor_mode(self.tensor_mode).transforms
        again = () if (config := self.gradient_checkpoint_config) is None else (recomputed_by(config),)
        return (
            *brought,
            *divide,
            *self.precision_transforms(model, self.communication_dtype),
            *away,
            *again,
            *self._schedule(),
        )

    @property
    def stage_manager(self) -> PipelineStageManager | None:
        manager = super().stage_manager
        if manager is None:
            return None
        return dataclasses.replace(manager, num_model_chunks=self.num_model_chunks, use_zbv=self.pp_style == "zbv")

    def _schedule(self) -> Transforms:
        """Return the transforms that schedule a pipeline.

        Raises:
            PlanError: an unknown style, or one that does not fit the chunks; no, or more than one, number of
                microbatches.
        """
        given = [name for name in ("num_microbatches", "microbatch_size") if getattr(self, name) is not None]
        if self.pp_size == 1:  # scripts give microbatches in either case: a batch is not cut then
            if self.num_model_chunks != 1 or self.num_layers_per_stage is not None:
                raise PlanError(f"{self}: chunks and layers per stage are a pipeline's, and pp_size is 1.")
            return ()
        chunks = {"1f1b": lambda n: n == 1, "gpipe": lambda n: n == 1, "zbv": lambda n: n == 2}
        chunks |= {"interleaved": lambda n: n > 1, "interleaved-zb": lambda n: n > 1}
        if self.pp_style not in chunks or not chunks[self.pp_style](self.num_model_chunks):
            raise PlanError(
                f'{self}: pp_style is "gpipe" or "1f1b" with num_model_chunks=1, "interleaved" or "interleaved-zb" '
                'with more, or "zbv" with 2.'
            )
        if len(given) != 1:
            raise PlanError(
                f"{self}: give the number of microbatches of a batch, num_microbatches=, or the number of rows of "
                "each, microbatch_size=; one of the two."
            )
        return (pipeline(self.pp_style, self.num_microbatches or 0),)

    def bucket_mb(self) -> float | None:
        return self.megabytes(self.zero_bucket_size_in_m) if self.zero_stage else self.ddp_bucket_cap_mb
