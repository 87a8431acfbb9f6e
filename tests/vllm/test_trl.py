"""vLLM answers TRL's `GRPOTrainer` with the weights of the step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT


@pytest.mark.parametrize("sharding", ["dp=2 | zero(3)", "tp=2"])
def test_vllm_answers_with_the_weights_of_the_step(sharding: str, tmp_path: Path):
    words = [str(ROOT / "tests" / "vllm" / "grpo.py"), sharding, str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0 and run.stdout.count("right") == 2, run.stdout + run.stderr
    assert run.stdout.count("log-probabilities are") == 2 * 3
