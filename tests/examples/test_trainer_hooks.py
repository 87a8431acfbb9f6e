"""The example of the older manner learns real digits, and its numbers are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.house.source import ROOT

# In float32 sums in another order differ in the last digits, and AdamW's first steps make much of them; what is wrong
# differs in the first.
NEAR = 2e-2


def _run(folder: Path, processes: int, *options: str) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    result = folder / f"{processes}{len(options)}.json"
    command = [sys.executable, *(launcher if processes > 1 else []), "examples/trainer_hooks.py", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*command, "--json", str(result)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(result.read_text()) | {"printed": run.stdout, "logged": run.stderr}


def test_digits_are_learned_and_the_numbers_are_those_of_one_device(tmp_path: Path):
    one = _run(tmp_path, 1, "--epochs", "3")
    two = _run(tmp_path, 2, "--epochs", "3", "--checkpoints", str(tmp_path / "saved"))
    assert one["accuracies"][-1] > 0.95 and "accuracy on 360 digits: 9" in one["printed"]
    assert two["losses"] == pytest.approx(one["losses"], rel=NEAR)
    assert "rank 0 of 2: [Epoch 3 / Test]: Loss = " in two["logged"]
    assert len(list((tmp_path / "saved").iterdir())) == 3
