"""`Accelerator`: Hugging Face Accelerate's loop on models that are sharded by a plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DynamoBackend, InitProcessGroupKwargs, TorchDynamoPlugin, recursively_apply
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import RandomSampler

from shardlib._mesh import default_device_type, join_torchrun
from shardlib._mesh import mesh as make_mesh
from shardlib._mesh_shape import MeshLike, MeshShape
from shardlib._plan import Plan
from shardlib.checkpoint import load, save
from shardlib.engine import clip_grad_norm_, clip_grad_value_, full_state_dict, no_sync, shard_model
from shardlib.engine.ranks import agree
from shardlib.engine.ranks.groups import group_over
from shardlib.errors import CheckpointError, MeshError, PlanError, ShardingError
from shardlib.integrations import tracking
from shardlib.integrations._options import Transforms, as_transforms, leaving_steps_to, refuse, without_loss_scale
from shardlib.integrations._versions import warn_if_untested
from shardlib.transforms import precision

__all__ = ["Accelerator"]

_INSTEAD = {
    "fsdp_plugin": 'Write transforms="fsdp()".',
    "deepspeed_plugin": 'Write transforms="zero(2)", or another stage.',
    "deepspeed_plugins": 'Write transforms="zero(2)", or another stage.',
    "megatron_lm_plugin": 'Name the axes in mesh="dp=2,tp=2".',
    "parallelism_config": 'Name the axes in mesh="dp=2,tp=2".',
    "torch_tp_plugin": 'Name the axes in mesh="dp=2,tp=2".',
}
_OWN_BATCHES = dict.fromkeys(
    ("dispatch_batches", "use_stateful_dataloader"), "Leave it out: each rank reads its own batches."
)
_STEPS = leaving_steps_to(
    "Accelerate", accumulate="gradient_accumulation_steps", fp16='mixed_precision="fp16", or fp16=True for a Trainer,'
)
_PREPARED = "_is_accelerate_prepared"  # Accelerate's mark of what need not be prepared again


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` that shards models with `shard_model` in the place of wrapping them.

    A prepared model is the same module, sharded in place. Ranks that differ only on model axes get the same batches.
    `num_processes` and `process_index` count data ranks: they are what a data loader, a scheduler and a batch size
    depend on. `is_main_process` and `state` speak of processes.

    Args:
        mesh: "dp=2,tp=2", a `MeshShape`, or a `DeviceMesh` with named axes. One size may be -1; without a mesh, every
            process is a data rank.
        rules: as for `shard_model`; None finds the layout file of the model's class.
        transforms: text such as "zero(2)", a transform, or several.
        compile: the backend that compiles repeated blocks, as for `shard_model`; None compiles nothing.
        **options: the arguments of `accelerate.Accelerator`.

    Raises:
        PlanError: an option that shards or compiles by other means.
        MeshError: the mesh has stages of a pipeline, or Accelerate knows of another number of processes.

    >>> accelerator = Accelerator(mesh="dp=1,tp=1", rules={"**": None}, cpu=True)
    >>> model, optimizer = accelerator.prepare(layer := nn.Linear(2, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    >>> accelerator.backward(model(torch.ones(3, 2)).sum())
    >>> accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0
    tensor(True)
    >>> optimizer.step()
    >>> model is layer, accelerator.num_processes
    (True, 1)
    """

    def __init__(
        self,
        *,
        mesh: MeshLike = "dp=-1",
        rules: Any = None,
        transforms: Transforms = None,
        compile: str | None = None,
        **options: Any,
    ) -> None:
        _refuse(options)
        kind = mesh.device_type if isinstance(mesh, DeviceMesh) else default_device_type()
        options["cpu"] = options.get("cpu", False) or kind == "cpu"
        _join("cpu" if options["cpu"] else kind, options.get("kwargs_handlers") or ())
        super().__init__(**options)
        if self.mixed_precision == "fp16" and self.device.type == "cpu":  # where Accelerate trains in float32
            scale = self.scaler_handler.to_kwargs() if self.scaler_handler else {}
            self.native_amp, self.scaler = True, torch.amp.GradScaler(self.device.type, **scale)
        self.mesh = make_mesh(mesh, device_type=self.device.type)
        self.rules, self.transforms, self.compile = rules, as_transforms(transforms), compile
        shape = MeshShape.of(self.mesh)
        if shape.pipeline_axes:
            raise MeshError(
                f'The mesh "{shape}" has a pipeline axis, which a loop over model(batch) cannot run. Use data and '
                "model axes, or write a loop with shardlib.pipeline_step."
            )
        if self.state.num_processes != shape.world_size:
            raise MeshError(
                f'The mesh "{shape}" has {shape.world_size} ranks, and Accelerate counts {self.state.num_processes} '
                "processes. Its state was made before: build the Accelerator first. On CPU, give TrainingArguments "
                "use_cpu=True."
            )
        names = self.mesh.mesh_dim_names or ()
        self._index, self._count = shape.data_place(dict(zip(names, self.mesh.get_coordinate() or (), strict=True)))
        self._data_group = group_over(shape.data_axes, self.mesh) if self._count > 1 else None
        # Of the data group, whose ranks need not be in the order of the data ranks.
        self._order = agree.exchange(self._index, self._data_group) if self._count > 1 else [0]

    # --- what counts data ranks ---------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """The number of data ranks."""
        return self._count if hasattr(self, "_count") else super().num_processes  # type: ignore[no-any-return]

    @property
    def process_index(self) -> int:
        """The index of this rank's data rank; ranks that differ only on model axes have the same."""
        return self._index if hasattr(self, "_index") else super().process_index  # type: ignore[no-any-return]

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last of all processes."""
        return self.state.is_last_process  # type: ignore[no-any-return]

    @property
    def dispatch_batches(self) -> bool:
        """False: each rank reads its own batches, also those of an iterable data set."""
        return False

    # --- preparing ----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, and return them in the same order.

        An optimizer that was built before its model is sharded gets the sharded parameters: prepare both in one call.

        Args:
            *args: any of these objects; others are returned as they are.
            device_placement: for each of them, whether batches are moved to this rank's device.

        Raises:
            ShardingError: an optimizer has made steps before its model is sharded.
            ShardlibError: an error of `shard_model`, before any change.
        """
        models = [one for one in args if isinstance(one, nn.Module) and not _is_prepared(one)]
        named = {id(param): (model, name) for model in models for name, param in model.named_parameters()}
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer) and not _is_prepared(one)]
        _refuse_state(optimizers, named)
        groups = [
            (group, [named.get(id(param), param) for param in group["params"]])
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        for model in models:
            self.prepare_model(model)
        params = {id(model): dict(model.named_parameters()) for model in models}
        for group, keys in groups:
            group["params"] = [params[id(key[0])][key[1]] if isinstance(key, tuple) else key for key in keys]
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place; return a model that is prepared already as it is.

        Args:
            model: a plain module, the same on every rank. Its shards are put on this rank's device.
            device_placement: has no effect.
            evaluation_mode: has no effect.

        Raises:
            PlanError: transforms that accumulate or scale the loss.
            ShardlibError: an error of `shard_model`, before any change.
        """
        if _is_prepared(model):
            if not any(model is one for one in self._models):
                self._models.append(model)
            return model
        shard_model(model, self.mesh, self.rules, transforms=self._transforms(), compile=self.compile)
        setattr(model, _PREPARED, True)
        self._models.append(model)
        return model

    def _transforms(self) -> list[Callable[[Plan], Plan]]:
        low = self.mixed_precision in ("bf16", "fp16")
        made = [*self.transforms, _STEPS]
        return [*made, precision(self.mixed_precision, autocast=True), without_loss_scale] if low else made

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer of a prepared model's parameters; its state is on their device."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Shard a data loader over the data ranks; all of them see one order of the examples."""
        if _is_prepared(data_loader):
            return super().prepare_data_loader(data_loader, *args, **options)
        prepared = super().prepare_data_loader(data_loader, *args, **options)
        sampler = prepared.get_sampler()
        if isinstance(sampler, SeedableRandomSampler):
            if self.dataloader_config.data_seed is None and self.state.num_processes > 1:
                # The first rank's: shard_model has given other data ranks a random stream of their own.
                sampler.initial_seed = agree.of_first(sampler.initial_seed)
        elif isinstance(sampler, RandomSampler) and self.num_processes == 1 and self.state.num_processes > 1:
            prepared.rng_types = [*(prepared.rng_types or ()), "torch"]  # it draws its seed from torch's generator
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler, which is stepped once for each data rank, unless `split_batches` is set."""
        if _is_prepared(scheduler):
            return super().prepare_scheduler(scheduler)
        host = super().prepare_scheduler(scheduler)
        self._schedulers[-1] = _Scheduler(host, 1 if self.split_batches else self.num_processes)
        return self._schedulers[-1]

    # --- a step -------------------------------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate; the first one outside reduces the sum."""
        return no_sync(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients so that their norm, over all elements on all ranks, is at most `max_norm`; return the norm
        before."""
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp every element of every gradient to [-clip_value, clip_value]."""
        self.unscale_gradients()
        clip_grad_value_(parameters, clip_value)

    def check_trigger(self) -> bool:
        """Return whether any process has called `set_trigger`, and reset it."""
        if self.flag_tensor is None:
            self.flag_tensor: torch.Tensor | None = torch.tensor(0, device=self.device)
        if self.state.num_processes > 1:
            dist.all_reduce(self.flag_tensor)
        return super().check_trigger()  # type: ignore[no-any-return]

    # --- between data ranks -------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all data ranks along their first dim, in the order of the data ranks.

        Args:
            tensor: a tensor of one shape on every rank, or a nested structure of tensors.
        """
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._data_group is None:
            return tensor
        own = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
        found = [torch.empty_like(own) for _ in range(self._count)]
        dist.all_gather(found, own, group=self._data_group)
        return torch.cat(self._in_order(found))

    def _in_order(self, found: list[Any]) -> list[Any]:
        """Return what the ranks of the data group gave, in the order of the data ranks."""
        return [one for _, one in sorted(zip(self._order, found, strict=True), key=lambda pair: pair[0])]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from all data ranks, without the examples that filled the last batch up.

        Args:
            input_data: tensors, in a nested structure, or objects in a list.
            use_gather_object: gather a list of tensors as objects, which may have different shapes.
        """
        if not use_gather_object and _only_tensors(input_data):
            return super().gather_for_metrics(input_data)
        found = input_data
        if self._data_group is not None:
            found = [item for items in self._in_order(agree.exchange(input_data, self._data_group)) for item in items]
        state = self.gradient_state
        return found[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else found

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over the data ranks.

        Args:
            tensor: a tensor of one shape on every rank, or a nested structure of tensors.
            reduction: "sum", "mean", "max" or "none".
            scale: has no effect, as on every device but XLA's.
        """

        def one(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            if self._data_group is not None and reduction != "none":
                dist.all_reduce(value, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, self._data_group)
                if reduction == "mean":
                    value /= self._count
            return value

        return recursively_apply(one, tensor, error_on_other_type=True)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Split inputs between processes, where each of them is a data rank.

        Raises:
            MeshError: the mesh has model axes, whose ranks need the same inputs.
        """
        if self.num_processes != self.state.num_processes:
            raise MeshError(
                f'split_between_processes gives each process other inputs, and ranks of the mesh "{self.mesh}" that '
                "differ only on model axes need the same. Take inputs[accelerator.process_index :: "
                "accelerator.num_processes]."
            )
        with super().split_between_processes(inputs, apply_padding) as own:
            yield own

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Raise a `ShardingError`: DDP alone can go on where a rank has no batch left."""
        raise ShardingError(
            "join_uneven_inputs is for DDP alone. Give every data rank the same number of batches: even_batches=True "
            "of DataLoaderConfiguration, which is its default."
        )

    # --- tracking -----------------------------------------------------------------------------------------------------

    def log_plan(self, model: nn.Module, step: int | None = 0) -> None:
        """Log the plan of a prepared model through the trackers of `init_trackers`.

        Every tracker gets the numbers of `tracking.report`, those of TensorBoard and W&B also the plan's table, and the
        logging folder, if there is one, the page "plan.html".

        Args:
            model: a prepared model.
            step: the step that trackers show the numbers at.

        Raises:
            ShardingError: the model is not sharded.
        """
        report = tracking.report(model)
        self.log(report.numbers, step)
        for tracker in self.trackers:
            if tracking.shows_text(tracker):
                tracker.log({"plan": report.text}, step=step)
        if self.is_main_process and self.logging_dir is not None:
            report.write(self.logging_dir)

    # --- saving -------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the state dict that the model would have on one device, on every rank. All ranks call it."""
        return full_state_dict(model)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Any:
        """Save models, optimizers, schedulers and random states into the folder that Accelerate names.

        A checkpoint of `shardlib.save` for each model is in `model`, `model_1` and so on; the other files are
        Accelerate's own. All ranks call it.

        Raises:
            CheckpointError: hooks of `register_save_state_pre_hook`, options for other formats, two optimizers of one
                model, or an error of `shardlib.save`.
        """
        self._refuse_hooks(self._save_model_state_pre_hook, "register_save_state_pre_hook")
        if given := [*options, *([] if safe_serialization else ["safe_serialization=False"])]:
            raise CheckpointError(f"save_state was given {given}. shardlib writes safetensors alone: leave it out.")
        pairs = self._pairs()
        with self._without_objects():
            folder = super().save_state(output_dir)
        first: dict[str, Any] = {"lr_scheduler": _Several(self._schedulers), "extra": self._counts()}
        for index, (model, optimizer) in enumerate(pairs):
            save(_path(folder, index), model, optimizer, **({} if index else first))
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Load what `save_state` has saved, on this mesh or another one. All ranks call it.

        Raises:
            CheckpointError: hooks of `register_load_state_pre_hook`, options for other formats, schedulers that count
            another number of data ranks, or an error of `shardlib.load`.
        """
        self._refuse_hooks(self._load_model_state_pre_hook, "register_load_state_pre_hook")
        if options or load_kwargs:
            raise CheckpointError(f"load_state was given {[*options, *(load_kwargs or ())]}; leave it out.")
        pairs: list[Any] = self._pairs()
        folders: list[str] = []
        counted = self._counts()["steps_of_schedulers"]

        def begin(models: Any, folder: str) -> None:
            """Compare, before Accelerate loads anything from the folder that it has chosen."""
            folders.append(folder)
            if pairs:
                _refuse_other_schedule(load(_path(folder, 0), random=False).extra["steps_of_schedulers"], counted)

        handle = self.register_load_state_pre_hook(begin)
        try:
            with self._without_objects():
                super().load_state(input_dir)
        finally:
            handle.remove()
        for index, (model, optimizer) in enumerate(pairs):
            first: dict[str, Any] = {"lr_scheduler": _Several(self._schedulers)} if index == 0 else {"random": False}
            loaded = load(_path(folders[0], index), model, optimizer, **first)
            if index == 0:
                self.step = loaded.extra["step"]

    def _counts(self) -> dict[str, Any]:
        return {"step": self.step, "steps_of_schedulers": [getattr(one, "times", 1) for one in self._schedulers]}

    def _refuse_hooks(self, hooks: Mapping[Any, Any], name: str) -> None:
        if hooks:
            raise CheckpointError(
                f"{name} was called. Models are sharded, and saved by shardlib.save: call your function beside "
                "save_state and load_state instead."
            )

    def _pairs(self) -> list[tuple[nn.Module, torch.optim.Optimizer | None]]:
        """Return each prepared model with its optimizer."""
        left = list(self._optimizers)
        pairs: list[tuple[nn.Module, torch.optim.Optimizer | None]] = []
        for model in self._models:
            own = {id(param) for param in model.parameters()}
            found = [o for o in left if any(id(p) in own for group in o.param_groups for p in group["params"])]
            if len(found) > 1:
                raise CheckpointError(
                    f"A {type(model).__name__} has {len(found)} optimizers, and a checkpoint has one for each model. "
                    "Give one optimizer several groups."
                )
            left = [one for one in left if one not in found]
            pairs.append((model, inner_optimizer(found[0]) if found else None))
        if left:
            raise CheckpointError(f"{len(left)} prepared optimizers have no parameters of a prepared model.")
        return pairs

    @contextmanager
    def _without_objects(self) -> Iterator[None]:
        """Let Accelerate save or load everything but the objects that shardlib saves."""
        names = ("_models", "_optimizers", "_schedulers", "_dataloaders")
        kept = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)


class _Scheduler(AcceleratedScheduler):
    """Steps a scheduler once for each data rank, where Accelerate's would do so for each process."""

    def __init__(self, host: AcceleratedScheduler, times: int) -> None:
        super().__init__(host.scheduler, host.optimizers, host.step_with_optimizer, split_batches=True)
        self.times = times

    def step(self, *args: Any, **options: Any) -> None:
        if self.times == 1 or not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **options)
            return
        last = getattr(self.scheduler, "total_steps", math.inf)
        for _ in range(self.times):
            if self.scheduler.state_dict()["_step_count"] <= last:  # as Accelerate: a OneCycleLR has an end
                super().step(*args, **options)


class _Several:
    """The states of several schedulers, as of one."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {str(index): one.state_dict() for index, one in enumerate(self.schedulers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state) != len(self.schedulers):
            raise CheckpointError(
                f"The checkpoint has {len(state)} schedulers, and {len(self.schedulers)} are prepared: prepare as many."
            )
        for index, one in enumerate(self.schedulers):
            one.load_state_dict(state[str(index)])


def _join(kind: str, handlers: Sequence[Any]) -> None:
    """Join torchrun's ranks as Accelerate would, unless told how to meet."""
    given = [one.to_kwargs() for one in handlers if isinstance(one, InitProcessGroupKwargs)]
    asked = given[0] if given else {}
    if "init_method" not in asked:
        join_torchrun(kind, **asked)


def _is_prepared(value: Any) -> bool:
    return bool(getattr(value, _PREPARED, False))


def _refuse_state(optimizers: Sequence[torch.optim.Optimizer], named: Mapping[int, Any]) -> None:
    """Refuse optimizers that have state of parameters that are about to be sharded."""
    for optimizer in optimizers:
        if any(id(param) in named and state for param, state in optimizer.state.items()):
            raise ShardingError(
                f"The {type(optimizer).__name__} has made steps on parameters that are not sharded yet. Prepare it "
                "with its model before the first step; load_state continues a run."
            )


def _refuse_other_schedule(saved: list[int], here: list[int]) -> None:
    if len(saved) == len(here) and saved != here:
        raise CheckpointError(
            f"The schedulers were saved where a training step counted {saved} steps of a schedule, one for each data "
            f"rank, and here it counts {here}: the learning rate would be another. To resume on another number of data "
            "ranks, train with DataLoaderConfiguration(split_batches=True), for which it counts one."
        )


def _path(folder: Any, index: int) -> Path:
    return Path(folder) / (f"model_{index}" if index else "model")


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise a `PlanError` about an option, or a variable of `accelerate launch`, that shards by other means."""
    refuse("Accelerator", options, _INSTEAD)
    config = options.get("dataloader_config")
    refuse("DataLoaderConfiguration", vars(config) if config else {}, _OWN_BATCHES)
    for name, instead in _INSTEAD.items():
        variable = "ACCELERATE_USE_" + name.removesuffix("_plugin").upper()
        if os.environ.get(variable, "false").lower() == "true":
            raise PlanError(f"{variable} is set, as by `accelerate launch`. {instead} Start with torchrun.")
    plugin = options.get("dynamo_plugin") or TorchDynamoPlugin(backend=options.get("dynamo_backend"))
    if plugin.backend != DynamoBackend.NO:
        raise PlanError(
            f'Accelerate would compile the whole model, with {plugin.backend}. Write compile="inductor", which '
            "compiles the blocks of the model."
        )
    if (options.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "fp8":
        raise PlanError(
            'mixed_precision="fp8" was given. Write mixed_precision="bf16". For float8, write a loop of your own with '
            'shardlib.precision("fp8").'
        )
    for handler in options.get("kwargs_handlers") or ():
        kind = type(handler).__name__
        hook = getattr(handler, "comm_hook", None)
        if kind == "AutocastKwargs" or "Recipe" in kind:
            raise PlanError(f"{kind} was given. Write the precision as transforms= instead.")
        if kind == "DistributedDataParallelKwargs" and str(getattr(hook, "value", hook)) != "no":
            raise PlanError(
                f"DistributedDataParallelKwargs(comm_hook={hook}) was given. Write the dtype that gradients travel in, "
                'as transforms=shardlib.precision("fp32", reduce="bf16").'
            )


warn_if_untested("accelerate", accelerate.__version__, "1.15")
