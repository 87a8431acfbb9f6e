"""After steps and transfers vLLM generates what transformers does with the full model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.vllm.families import LORA

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
    script = [str(ROOT / "tests" / "vllm" / "trained.py"), family, mesh, str(workers), str(tmp_path / "model")]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script, *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0 and run.stdout.count("right") == 2, run.stdout + run.stderr
    assert run.stdout.count("log-probabilities are") == 3
