"""After steps and transfers vLLM generates what transformers does with the full model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.families import LORA
from tests.vllm.jobs import TWO_RANKS, run

_CASES = [
    ("llama", "dp=2", 2, ["--zero", "3"]),
    ("llama-tied", "tp=2", 2, []),
    ("qwen3", "tp=2", 1, []),
    ("gemma3", "dp=2", 2, ["--zero", "3"]),
    ("mixtral", "ep=2", 2, []),
    ("qwen3-moe", "tp=2", 2, []),
    (LORA, "dp=2", 1, ["--zero", "3"]),
]


@pytest.mark.parametrize(("family", "mesh", "workers", "options"), _CASES)
def test_vllm_generates_what_the_full_model_does(
    family: str, mesh: str, workers: int, options: list[str], tmp_path: Path
):
    printed = run(*TWO_RANKS, "tests/vllm/trained.py", family, mesh, workers, tmp_path / "model", *options)
    assert printed.count("right") == 2 and printed.count("log-probabilities are") == 3, printed
