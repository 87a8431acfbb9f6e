"""`Booster`: a training loop in the style of ColossalAI, on `shard_model`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardlib.booster._checkpoint_io import GeneralCheckpointIO, Path
from shardlib.booster._lazy_init import build_again, is_recorded
from shardlib.booster._lora import add_lora, save_lora
from shardlib.booster._optimizer import BoostedOptimizer, Carried
from shardlib.booster._plugins import OneProcess, Plugin
from shardlib.booster._precision import Transforms, mixed_precision_of
from shardlib.booster._recompute import leave_to_plan
from shardlib.engine import get_plan, no_sync, pipeline_step, shard_model
from shardlib.engine._torch import pytree
from shardlib.engine.ranks import agree
from shardlib.errors import InputError, MeshError, PlanError, ShardingError

__all__ = ["BoostedModule", "Booster"]


class BoostedModule(nn.Module):
    """The names that the class of a boosted model adds; the model stays the same module, and is not wrapped."""

    @property
    def module(self) -> nn.Module:
        """The model itself, unless it has a `module` of its own, which it is then."""
        own = vars(self)
        return own.get("module", own["_modules"].get("module", self))  # type: ignore[no-any-return]

    def unwrap(self, *args: Any, **options: Any) -> nn.Module:
        """Return the model itself."""
        return self


class Booster(GeneralCheckpointIO):
    """Boosts a model and its training objects, by the recipe of a plugin; then saves and loads them.

    Args:
        device: "cuda" or "cpu"; by default the accelerator that torch sees, else "cpu".
        mixed_precision: "fp16", "bf16", "fp8", "fp16_naive", "fp16_apex", or an object such as
            `FP16TorchMixedPrecision(init_scale=2.0**10)`, where the plugin has no `precision` of its own.
        plugin: the way to train; without one, on one process.

    Raises:
        PlanError: an unknown name, or a precision in addition to the plugin's.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> booster = Booster()
    >>> model, optimizer, criterion, _, _ = booster.boost(model, optimizer, nn.functional.mse_loss)
    >>> loss = criterion(model(torch.ones(3, 4)), torch.zeros(3, 2))
    >>> booster.backward(loss, optimizer)
    >>> optimizer.clip_grad_by_norm(1.0) > 0
    tensor(True)
    >>> optimizer.step()
    """

    def __init__(self, device: Any = None, mixed_precision: Any = None, plugin: Plugin | None = None) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise PlanError(
                f"plugin={plugin!r} is not a plugin of shardlib; give TorchDDPPlugin(), LowLevelZeroPlugin(), "
                "TorchFSDPPlugin(), GeminiPlugin() or HybridParallelPlugin(), or a subclass of Plugin."
            )
        self.plugin = plugin if plugin is not None else OneProcess()
        self.mixed_precision = mixed_precision_of(mixed_precision)
        self.device_type = None if device is None else torch.device(device).type
        if self.mixed_precision is not None and self.plugin.controls_precision:
            raise PlanError(
                f"mixed_precision={mixed_precision!r} was given beside {self.plugin!r}, which has a precision of its "
                "own. Say it there: precision= of the plugin, or mixed_precision= of TorchFSDPPlugin."
            )

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh, made when it is needed first."""
        try:
            return self.plugin.device_mesh(self.device_type)
        except MeshError as error:
            if isinstance(self.plugin, OneProcess):
                raise MeshError(
                    f"A Booster without a plugin trains on one process. On several, give one, such as "
                    f"Booster(plugin=TorchDDPPlugin()). {error}"
                ) from error
            raise

    @property
    def checkpoint_io(self) -> GeneralCheckpointIO:
        """The booster itself, which saves and loads."""
        return self

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
        *,
        example: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Shard a model in place, and rebind its optimizer and scheduler to the sharded parameters.

        Args:
            model: a plain module. If ranks have built it with different values, all take rank 0's. A model that was
                built in a `LazyInitContext` gets the values that it would have had. Another model on `meta` is built by
                transformers, if it can, else by its modules' `reset_parameters` in order.
            optimizer: an optimizer of its parameters. The returned optimizer wraps the same object.
            criterion: any callable; returned as it is.
            dataloader: returned as it is; see `plugin.prepare_dataloader`.
            lr_scheduler: a scheduler of the optimizer. It counts the steps that the optimizer takes.
            example: the batch of one data rank, to weigh stages, as for `Balanced(by="flops")`.

        Returns:
            All five, in this order, None for those that were not given. The model is the same module; the optimizer is
            a `BoostedOptimizer`.

        Raises:
            ShardingError: an optimizer of other parameters, a model that is sharded already.
            ShardlibError: an error of `shard_model` on the plugin's plan, before any change.
        """
        carried = None if optimizer is None else Carried.of(optimizer, model)
        if carried is None and lr_scheduler is not None:
            raise ShardingError("boost was given a scheduler without its optimizer. Give both.")
        if lr_scheduler is not None and getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
            raise ShardingError("boost was given a scheduler of another optimizer. Give the one that it was built on.")
        device_mesh = self.mesh
        _begin_with_first_rank(model, device_mesh.device_type)
        shard_model(
            model,
            device_mesh,
            self.plugin.rules(model),
            transforms=self._transforms(model),
            init=_first_values(model),
            bucket_mb=self.plugin.bucket_mb(),
            example=example,
        )
        if getattr(self.plugin, "gradient_checkpoint_config", None) is not None:
            leave_to_plan(model)
        _add_names(model)
        boosted = None if carried is None else carried.onto(model, self._boosted_optimizer)
        if boosted is not None and lr_scheduler is not None:
            boosted.follow(lr_scheduler)
        if self.plugin.verbose and (not dist.is_initialized() or dist.get_rank() == 0):
            print(get_plan(model))
        return model, boosted, criterion, dataloader, lr_scheduler

    def _transforms(self, model: nn.Module) -> Transforms:
        given = self.mixed_precision
        return (*self.plugin.transforms(model), *(given.transforms(model) if given is not None else ()))

    def _boosted_optimizer(self, inner: torch.optim.Optimizer, model: nn.Module) -> BoostedOptimizer:
        return BoostedOptimizer(inner, model, max_norm=self.plugin.max_norm, norm_type=self.plugin.norm_type)

    def backward(self, loss: Any, optimizer: BoostedOptimizer) -> None:
        """Run backward of a loss: a scalar, or `(sum, count)` where ranks have unequal numbers of examples."""
        optimizer.backward(loss)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: BoostedOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """Accumulate gradients of the backward passes inside; the first one outside reduces the sum. Works with every
        plugin."""
        owner = model if model is not None else getattr(optimizer, "model", None)
        if owner is None:
            raise ShardingError("no_sync was given neither a boosted model nor a boosted optimizer. Give one of them.")
        return no_sync(owner)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], Any],
        optimizer: BoostedOptimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Run forward and backward of the next batch through all stages of a pipeline. All ranks call it.

        Call `optimizer.step()` after it. Inside of `no_sync` gradients are only accumulated; inside of
        `torch.no_grad()` there is no backward, and no optimizer is needed. Every plugin with stages has this.

        Args:
            data_iter: an iterator over batches, such as `iter(dataloader)`. All stages take the same batches, as
                a loader of `plugin.prepare_dataloader` yields them.
            model: the boosted model.
            criterion: a function (outputs, inputs) -> loss of a microbatch: the mean over its rows, or (sum, count).
            optimizer: the boosted optimizer.
            return_loss: return the loss.
            return_outputs: return the model's outputs for the full batch.

        Returns:
            `loss`: of all rows of all data ranks, on every rank (ColossalAI has the last stage's own); `outputs`: on
            the last stage's ranks. None for what was not requested.

        Raises:
            PlanError: a plugin without stages.
            ShardingError: no optimizer, while gradients are enabled.
            StageError: a stage has raised; raised on all ranks.
        """
        if get_plan(model).stages == ():
            raise PlanError(
                f"execute_pipeline: {self.plugin!r} has no stages. Give HybridParallelPlugin(pp_size=2, "
                "num_microbatches=4), or call model, criterion and booster.backward yourself."
            )
        if optimizer is None and torch.is_grad_enabled():
            raise ShardingError(
                "execute_pipeline was given no optimizer. Give the boosted one; to evaluate, call it inside of "
                "torch.no_grad()."
            )
        if not hasattr(data_iter, "__next__"):
            raise InputError(
                f"execute_pipeline was given a {type(data_iter).__name__} as data_iter; give an iterator, such as "
                "iter(dataloader), which goes on where the last call left it."
            )
        device = self.mesh.device_type
        batch = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), next(data_iter))
        done = pipeline_step(
            model,
            batch,
            criterion,
            optimizer=optimizer,
            microbatch_size=getattr(self.plugin, "microbatch_size", None),
            return_outputs=return_outputs,
            forward_only=not torch.is_grad_enabled(),
        )
        return {"loss": done.loss if return_loss else None, "outputs": done.outputs if return_outputs else None}

    # --- adapters -----------------------------------------------------------------------------------------------------

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: Path | None = None,
        lora_config: Any = None,
        bnb_quantization_config: Any = None,
        quantize: bool = False,
    ) -> nn.Module:
        """Add LoRA adapters by peft, before `boost`. With every plugin; the model's own weights are frozen.

        Args:
            model: a model that is not sharded; it is changed in place.
            pretrained_dir: adapters of `save_lora_as_pretrained` or peft, for further training.
            lora_config: a `peft.LoraConfig`, for new adapters; beside `pretrained_dir`, one that the saved ones have.
            bnb_quantization_config: None; refused.
            quantize: False; refused.

        Returns:
            peft's model, whose parameters the optimizer takes.

        Raises:
            PlanError: peft is not installed; neither folder nor configuration; a configuration that says otherwise than
                that of the folder; quantized weights.
            ShardingError: a model that is sharded, or on meta.
            CheckpointError: no adapters that can be read.
        """
        return add_lora(model, pretrained_dir, lora_config, bnb_quantization_config, quantize)

    def save_lora_as_pretrained(self, model: nn.Module, checkpoint: Path, use_safetensors: bool = False) -> None:
        """Save the adapters unsharded, as `peft.PeftModel.from_pretrained` reads them. Collective.

        Weights are always safetensors. Of the model's own weights only those of the configuration's `modules_to_save`
        are saved.

        Args:
            model: the model of `enable_lora`, boosted or not.
            checkpoint: a folder; earlier adapters in it are replaced.
            use_safetensors: either.

        Raises:
            ShardingError: a model without adapters.
            CheckpointError: the reason why it was not saved, on every rank.
        """
        save_lora(model, checkpoint)


def _add_names(model: nn.Module) -> None:
    """Add `unwrap` and `module` to the model's class, by a subclass of the same name, as `fully_shard` adds methods.

    What the class has by these names stays. An attribute would be copied with the model, and refer to the original.
    """
    if not isinstance(model, BoostedModule):
        kind = type(model)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        model.__class__ = type(kind.__name__, (kind, BoostedModule), names)


@torch.no_grad()
def _begin_with_first_rank(model: nn.Module, device_type: str) -> None:
    """Broadcast rank 0's parameters and buffers where ranks have different values, as `DistributedDataParallel` does.

    Otherwise a script that builds a second model would have to seed again: each data rank has its own random stream.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors = {name: tensor for name, tensor in agree.named_tensors(model).items() if not tensor.is_meta}
    reports = agree.exchange([(name, t.shape, t.dtype, agree.fingerprint(t)) for name, t in tensors.items()])
    if any([entry[:3] for entry in each] != [entry[:3] for entry in reports[0]] for each in reports):
        return  # other models: shard_model says which tensors differ
    for i, tensor in enumerate(tensors.values()):
        if any(each[i] != reports[0][i] for each in reports):
            sent = tensor.detach().to(device_type, copy=True).contiguous()
            dist.broadcast(sent, 0)
            tensor.detach().copy_(sent)


def _first_values(model: nn.Module) -> str | None:
    """Return how a model on meta is materialized, as an argument of `shard_model`."""
    blank = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    return None if not blank or any(map(is_recorded, blank)) or build_again(model) else "reset_parameters"
