"""TRL: a running vLLM answers the prompts of `GRPOTrainer` with the weights that its sharded model has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm import SamplingParams

from shardlib.engine.ranks import agree
from shardlib.errors import InputError
from shardlib.integrations.vllm import Connection, connect

__all__ = ["vllm_rollouts"]


def vllm_rollouts(llm: Any = None, **connecting: Any) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a `rollout_func` for TRL's `GRPOTrainer`, of which vLLM samples the answers.

    Before the first answers of a step, the engine is sent the weights that the trainer's model has. All that
    `GRPOConfig` says of sampling holds, and `generation_kwargs` are further `SamplingParams`. Each answer is drawn with
    a seed of its own, which follows from that of the config. Prompts are texts or conversations, without images.

    Args:
        llm: an `LLM` that was started with `weight_transfer_config={"backend": "shardlib"}` and
            `logprobs_mode="processed_logprobs"`, on one rank. None on the others.
        **connecting: arguments of `shardlib.integrations.vllm.connect`.

    Raises:
        InputError: an engine on no rank or on several.

    Example:
        ```python
        class GRPOTrainer(ShardedTrainerMixin, trl.GRPOTrainer):
            pass


        trainer = GRPOTrainer(model, ..., rollout_func=vllm_rollouts(llm), sharding="dp=2 | zero(3)")
        ```
    """
    return _Rollouts(llm, connecting)


class _Rollouts:
    def __init__(self, llm: Any, connecting: dict[str, Any]) -> None:
        self._llm, self._connecting = llm, connecting
        self._connection: Connection | None = None
        self._sent = -1  # the step whose weights the engine has
        self._calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Answer the prompts of this data rank. Collective over the job."""
        if self._connection is None:
            self._connection = connect(trainer.model, self._llm, **self._connecting)
        if trainer.state.global_step != self._sent:
            self._connection.send_weights()
            self._sent = trainer.state.global_step
            if self._llm is not None:
                self._llm.reset_prefix_cache()
        asked = _tokens(prompts, trainer)
        place = trainer.accelerator.process_index
        every = agree.exchange((place, asked, self._llm is not None))
        speaking = [rank for rank, (_, _, speaks) in enumerate(every) if speaks]
        if len(speaking) != 1:
            raise InputError(f"vllm_rollouts(llm) was given an engine on ranks {speaking}; give it on one.")
        self._calls += 1
        of_places = sorted({number: rows for number, rows, _ in every}.items())
        answers = None if self._llm is None else [self._sample(number, rows, trainer) for number, rows in of_places]
        return {"prompt_ids": asked, **agree.exchange(answers)[speaking[0]][place]}

    def _sample(self, place: int, prompts: list[list[int]], trainer: Any) -> dict[str, Any]:
        first = place * len(prompts)  # each row of the global batch has a seed of its own, on any mesh
        seeds = [random.Random(f"{trainer.args.seed} {self._calls} {first + row}") for row in range(len(prompts))]
        how = {
            "temperature": trainer.temperature,
            "top_p": trainer.top_p,
            "top_k": trainer.top_k,
            "min_p": trainer.min_p or 0.0,
            "repetition_penalty": trainer.repetition_penalty,
            "max_tokens": trainer.max_completion_length,
            "stop_token_ids": trainer.eos_token_ids,
            "logprobs": 0,
            "detokenize": False,
            **(trainer.args.generation_kwargs or {}),
        }
        sampling = [SamplingParams(**{"seed": seed.getrandbits(31), **how}) for seed in seeds]
        rows = [{"prompt_token_ids": row} for row in prompts]
        found = [answer.outputs[0] for answer in self._llm.generate(rows, sampling, use_tqdm=False)]
        tokens = [[*answer.token_ids] for answer in found]
        logprobs = [
            [at[token].logprob for at, token in zip(answer.logprobs, of_one, strict=True)]
            for answer, of_one in zip(found, tokens, strict=True)
        ]
        return {"completion_ids": tokens, "logprobs": logprobs}


def _tokens(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return the tokens of prompts as the trainer has them: of texts, or of conversations."""
    if isinstance(prompts[0], str):
        return [*trainer.processing_class(text=prompts)["input_ids"]]
    rendered = trainer.processing_class.apply_chat_template(
        prompts,
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [*rendered["input_ids"]]
