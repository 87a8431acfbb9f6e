"""examples/rl_vllm.py learns, and the engine has the weights that it has learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.jobs import TWO_RANKS, run

# Of log-probabilities in float32, as tests/vllm/trained.py says. Those of a step before are 0.5 off and more.
_ROUNDING = 2e-4
_SMALL = ["--steps", "8", "--prompts", "16", "--group", "8", "--lr", "2e-3"]


def _curve(folder: Path, *words: str) -> list[dict[str, Any]]:
    file = folder / "curve.json"
    run(*words, *_SMALL, "--json", file)
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _curve(tmp_path_factory.mktemp("alone"), "examples/rl_vllm.py", "--alone")


@pytest.mark.parametrize("options", [["--mesh", "dp=2", "--transform", "zero(3)"], ["--mesh", "tp=2"]])
def test_a_sharded_policy_learns_as_on_one_device(alone: list[dict[str, Any]], options: list[str], tmp_path: Path):
    sharded = _curve(tmp_path, *TWO_RANKS, "examples/rl_vllm.py", *options)
    for curve in (alone, sharded):
        assert max(step["gap"] for step in curve) < _ROUNDING
    # Rounding has not yet sampled another token.
    assert [step["reward"] for step in sharded[:4]] == [step["reward"] for step in alone[:4]]
    assert [step["entropy"] for step in sharded[:4]] == pytest.approx([step["entropy"] for step in alone[:4]], abs=1e-5)
    assert sharded[-1]["reward"] > 2 * sharded[0]["reward"]
