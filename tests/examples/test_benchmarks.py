"""The benchmarks run, and write figures of one form: no test says how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from _report import alternate, compared

from tests.house.source import ROOT
from tests.main_on_ranks import run_script

BENCHMARKS = sorted(file.name for file in (ROOT / "benchmarks").glob("[!_]*.py"))
# What a test has time for: variants of one size. Others take the compiler, other peers or minutes.
ON_TWO_RANKS = {
    "boosters.py": ("TorchDDPPlugin, directly", "TorchDDPPlugin, boosted"),
    "data_parallel.py": ("fully_shard, fused AdamW", "fully_shard", "shardlib, zero(3)"),
    "pipeline.py": ("Schedule1F1B, fused AdamW", "Schedule1F1B", "shardlib, 1f1b"),
    "tensor_parallel.py": ("parallelize_module, fused AdamW", "parallelize_module", "shardlib"),
}
ON_ONE_RANK = ("gpu.py", "setup.py")
_USUAL = "data_parallel.py", "pipeline.py"  # the others are of one form with these
BY_PYTHON = (
    "op_rules.py",
    pytest.param("planning.py", marks=pytest.mark.deep),
    pytest.param("gpu.py", marks=pytest.mark.deep),
)  # which starts torchrun


def _written(file: Path) -> dict:
    written = json.loads(file.read_text())
    assert {"cores", "python", "torch"} <= written["machine"].keys()
    return written["results"]


@pytest.mark.parametrize(
    "name", [name if name in _USUAL else pytest.param(name, marks=pytest.mark.deep) for name in ON_TWO_RANKS]
)
def test_steps_are_compared_with_peers_that_have_the_same_optimizer(tmp_path: Path, name: str):
    base, *others = ON_TWO_RANKS[name]
    options = ["--size", "tiny", "--rounds", "2", "--only", *ON_TWO_RANKS[name], "--json", str(tmp_path / "f.json")]
    run_script(ROOT / "benchmarks" / name, *options, processes=2)
    rows = _written(tmp_path / "f.json")["tiny"]
    assert [row["variant"] for row in rows] == [base, *others]
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        low, high = row["middle_half"]
        assert low <= row["ratio"] <= high and row["rounds"] == 2
    assert list(rows[-1]["beside"]) == [base]
    assert rows[-1]["beside"][base]["ratio"] == rows[-1]["ratio"]


def test_weights_move_with_the_least_bytes(tmp_path: Path):
    run_script(ROOT / "benchmarks" / "transfer.py", "--quick", "--json", str(tmp_path / "f.json"), processes=4)
    for found in _written(tmp_path / "f.json").values():
        assert 0 < found["sent_bytes"] == found["bound_bytes"]
        assert found["seconds"].keys() == {"transfer", "full state dict", "checkpoint in memory"}


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_what_needs_one_rank_writes_its_figures(tmp_path: Path, name: str):
    run_script(ROOT / "benchmarks" / name, "--quick", "--json", str(tmp_path / "f.json"), processes=1)
    assert _written(tmp_path / "f.json")


def test_published_rules_are_audited(tmp_path: Path):
    """A golden file that says what the rules say, one that does not, and a configuration with an axis of no mesh."""
    configs = tmp_path / "src" / "maxtext" / "configs"
    (configs / "models").mkdir(parents=True)
    (configs / "base.yml").write_text(
        "mesh_axes: [fsdp]\nlogical_axis_rules: [[embed, fsdp], [mlp, tensor], [mlp, tensor]]"
    )
    (configs / "models" / "one.yml").write_text("base_emb_dim: 4")
    (tmp_path / "src" / "maxtext" / "layers.py").write_text("NAMES = ('embed',)")
    golden = tmp_path / "tests/utils/sharding_info/one/tpu/slice_1/rule_default"
    golden.mkdir(parents=True)
    keys = [f".params/['params']/['{name}']" for name in ("right", "wrong")]
    logical = {key: {"partition_spec": ["embed", None], "shape": [4, 8]} for key in keys}
    (golden / "logical_shardings.json").write_text(json.dumps(logical))
    mesh = {"mesh": {"shape": {"fsdp": 2}}, "shape": [4, 8]}
    named = {key: mesh | {"partition_spec": spec} for key, spec in zip(keys, (["fsdp"], [None, "fsdp"]), strict=True)}
    (golden / "named_shardings.json").write_text(json.dumps(named))
    command = [
        sys.executable,
        "benchmarks/jax_rules.py",
        "--maxtext",
        str(tmp_path),
        "--json",
        str(tmp_path / "f.json"),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    written = _written(tmp_path / "f.json")
    assert [each["other_than_golden"] for each in written["maxtext_golden"]] == [["params.wrong"]]
    assert written["maxtext_configs"] == [
        {
            "file": "configs/base.yml",
            "axes_not_in_mesh_axes": {"mlp": ["tensor"]},
            "pairs_that_never_apply": [["mlp", ["tensor"]]],
            "names_in_no_python_file": ["mlp"],
        }
    ]


@pytest.mark.parametrize("name", BY_PYTHON)
def test_what_starts_processes_writes_its_figures(tmp_path: Path, name: str):
    command = [sys.executable, f"benchmarks/{name}", "--quick", "--json", str(tmp_path / "f.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert _written(tmp_path / "f.json")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_takes_quick_and_json(name: str):
    source = (ROOT / "benchmarks" / name).read_text()
    assert "parser(__doc__)" in source and "write(args" in source


def test_rounds_are_compared_one_by_one():
    assert compared([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == {"ratio": 3.0, "middle_half": (2.5, 3.5)}
    assert compared([3.0], [2.0]) == {"ratio": 1.5, "middle_half": (1.5, 1.5)}
    assert [order[0] for order in alternate(["a", "b"], 4)] == ["a", "b", "b", "a"]
