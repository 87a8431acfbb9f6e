"""A training script for the tensor parallelism of transformers, and what an audit says of it.

    python examples/audit/train_transformers.py             two backward passes in a step
    python examples/audit/train_transformers.py --mended    one pass, of both batches

The script has no mistake. The plan that transformers 5.23 has for Qwen3 sums the gradients of the norms of heads over
ranks after each backward pass, together with what earlier passes have left: that is summed again.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from shardlib.testing import audit

VOCABULARY = 64
Batch = dict[str, torch.Tensor]


def build() -> PreTrainedModel:
    """Return a model of the classes that are trained, in small."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def shard(folder: str) -> PreTrainedModel:
    config = DistributedConfig(tp_size=int(os.environ["WORLD_SIZE"]), tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=config)
    return model.train()


def batch(step: int) -> Batch:
    """Return the ids of a global batch; the model shifts the labels."""
    ids = torch.randint(3, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def in_one_pass(model: PreTrainedModel, batches: list[Batch]) -> None:
    """Run the backward passes of a step as one."""
    model(**{name: torch.cat([each[name] for each in batches]) for name in batches[0]}).loss.backward()


if __name__ == "__main__":
    report = audit(build, shard, "tp=2", batch, accumulate=in_one_pass if "--mended" in sys.argv else None)
    print(report)
    sys.exit(0 if report else 1)
