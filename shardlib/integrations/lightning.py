"""`ShardlibStrategy`: a Lightning strategy that shards the model of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.precision import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from shardlib._mesh import join_torchrun
from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib.booster import LazyInitContext
from shardlib.engine import OptimizerWrapper, full_state_dict, get_plan, no_sync, shard_model
from shardlib.engine.apply import is_sharded
from shardlib.engine.ranks.groups import group_over
from shardlib.errors import CheckpointError, InputError, MeshError, ShardingError, nearest
from shardlib.integrations import tracking
from shardlib.integrations._options import Transforms, as_transforms, leaving_steps_to
from shardlib.integrations._versions import warn_if_untested
from shardlib.monitor import Monitor

__all__ = ["ShardingMonitor", "ShardlibStrategy"]

_OPTIONS = ("bucket_mb", "check", "compile", "global_batch_norm", "init", "rng")
_PRECISIONS = '"64-true", "32-true", "bf16-mixed" or "16-mixed"'
_INSTEAD = {
    "bf16-true": 'Write precision="32-true" with ShardlibStrategy(transforms=shardlib.precision("bf16")), which keeps '
    "float32 master weights",
    "16-true": 'Write precision="32-true" with ShardlibStrategy(transforms=shardlib.precision("bf16"))',
}
_FLAGS_OF_OTHERS = {
    "find_unused_parameters": "Unused parameters need no flag here",
    "static_graph": "It is a flag of DistributedDataParallel, which is not used here",
    "gradient_as_bucket_view": "It is a flag of DistributedDataParallel, which is not used here",
    "bucket_cap_mb": "Write bucket_mb=",
    "ddp_comm_hook": "Write transforms=shardlib.precision(...) to reduce gradients in another dtype",
    "sharding_strategy": "Write transforms=shardlib.fsdp(), shardlib.zero(2) or shardlib.hsdp(...)",
    "auto_wrap_policy": "Write transforms=shardlib.fsdp(); the plan finds the repeated blocks",
    "cpu_offload": "Write transforms=shardlib.fsdp() | shardlib.offload()",
    "activation_checkpointing_policy": "Write transforms=shardlib.checkpoint_activations(...)",
    "mixed_precision": "Write Trainer(precision=...), or transforms=shardlib.precision(...)",
    "state_dict_type": "Checkpoints have full tensors, as those of one process",
    "stage": "Write transforms=shardlib.zero(2)",
    "data_parallel_size": 'Write mesh="dp=2,tp=2"',
    "tensor_parallel_size": 'Write mesh="dp=2,tp=2"',
    "save_distributed_checkpoint": "Checkpoints have full tensors, as those of one process",
}

_STEPS = leaving_steps_to("Lightning", accumulate="accumulate_grad_batches", fp16='precision="16-mixed"')
# What each module was sharded with. A second trainer may have a strategy of its own that asks for the same.
_sharded_with: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


class ShardlibStrategy(DDPStrategy):
    """Train a LightningModule on a mesh, sharded by rules and transforms, with the numbers of one process.

    Processes, launcher, barrier and broadcast are those of `DDPStrategy`. No DistributedDataParallel is used: `setup`
    calls `shardlib.shard_model`, then `configure_optimizers`. `Trainer(strategy="shardlib")` is this class with its
    defaults, after this module has been imported.

    The module that is sharded is the only child of the LightningModule that has parameters (`self.model`, say), or the
    LightningModule itself where it has several such children, or parameters of its own. Names in rules are relative to
    that module; since a pattern matches the end of a name, most patterns are the same for both.

    All ranks get the weights and buffers that rank 0 has before sharding, as with `DDPStrategy`. Samplers, `sync_dist`,
    `all_gather` and torchmetrics act over the data ranks: ranks that differ on model axes only get the same batches. A
    checkpoint has the full tensors that one process would save; any mesh, and one process without shardlib, loads it.

    Args:
        mesh: names and sizes of axes, such as "dp=2,tp=2". One size may be -1.
        rules: as for `shardlib.shard_model`. None is the layout file of the sharded module's class, such as that of a
            Hugging Face model; on a mesh without model axes it replicates every parameter.
        transforms: as for `shardlib.shard_model`, or text such as "zero(2)".
        lazy: build the model of `configure_model` in a `shardlib.booster.LazyInitContext`: without memory until it is
            sharded.
        process_group_backend, timeout: as for `DDPStrategy`.
        **options: `bucket_mb`, `check`, `compile`, `global_batch_norm`, `init` and `rng` of `shardlib.shard_model`.

    Raises:
        InputError: a flag of another strategy, or a setting of the Trainer that does not fit.
        MeshError: the Trainer's number of processes is not that of the mesh.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> strategy = ShardlibStrategy("dp=1,tp=1", {"up": "colwise", "down": "rowwise"}, transforms="zero(2)")
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, barebones=True)
        >>> trainer.strategy is strategy
        True
    """

    def __init__(
        self,
        mesh: MeshLike = "dp=-1",
        rules: Any = None,
        *,
        transforms: Transforms = (),
        lazy: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **options: Any,
    ) -> None:
        for name in options.keys() - {*_OPTIONS}:
            instead = _FLAGS_OF_OTHERS.get(name) or f"It takes {', '.join(_OPTIONS)}{nearest(name, _OPTIONS)}"
            raise InputError(f"ShardlibStrategy was given {name}={options[name]!r}, which it does not have. {instead}.")
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.mesh_shape = MeshShape.of(mesh)
        self.rules = rules
        self.transforms = as_transforms(transforms)
        self.lazy = lazy
        self.options = options
        self._given_mesh = mesh
        self._device_mesh: Any = None
        self._data_group: dist.ProcessGroup | None = None

    # --- the trainer's settings and processes -------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        """Refuse settings of the Trainer that do not fit, when the Trainer is built."""
        self._refuse_precision()
        if getattr(self, "_layer_sync", None) is not None:
            raise InputError(
                "Trainer(sync_batchnorm=True) was given. BatchNorm of a sharded model uses the statistics of all data "
                "ranks already: leave it out. ShardlibStrategy(global_batch_norm=False) turns that off."
            )
        if self.mesh_shape.pipeline_axes:
            raise InputError(
                f'ShardlibStrategy was given mesh "{self.mesh_shape}", which has a pipeline axis. A training_step '
                "calls the model itself, and a pipeline runs by shardlib.pipeline_step. Use data and model axes."
            )
        world = self.num_nodes * self.num_processes
        try:
            self.mesh_shape = self.mesh_shape.resolve(world)
        except MeshError as error:
            raise MeshError(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) runs {world} processes, and mesh "
                f'"{self.mesh_shape}" does not have that size: {error} Write the devices of a node, as in '
                f"Trainer(devices={self.mesh_shape.world_size if -1 not in self.mesh_shape.sizes else '...'}), or "
                "another mesh."
            ) from None
        if self.world_size != world:
            raise MeshError(
                f"Trainer(devices={self.num_processes}, num_nodes={self.num_nodes}) runs {world} processes, and the "
                f"launcher started {self.world_size}. Write devices= and num_nodes= so that they multiply to "
                f"{self.world_size}."
            )
        super()._configure_launcher()

    def _refuse_precision(self) -> None:
        plugin = self.precision_plugin
        if type(plugin) in (Precision, DoublePrecision, MixedPrecision):
            return
        name = str(getattr(plugin, "precision", type(plugin).__name__))
        raise InputError(
            f"Trainer was given the precision {name!r} ({type(plugin).__name__}); ShardlibStrategy trains in "
            f"{_PRECISIONS}. {_INSTEAD.get(name, 'Write one of these')}."
        )

    def setup_environment(self) -> None:
        join_torchrun(self.root_device.type, self._process_group_backend, self._timeout)
        super().setup_environment()
        mesh = self._given_mesh if isinstance(self._given_mesh, DeviceMesh) else self.mesh_shape
        self._device_mesh = make_mesh(mesh, device_type=self.root_device.type)
        axes = tuple(axis for axis in self.mesh_shape.data_axes if self.mesh_shape[axis] > 1)
        self._data_group = group_over(axes, self._device_mesh)  # without axes, that of this rank alone

    @property
    def device_mesh(self) -> Any:
        """The mesh, once processes have met: in `configure_model` and later."""
        if self._device_mesh is None:
            raise ShardingError("The mesh does not exist before the Trainer runs. Read it in configure_model or later.")
        return self._device_mesh

    @property
    def sharded_module(self) -> nn.Module:
        """The module of the LightningModule that is sharded, or will be: for `shardlib.get_plan`, say."""
        assert self.lightning_module is not None
        return sharded_part(self.lightning_module)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of data ranks, and the index of this one: ranks of a model axis have the same."""
        place, of = self.mesh_shape.data_place(self.mesh_shape.coordinate(self.global_rank))
        return {"num_replicas": of, "rank": place}

    # --- the model ----------------------------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        if not self.lazy or is_sharded(self.sharded_module):
            yield
            return
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))  # all ranks compute the values of rank 0
        with LazyInitContext():
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        _refuse_callbacks(trainer)
        self._shard(self.lightning_module)
        self.model_to_device()  # metrics and buffers outside of what was sharded
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self._data_group
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: LightningModule) -> None:
        if getattr(module, "_compiler_ctx", None) is not None:
            raise InputError(
                "The LightningModule was compiled by torch.compile. Pass it as it is: shard_model compiles repeated "
                "blocks itself, by ShardlibStrategy(compile=...)."
            )
        part = sharded_part(module)
        asked = (self.mesh_shape, self.rules, self.transforms, self.options)
        if is_sharded(part):
            self._refuse_another_plan(part, asked)
            return
        self.precision_plugin.convert_module(module)
        self._broadcast_values(module)
        rules = self.rules
        if rules is None and not (self.mesh_shape.model_axes or self.mesh_shape.expert_axes):
            rules = {"**": None}
        transforms = (*self.transforms, _STEPS)
        shard_model(part, self.device_mesh, rules, transforms=transforms, **self.options)
        _sharded_with[part] = asked

    def _refuse_another_plan(self, part: nn.Module, asked: tuple[Any, ...]) -> None:
        """A module that is sharded stays as it is: by this strategy, by an equal one, or by the user with this mesh."""
        if _sharded_with.get(part) == asked:
            return
        mesh = get_plan(part).mesh
        if part in _sharded_with or mesh != self.mesh_shape or self.rules is not None or self.transforms:
            raise ShardingError(
                f'{type(part).__name__} is sharded already, on mesh "{mesh}", and this strategy asks for mesh '
                f'"{self.mesh_shape}", rules or transforms that may differ. Use the strategy that sharded it, with the '
                f'same mesh, rules and transforms; or, for a module that you sharded, ShardlibStrategy("{mesh}").'
            )

    def _broadcast_values(self, module: nn.Module) -> None:
        """Give all ranks the values of rank 0, one tensor at a time; those on `meta` are computed later."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.is_meta:
                    value = tensor.detach().to(self.root_device).contiguous()
                    dist.broadcast(value, 0)
                    tensor.copy_(value)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_sync(self.sharded_module):
            yield

    def teardown(self) -> None:
        """End as the other strategies do, and leave the model sharded, on its device."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- values of all data ranks -------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data ranks; the mean of integers is a float."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if is_mean and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group or self._data_group, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Gather a tensor of all data ranks, of shape (data ranks, ...); with one data rank, return the tensor."""
        if group is None and self.mesh_shape.data_ranks == 1:
            return tensor
        return super().all_gather(tensor, group or self._data_group, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide alike on every rank, whatever its axes."""
        count = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count > 0)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return full_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state that the optimizer would have on one process: full tensors, by index of the parameter."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        given = inner.state_dict()
        state = {index: {key: _full(value) for key, value in own.items()} for index, own in given["state"].items()}
        return {**given, "state": state}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"The checkpoint has {len(states)} optimizers, and configure_optimizers returned "
                f"{len(self.optimizers)}. Return the optimizers that were saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            OptimizerWrapper(optimizer, self.sharded_module).load_state_dict(state)


class ShardingMonitor(Callback):
    """Log the plan of a model that `ShardlibStrategy` shards, once, and then throughput and memory.

    When training begins, every logger gets the numbers of `tracking.report`, a logger of TensorBoard or W&B also the
    plan's table, and `trainer.log_dir` the page "plan.html". Then, every `log_every_n_steps` batches, loggers get
    "steps_per_second" (batches), "samples_per_second" of all data ranks and "peak_gib", as `shardlib.monitor.Monitor`
    measures them. Time for validation counts.

    Args:
        tokens: counts the tokens of a batch; "tokens_per_second" then replaces "samples_per_second".

    >>> Trainer(callbacks=[ShardingMonitor()], logger=False, accelerator="cpu").callbacks[0]  # doctest: +ELLIPSIS
    <shardlib.integrations.lightning.ShardingMonitor object at ...>
    """

    def __init__(self, tokens: Callable[[Any], int] | None = None) -> None:
        self._count = tokens or extract_batch_size
        self._rate = "tokens_per_second" if tokens else "samples_per_second"
        self._monitor: Monitor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the plan.

        Raises:
            InputError: the trainer has another strategy.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, ShardlibStrategy):
            raise InputError(
                f"ShardingMonitor was given to a Trainer with {type(strategy).__name__}. Write "
                "Trainer(strategy=ShardlibStrategy(...)), or leave the callback out."
            )

        def write(step: int, values: dict[str, float]) -> None:
            values[self._rate] = values.pop("tokens_per_second")
            for logger in trainer.loggers:
                logger.log_metrics(values, trainer.global_step)

        # A progress bar of its own is not shown, so that the number of steps has no effect.
        every = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        self._monitor = Monitor(strategy.device_mesh, 1, every=every, write=write)
        folder = trainer.log_dir  # all ranks ask
        if trainer.is_global_zero and trainer.loggers:
            report = tracking.report(strategy.sharded_module)
            for logger in trainer.loggers:
                logger.log_metrics(report.numbers, trainer.global_step)
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("plan", report.text)
                elif isinstance(logger, WandbLogger):
                    logger.log_text("plan", ["plan"], [[report.text]])
            report.write(folder or ".")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch."""
        assert self._monitor is not None
        self._monitor.step(tokens=self._count(batch))


def sharded_part(module: LightningModule) -> nn.Module:
    """Return the module that the strategy shards: the only child with parameters, or the LightningModule itself.

    >>> model = LightningModule()
    >>> model.body, model.loss = nn.Linear(2, 2), nn.MSELoss()
    >>> sharded_part(model) is model.body
    True
    >>> model.head = nn.Linear(2, 2)
    >>> sharded_part(model) is model
    True
    """
    with_params = [child for child in module.children() if next(child.parameters(), None) is not None]
    alone = len(with_params) == 1 and next(module.parameters(recurse=False), None) is None
    if alone and not isinstance(with_params[0], nn.ModuleList | nn.ModuleDict):
        return with_params[0]
    return module


def _full(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def _refuse_callbacks(trainer: Trainer) -> None:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise InputError(
                f"The callback {type(callback).__name__} copies the model before it is sharded, and cannot average "
                "shards into that copy. Leave it out; average the values of state_dict() in on_train_batch_end."
            )


StrategyRegistry.register("shardlib", ShardlibStrategy, description="Sharded by shardlib, on a mesh of data ranks")
warn_if_untested("lightning", lightning.__version__, "2.6")
