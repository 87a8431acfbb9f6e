"""One script for `GRPOTrainer` of TRL: on ranks with our mixin, in one process without."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.at_scale import plans_at_scale
from tests.families.transformer_models import build
from tests.integrations.accelerated import reset
from tests.integrations.trained import Ran, data_ranks, trainer_class

import transformers  # isort: skip  # after what makes torchvision importable

LENGTH = 4  # of an answer
GROUP = 4
_BATCH = 16


def drawn(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Answers that are drawn by prompt, step, and place in the group: the same wherever a prompt is."""
    answers = []
    for number, prompt in enumerate(prompts):
        draw = random.Random(f"{prompt} {trainer.state.global_step} {number % GROUP}")
        answers.append([draw.randrange(3, 67) for _ in range(LENGTH)])
    asked = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    return {"prompt_ids": asked, "completion_ids": answers, "logprobs": [[0.0] * LENGTH for _ in answers]}


def even(completions: list[str], **_: Any) -> list[float]:
    """Reward even numbers, and small ones a little."""
    numbers = [[int(word) for word in text.split()] for text in completions]
    return [sum((1 - each % 2) - each / 1000 for each in answer) for answer in numbers]


@plans_at_scale()
def samples(sharding: str | None, folder: str, answers: Any = None, **options: Any) -> Ran:
    """Train a small Llama. Answers are those of a function, or else sampled from the model.

    Args:
        sharding: ours, or None for TRL's own trainer.
        folder: of the run.
        answers: a `rollout_func`.
        **options: of the config.
    """
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    reset()
    kind, more = trainer_class(trl.GRPOTrainer, sharding)
    torch.manual_seed(0)
    model = build("LlamaForCausalLM")
    model.config.pad_token_id, model.config.eos_token_id = 0, 2
    words = Tokenizer(models.WordLevel({str(number): number for number in range(67)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0"
    )
    args = trl.GRPOConfig(
        folder,
        **{
            "use_cpu": True,
            "bf16": False,
            "activation_checkpointing": False,
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": _BATCH // data_ranks(sharding),
            "num_generations": GROUP,
            "max_completion_length": LENGTH,
            "max_steps": 4,
            "num_iterations": 2,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-4,
            **options,
        },
    )
    data = datasets.Dataset.from_list([{"prompt": f"{number} {number + 1}"} for number in range(3, 35)])
    training = kind(
        model,
        args=args,
        reward_funcs=even,
        train_dataset=data,
        processing_class=tokenizer,
        rollout_func=answers,
        **more,
    )
    training.train()
    kept = "loss", "grad_norm", "reward", "reward_std", "entropy"
    done = Ran(
        [
            {name: entry[name] for name in kept if name in entry}
            for entry in training.state.log_history
            if "loss" in entry
        ]
    )
    state = training.accelerator.get_state_dict(training.model)
    done.weights = {name: value.detach().clone() for name, value in state.items()}
    reset()
    return done
