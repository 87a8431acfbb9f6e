"""An engine of vLLM beside ranks of a training job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from tests.vllm.families import PROMPTS

__all__ = ["compare", "engine"]

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@contextmanager
def engine(folder: str, workers: int, **options: Any) -> Iterator[Any]:
    """Start vLLM in processes of its own, which do not join torchrun's job."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    ours = {name: os.environ.pop(name) for name in [*os.environ] if name in _OF_TORCHRUN or "TORCHELASTIC" in name}
    from vllm import LLM

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        tensor_parallel_size=workers,
        **{"weight_transfer_config": {"backend": "shardlib"}, **options},
    )
    os.environ |= ours
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def compare(llm: Any, alone: transformers.PreTrainedModel) -> float:
    """Return how far vLLM's log-probabilities of greedy tokens are from those of a model on one device.

    Raises:
        AssertionError: it gives other tokens.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, logprobs=0)
    answers = llm.generate([{"prompt_token_ids": [*prompt]} for prompt in PROMPTS], sampling, use_tqdm=False)
    apart = 0.0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, want = [*answer.outputs[0].token_ids], _greedy(alone, prompt)
        assert tokens == want, f"vLLM gives {tokens}, and transformers {want}"
        with torch.no_grad():
            logits = alone(torch.tensor([[*prompt, *want]])).logits[0]
        ours = torch.log_softmax(logits, -1)[range(len(prompt) - 1, len(prompt) + 7), want]
        theirs = [given[token].logprob for given, token in zip(answer.outputs[0].logprobs, tokens, strict=True)]
        apart = max(apart, (ours - torch.tensor(theirs)).abs().max().item())
    return apart


def _greedy(alone: transformers.PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return alone.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
