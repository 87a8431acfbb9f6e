"""`Trainer` and `Seq2SeqTrainer` of transformers on models that are sharded by a plan, and a mixin for others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import seed_worker
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, is_peft_available

from shardlib._mesh_shape import MeshLike
from shardlib.checkpoint import load, save
from shardlib.engine import full_state_dict
from shardlib.errors import CheckpointError, PlanError
from shardlib.integrations import tracking
from shardlib.integrations._options import Transforms, refuse
from shardlib.integrations._versions import warn_if_untested
from shardlib.integrations.accelerate import Accelerator, inner_optimizer

if is_peft_available():
    from peft import PeftModel, get_peft_model_state_dict

__all__ = ["Seq2SeqTrainer", "ShardedTrainerMixin", "Sharding", "Trainer"]

_FOLDER = "shardlib"  # of a checkpoint: the state of optimizer, scheduler and random numbers
_UNTRIED = "It has not been tried on sharded models: leave it out."
# Arguments that say something if they are true.
_REFUSED = {
    "fsdp": 'Write sharding="dp=-1 | fsdp()".',
    "deepspeed": 'Write sharding="dp=-1 | zero(2)", or another stage.',
    "parallelism_config": 'Name the axes in sharding="dp=2,tp=2".',
    "torch_compile": 'Write sharding=Sharding(..., compile="inductor"), which compiles the blocks of the model.',
    "fp16_full_eval": "A sharded model keeps its dtype. Write fp16=True, whose autocast is on in evaluation too.",
    "bf16_full_eval": "A sharded model keeps its dtype. Write bf16=True, whose autocast is on in evaluation too.",
    "auto_find_batch_size": "A model is sharded once. Find the batch size by a plan with an example: shardlib.plan.",
    "enable_jit_checkpoint": "All ranks save together. Write save_strategy and save_steps.",
    "neftune_noise_alpha": _UNTRIED,
    "use_liger_kernel": _UNTRIED,
    "use_vllm": "TRL would take shards for full parameters. Write GRPOTrainer(..., rollout_func=vllm_rollouts(llm)), "
    "of shardlib.integrations.trl.",
}


@dataclass(frozen=True)
class Sharding:
    """Mesh, rules and transforms that a trainer shards its model by.

    Args:
        mesh: "dp=2,tp=2", a `MeshShape`, or a `DeviceMesh` with named axes; one size may be -1.
        rules: as for `shard_model`; None finds the layout file of the model's class.
        transforms: text such as "zero(2)", a transform, or several.
        compile: the backend that compiles repeated blocks, as for `shard_model`; None compiles nothing.

    >>> Sharding.of("dp=2,tp=2 | zero(2)")
    Sharding(mesh='dp=2,tp=2', rules=None, transforms='zero(2)', compile=None)
    """

    mesh: MeshLike = "dp=-1"
    rules: Any = None
    transforms: Transforms = None
    compile: str | None = None

    @classmethod
    def of(cls, given: str | Sharding | None) -> Sharding:
        """Return the sharding of a text: a mesh, and transforms after a bar.

        Raises:
            PlanError: something else.
        """
        if given is None or isinstance(given, Sharding):
            return given or cls()
        if not isinstance(given, str):
            raise PlanError(
                f'sharding={given!r} was given; give text such as "dp=2,tp=2 | zero(2)", or '
                'Sharding(mesh="dp=2,tp=2", rules=..., transforms=...).'
            )
        mesh, _, transforms = given.partition("|")
        return cls(mesh.strip(), transforms=transforms.strip() or None)


class ShardedTrainerMixin:
    """Lets a subclass of `transformers.Trainer` train a sharded model; write it before the trainer's class.

    The trainer's arguments stay as they are. Batch sizes are those of a data rank: ranks that differ only on model
    axes get the same batches. On CPUs, give `TrainingArguments(use_cpu=True)`.

    Args:
        *args, **options: the trainer's own.
        sharding: text such as "dp=2,tp=2 | zero(2)", or a `Sharding`; by default every process is a data rank.

    Raises:
        PlanError: training arguments that shard or compile by other means.

    >>> class Seq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):  # or trl.SFTTrainer, or your own
    ...     pass
    >>> Seq2SeqTrainer.__mro__[1].__name__
    'ShardedTrainerMixin'
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    compute_loss_func: Any
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    current_flos: Any
    _train_batch_size: int

    def __init__(self, *args: Any, sharding: str | Sharding | None = None, **options: Any) -> None:
        self.sharding = Sharding.of(sharding)
        self._accelerator_options: dict[str, Any] = {}
        self._ignores_count: bool | None = None
        self._unsharded: dict[str, Any] | None = None  # while the model is saved
        super().__init__(*args, **options)
        self.add_callback(_LogsPlan(self))  # type: ignore[attr-defined]

    # --- the accelerator ----------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        self._accelerator_options = super()._build_accelerator_args(**options)  # type: ignore[misc]
        return self._accelerator_options

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator that shards."""
        _refuse(self.args, self.model)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        how = self.sharding
        self.accelerator = Accelerator(
            mesh=how.mesh,
            rules=how.rules,
            transforms=how.transforms,
            compile=how.compile,
            **{"cpu": self.args.use_cpu, **self._accelerator_options},
        )
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        if hasattr(self.args, "generation_batch_size"):
            self._count_answers()

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave the model where it is: `shard_model` puts each rank's shards on its device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the accelerator has the norm of all gradients

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of examples in a step of all data ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        loader = super()._get_dataloader(*args, **options)  # type: ignore[misc]
        if getattr(loader, "worker_init_fn", None) is not None:  # workers of one data rank draw the same numbers
            workers, rank = self.args.dataloader_num_workers, self.accelerator.process_index
            loader.base_dataloader.worker_init_fn = partial(seed_worker, num_workers=workers, rank=rank)
        return loader

    def store_flos(self) -> None:
        """Add this rank's operations to the total: ranks of one data rank work on the same examples."""
        self.current_flos *= self.accelerator.num_processes / self.accelerator.state.num_processes
        super().store_flos()  # type: ignore[misc]

    def hyperparameter_search(self, *args: Any, **options: Any) -> NoReturn:
        """Raise a `PlanError`."""
        raise PlanError(f"hyperparameter_search was called. {_UNTRIED}")

    # --- the loss -----------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as the trainer does, for a batch of this data rank.

        transformers multiplies the loss by the number of data ranks, since a loss that is divided by the number of all
        tokens has to be summed over them. Some models, such as T5, accept that number and return a mean nevertheless:
        theirs is divided again.
        """
        means = self._is_mean_after_all(model, inputs, num_items_in_batch)
        found = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if not means:
            return found
        ranks = self.accelerator.num_processes
        return (found[0] / ranks, found[1]) if return_outputs else found / ranks

    def _is_mean_after_all(self, model: nn.Module, inputs: Any, count: Any) -> bool:
        """Return whether the model's own loss is the same for every number of items; all ranks try it once."""
        host: Any = super()
        own = host.compute_loss.__func__ is transformers.Trainer.compute_loss and self.compute_loss_func is None
        smoothed = self.label_smoother is not None and "labels" in inputs
        multiplied = self.args.average_tokens_across_devices and self.model_accepts_loss_kwargs
        if count is None or self.accelerator.num_processes == 1 or not own or smoothed or not multiplied:
            return False
        if self._ignores_count is None:
            training = model.training
            model.eval()  # neither dropout nor statistics
            with torch.no_grad():
                losses = [host.compute_loss(model, dict(inputs), num_items_in_batch=count * k) for k in (1, 2)]
            model.train(training)
            changed = (losses[0] - losses[1]).abs().nan_to_num()
            self._ignores_count = self.accelerator.reduce(changed, "max").item() == 0
        return self._ignores_count

    # --- trainers of TRL that sample answers --------------------------------------------------------------------------

    def _count_answers(self) -> None:
        """Let the batch for which answers are sampled be that of the data ranks; TRL counts processes."""
        args = self.args
        size = args.per_device_train_batch_size * args.steps_per_generation * self.accelerator.num_processes
        if size % args.num_generations:
            raise PlanError(
                f"num_generations={args.num_generations} was given, and {size} answers are sampled at a time: "
                f"per_device_train_batch_size={args.per_device_train_batch_size} of {self.accelerator.num_processes} "
                f"data ranks, in {args.steps_per_generation} steps. Let the first divide the second."
            )
        args.generation_batch_size = size

    def _calculate_rewards(self, *args: Any, **options: Any) -> torch.Tensor:
        """Compute the rewards of all data ranks' answers. TRL gathers those of all processes."""
        every = super()._calculate_rewards(*args, **options)  # type: ignore[misc]
        state = self.accelerator.state
        mine = every.chunk(state.num_processes)[state.process_index]
        return self.accelerator.gather(mine)  # type: ignore[no-any-return]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights that the model would have on one device. All ranks call it, and all wait for the files."""
        self._unsharded = full_state_dict(self.model)
        try:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        finally:
            self._unsharded = None
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._unsharded if state_dict is None else state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = inner_optimizer(self.optimizer)
        save(Path(output_dir) / _FOLDER, self.model, optimizer, lr_scheduler=self.lr_scheduler, weights="none")

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: random states are with those of the optimizer."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        _load_weights(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        _load_weights(self.state.best_model_checkpoint, self.model)  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _FOLDER
        if folder.exists():
            optimizer = inner_optimizer(self.optimizer)
            load(folder, self.model, optimizer, lr_scheduler=self.lr_scheduler, weights=False, random=False)
        elif (Path(checkpoint) / "optimizer.pt").exists():
            raise CheckpointError(
                f'The optimizer state of "{checkpoint}" was written by transformers\' own Trainer, for a model that is '
                "not sharded. Start from its weights: from_pretrained, and train() without resume_from_checkpoint."
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (folder := Path(checkpoint) / _FOLDER).exists():
            load(folder, random=True)


class _LogsPlan(transformers.TrainerCallback):
    """Tells callbacks that report to trackers about the plan, and no others: it is not a part of the log history.

    It does so when the first epoch begins, which is after `on_train_begin` of callbacks that were added later too.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._told = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._told:
            self._told = True
            self._tell(args, state, control)

    def _tell(self, args: Any, state: Any, control: Any) -> None:
        reporting = tuple(INTEGRATION_TO_CALLBACK.values())
        callbacks: list[Any] = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, reporting)]
        if not callbacks or not state.is_world_process_zero:
            return
        model = self._trainer.model
        report = tracking.report(model)
        for one in callbacks:
            text = {"plan": report.text} if tracking.shows_text(one) else {}
            one.on_log(args, state, control, model=model, logs={**report.numbers, **text})
        report.write(args.output_dir)


class Trainer(ShardedTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on a sharded model: its arguments, and `sharding="dp=2,tp=2 | zero(2)"`.

    See `ShardedTrainerMixin`.
    """


class Seq2SeqTrainer(ShardedTrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on a sharded model: its arguments, and `sharding="dp=2,tp=2 | zero(2)"`.

    See `ShardedTrainerMixin`.
    """


def _refuse(args: Any, model: Any) -> None:
    """Raise a `PlanError` about training arguments, or a way to load the model, that a sharded model cannot follow."""
    refuse("TrainingArguments", vars(args), _REFUSED)
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise PlanError(
            f"TrainingArguments(train_sampling_strategy={args.train_sampling_strategy!r}) was given. Ranks of one data "
            'rank might draw different orders: write "random" or "sequential".'
        )
    if args.n_gpu > 1:
        raise PlanError(f"One process sees {args.n_gpu} GPUs. Start one process for each: torchrun --nproc_per_node.")
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise PlanError("The model was sharded by from_pretrained(distributed_config=...). Load it without.")


def _load_weights(folder: str, model: Any) -> None:
    """Load the weights that `save_pretrained` has written: those of the adapters alone, where peft has added some."""
    if not getattr(model, "peft_config", None):
        load(folder, model)
        return
    state = model.state_dict()
    added = not isinstance(model, PeftModel)  # by add_adapter: transformers saves the active one, by the names of peft
    for adapter in model.active_adapters() if added else model.peft_config:
        saved = get_peft_model_state_dict(model, state, adapter, save_embedding_layers=False)
        name_of = {id(value): name for name, value in state.items()}
        prefix = "base_model.model." if added else ""
        names = {prefix + there: name_of[id(value)] for there, value in saved.items()}
        file = Path(folder) / ("" if added or adapter == "default" else adapter) / ADAPTER_SAFE_WEIGHTS_NAME
        loaded = load(file, model, names=names, strict=False)
        if wrong := sorted({*names.values()} & {*loaded.missing} | {*loaded.unexpected}):
            raise CheckpointError(
                f'"{file}" does not have the tensors of the adapter "{adapter}"; only one of both has {wrong[:8]}. '
                "Build the model with the peft config that was saved."
            )


warn_if_untested("transformers", transformers.__version__, "5.23")
