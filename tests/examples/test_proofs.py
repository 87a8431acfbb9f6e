"""The examples that prove a model: sharded by hand, and in the CI of a repository of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fully_sharded
import parallelized
import pytest

from tests.house.source import ROOT


def _run(command: list[str], folder: Path, **environment: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_fully_shard_by_hand_is_proved():
    assert str(fully_sharded.prove()).startswith("equivalent to a single device")


def test_the_line_forgotten_by_hand_is_found_and_mending_it_is_proved():
    forgotten = _run([sys.executable, "examples/by_hand/parallelized.py"], ROOT)
    assert forgotten.startswith("NOT equivalent to a single device")
    assert (
        "First difference, step 0: the gradient of blocks.0.norm2.weight (4 of 37 parameters' gradients differ"
        in forgotten
    )
    assert "the sum of what the ranks of tp hold is right: a reduction over tp is missing" in forgotten
    assert str(parallelized.prove(mended=True)).startswith("equivalent to a single device")


def test_the_ten_lines_of_the_readme_prove_its_model(pytester: pytest.Pytester):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    model = blocks[0][: blocks[0].index("torch.manual_seed(0)")]
    (proof,) = [block for block in blocks if "assert_equivalent" in block]
    pytester.makepyfile(test_mine=f"{model}\n{proof}")
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy elsewhere, as a user has it."""
    return Path(shutil.copytree(ROOT / "examples" / "ci", tmp_path_factory.mktemp("user") / "forecast"))


def test_the_ci_of_a_users_repository_passes(repository: Path):
    printed = _run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider"], repository, PYTHONPATH=".")
    assert "3 passed" in printed


def test_its_layout_is_checked(repository: Path):
    check = [
        sys.executable,
        "-m",
        "shardlib.cli",
        "check",
        "forecast.model:Forecaster",
        "--layout",
        "forecast/layout.toml",
    ]
    assert "The layout fits" in _run(check, repository, PYTHONPATH=".")


def test_its_ci_fails_for_a_model_whose_rows_depend_on_each_other(repository: Path, tmp_path: Path):
    """A mean over the rows of the batch: a data rank takes it over its own rows."""
    broken = Path(shutil.copytree(repository, tmp_path / "broken"))
    model = broken / "forecast" / "model.py"
    text = model.read_text()
    assert "self.entry(x)" in text
    model.write_text(text.replace("self.entry(x)", "self.entry(x - x.mean(0))"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "our_layout"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    run = subprocess.run(command, cwd=broken, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert "NotEquivalentError" in run.stdout
    assert "First difference, step 0: what (the model's own forward) computes for entry" in run.stdout
