"""A configuration of torchtitan, and what an audit says of a loss of one's own.

    python examples/audit/train_torchtitan.py             the loss is a mean over each rank's tokens
    python examples/audit/train_torchtitan.py --mended    it is divided by the number of all ranks' tokens

torchtitan's FSDP sums gradients over ranks. With a mean they are too large by the number of data ranks, which AdamW and
clipping hide.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from shardlib.testing import audit

Batch = dict[str, torch.Tensor]
VOCABULARY, LENGTH = 2048, 32

job = llama3_debugmodel()
job.training.seq_len = LENGTH
job.parallelism = ParallelismConfig(
    data_parallel_shard_degree=2, tensor_parallel_degree=2, spmd_backend="partial_dtensor"
)


def build() -> nn.Module:
    config = job.model_spec.model
    config.layers = config.layers[:2]
    config.update_from_config(config=job)
    model = config.build()
    model.init_states()
    return model


def shard(model: nn.Module) -> nn.Module:
    utils.set_spmd_backend(job.parallelism.spmd_backend)
    dims = ParallelDims.from_config(job.parallelism, dist.get_world_size())
    dims.build_mesh()
    return job.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=job.training,
        parallelism=job.parallelism,
        compile_config=job.compile,
        ac_config=job.activation_checkpoint,
        dump_folder=job.dump_folder,
    )


def summed(model: nn.Module, batch: Batch) -> torch.Tensor:
    masks = model.get_attention_masks(batch["positions"])  # type: ignore[operator]
    logits = model(batch["input"], batch["positions"], masks)
    return cross_entropy_loss(logits, batch["labels"])


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return summed(model, batch) / (batch["labels"] != -100).sum()


def loss_mended(model: nn.Module, batch: Batch) -> torch.Tensor:
    return summed(model, batch) / batch["global_valid_tokens"]


def batch(step: int) -> Batch:
    """Return a global batch of four sequences. A tensor without rows goes to every rank."""
    ids = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {
        "input": ids[:, :-1],
        "labels": ids[:, 1:],
        "positions": torch.arange(LENGTH).expand(4, LENGTH),
        "global_valid_tokens": torch.tensor(4 * LENGTH),
    }


if __name__ == "__main__":
    report = audit(build, shard, "dp=2,tp=2", batch, loss=loss_mended if "--mended" in sys.argv else loss)
    print(report)
    sys.exit(0 if report else 1)
