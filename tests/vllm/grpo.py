"""Train a sharded Llama by TRL's `GRPOTrainer`, with answers of vLLM.

torchrun --nproc_per_node 2 grpo.py SHARDING FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardlib.integrations.transformers import ShardedTrainerMixin
from shardlib.integrations.trl import vllm_rollouts
from tests.vllm.engines import engine
from tests.vllm.families import model_of, write

_ROUNDING = 2e-4  # as in trained.py


class GRPOTrainer(ShardedTrainerMixin, trl.GRPOTrainer):
    pass


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(1.0 - token % 2 for token in answer) / len(answer) for answer in completion_ids]


def watched(rollouts: Any) -> Any:
    """Compare log-probabilities of vLLM with those of the model."""

    def answer(prompts: list[str], trainer: Any) -> dict[str, Any]:
        given = rollouts(prompts, trainer)
        rows = zip(given["prompt_ids"], given["completion_ids"], given["logprobs"], strict=True)
        apart = 0.0
        for asked, tokens, logprobs in rows:
            with torch.no_grad():
                logits = trainer.model(torch.tensor([[*asked, *tokens]])).logits[0].double()
            ours = torch.log_softmax(logits, -1)[range(len(asked) - 1, len(asked) + len(tokens) - 1), tokens]
            apart = max(apart, (ours - torch.tensor(logprobs)).abs().max().item())
        assert apart < _ROUNDING, apart
        print(f"step {trainer.state.global_step}: log-probabilities are {apart:.1e} apart")
        return given

    return answer


def main() -> None:
    sharding, folder = sys.argv[1], Path(sys.argv[2])
    args = trl.GRPOConfig(
        str(folder / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        max_steps=3,
        learning_rate=1e-2,
    )
    words = Tokenizer(models.WordLevel({str(number): number for number in range(200)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")
    prompts = datasets.Dataset.from_list([{"prompt": f"{number} {number + 1} {number + 2}"} for number in range(3, 67)])

    def train(llm: Any) -> None:
        trainer = GRPOTrainer(
            model_of("llama"),
            args=args,
            reward_funcs=even,
            train_dataset=prompts,
            processing_class=tokenizer,
            rollout_func=watched(vllm_rollouts(llm)),
            sharding=sharding,
        )
        trainer.train()
        assert all("loss" in entry for entry in trainer.state.log_history[:3])

    if dist.get_rank():
        train(None)
    else:
        write("llama", folder / "model")
        with engine(str(folder / "model"), 1, logprobs_mode="processed_logprobs") as llm:
            train(llm)
    print("right")


if __name__ == "__main__":
    main()
