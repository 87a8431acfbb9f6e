"""vLLM answers TRL's `GRPOTrainer` with the weights of the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.jobs import TWO_RANKS, run


@pytest.mark.parametrize("sharding", ["dp=2 | zero(3)", "tp=2"])
def test_vllm_answers_with_the_weights_of_the_step(sharding: str, tmp_path: Path):
    printed = run(*TWO_RANKS, "tests/vllm/grpo.py", sharding, tmp_path)
    assert printed.count("right") == 2 and printed.count("log-probabilities are") == 2 * 3, printed
