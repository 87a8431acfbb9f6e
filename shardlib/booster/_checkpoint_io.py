"""`GeneralCheckpointIO`: the checkpoints of a booster, which any plugin loads on any mesh."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from shardlib import checkpoint as checkpoints
from shardlib.booster._files import refuse_to_replace
from shardlib.booster._optimizer import BoostedOptimizer
from shardlib.booster._options import refuse_argument, say_once
from shardlib.checkpoint import Saving
from shardlib.checkpoint._save import wait_for_saving
from shardlib.errors import ShardingError

__all__ = ["GeneralCheckpointIO", "Path"]

Path = str | os.PathLike[str]


class GeneralCheckpointIO:
    """Saves and loads models, boosted or not, and boosted optimizers and schedulers. A `Booster` is one."""

    def save_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> Saving:
        """Save the model's tensors, unsharded and by their own names. Collective: every rank calls it.

        Files are always safetensors, whatever the path is called; nothing is pickled.

        Args:
            model: boosted or not.
            checkpoint: a file; with `shard`, a folder, which is replaced.
            shard: write a folder as Hugging Face does, with an index and the model's `config.json`.
            gather_dtensor: True; files always have unsharded tensors, which are all-gathered one at a time.
            prefix: with `shard`, a word in the names of files, which `from_pretrained(folder, variant=...)` takes. An
                empty one is none.
            size_per_shard: megabytes of a file, with `shard`.
            use_safetensors: either; see above.
            use_async: copy the tensors, and write them while training continues. `wait()` of the result, the next save
                and the next load wait for it.

        Raises:
            CheckpointError: the reason why it was not saved, on every rank. An earlier checkpoint is still there.
        """
        refuse_argument("save_model", "gather_dtensor", gather_dtensor, True)
        prefix = prefix or None
        refuse_argument("save_model", "prefix", None if shard else prefix, None)
        if shard:
            refuse_to_replace(checkpoint, "model")
        kind = "huggingface" if shard else "file"
        options: dict[str, Any] = {"shard_mb": size_per_shard, "background": use_async, "random": False}
        return checkpoints.save(checkpoint, model, weights=kind, variant=prefix, **options)

    def load_model(
        self,
        model: nn.Module,
        checkpoint: Path,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load a checkpoint of `save_model` or `shardlib.save`, with any plugin on any mesh, or Hugging Face's files.

        Collective. Each rank reads its own slices; dtypes are converted.

        Args:
            model: the model whose tensors are overwritten.
            checkpoint: a file, a folder, or the index in one.
            strict: raise if a name is only in the model or only in the checkpoint.
            low_cpu_mem_mode: either; no rank holds all of the model.
            num_threads: any number; each rank reads in one thread.

        Raises:
            CheckpointError: the reason why it does not fit, on every rank. Pickled files are not read.
        """
        _met(low_cpu_mem_mode, num_threads)
        checkpoints.load(checkpoint, model, strict=strict, cast=True, random=False)

    def save_optimizer(
        self,
        optimizer: BoostedOptimizer,
        checkpoint: Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: float = 1024,
        use_async: bool = False,
    ) -> Saving:
        """Save the optimizer's groups and state, and the loss scale. Collective.

        Args:
            optimizer: the boosted optimizer.
            checkpoint: a folder, also without `shard`. Each rank writes its local shards.
            shard: limit files to `size_per_shard` megabytes.
            gather_dtensor: as in `save_model`.
            prefix: None or empty; only `load_optimizer` reads these files.
            size_per_shard: as in `save_model`.
            use_async: as in `save_model`.

        Raises:
            CheckpointError: the reason why it was not saved.
        """
        refuse_argument("save_optimizer", "gather_dtensor", gather_dtensor, True)
        refuse_argument("save_optimizer", "prefix", prefix or None, None)
        refuse_to_replace(checkpoint, "optimizer")
        return checkpoints.save(
            checkpoint,
            _model_of(optimizer),
            optimizer,
            weights="none",
            shard_mb=size_per_shard if shard else 2.0**40,
            background=use_async,
            random=False,
        )

    def load_optimizer(
        self, optimizer: BoostedOptimizer, checkpoint: Path, low_cpu_mem_mode: bool = True, num_threads: int = 1
    ) -> None:
        """Load a checkpoint of `save_optimizer` or `shardlib.save`, with any plugin on any mesh. Collective.

        Where parameters are stored in low precision and the optimizer has master copies, load the model before its
        optimizer.

        Raises:
            CheckpointError: the reason why it does not fit.
        """
        _met(low_cpu_mem_mode, num_threads)
        model = _model_of(optimizer)
        checkpoints.load(checkpoint, model, optimizer, weights=False, cast=True, random=False)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: Path) -> Saving:
        """Save a scheduler's state to a folder. Collective."""
        refuse_to_replace(checkpoint, "lr_scheduler")
        return checkpoints.save(checkpoint, lr_scheduler=lr_scheduler, random=False)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: Path) -> None:
        """Load a scheduler's state; the optimizer's groups have been loaded before, with the optimizer. Collective."""
        checkpoints.load(checkpoint, lr_scheduler=lr_scheduler, random=False)

    def _sync_io(self) -> None:
        """Wait until what was saved with `use_async` is written."""
        wait_for_saving()

    def _sync_d2h(self) -> None:
        """Return at once: tensors are copied when `save_model(use_async=True)` returns."""


def _model_of(optimizer: Any) -> nn.Module:
    if not isinstance(optimizer, BoostedOptimizer):
        raise ShardingError(
            f"A {type(optimizer).__name__} was given as optimizer; give the one that boost returned, which knows the "
            "names of its parameters."
        )
    return optimizer.model


def _met(low_cpu_mem_mode: bool, num_threads: int) -> None:
    if not low_cpu_mem_mode or num_threads != 1:
        say_once(
            f"load(low_cpu_mem_mode={low_cpu_mem_mode}, num_threads={num_threads}): each rank maps files and reads its "
            "own slices of them, in one thread, with or without these keywords."
        )
