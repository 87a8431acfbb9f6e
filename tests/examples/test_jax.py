"""The example of flax trains alike on every mesh, goes on from a checkpoint of another one, and needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

_WITHOUT_TORCH = """
import runpy, sys
sys.argv[0] = "examples/nnx_gpt.py"
runpy.run_path(sys.argv[0], run_name="__main__")
assert "torch" not in sys.modules
"""


def _losses(*options: str) -> dict[int, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _WITHOUT_TORCH, *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "blocks.{0-1}.up.kernel" in run.stdout  # the plan
    steps = [line.split() for line in run.stdout.splitlines() if line.startswith("step")]
    return {int(words[1]): float(words[3]) for words in steps}


def test_a_gpt_of_flax_trains_and_goes_on_by_a_rule_file(tmp_path: Path):
    one = _losses("--mesh", "dp=1,tp=1", "--steps", "3", "--zero", "0")
    four = ("--devices", "4", "--folder", str(tmp_path))
    begun = _losses("--mesh", "dp=2,tp=2", "--steps", "2", "--zero", "3", *four)
    gone_on = _losses("--mesh", "dp=1,tp=4", "--steps", "3", *four)
    assert (begun.keys(), gone_on.keys()) == ({0, 1}, {2})
    assert begun | gone_on == pytest.approx(one, rel=1e-11)  # printed with 12 decimals
