"""The examples for those who come from ColossalAI: their numbers are those of one device, whatever the plugin."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.house.source import ROOT
from tests.main_on_ranks import run_script
from tests.scripts import readme_line, run_shell
from tests.torchvision_on_cpu import import_torchvision

EXACT = 1e-10  # in float64
# In float32 a sum of some thousand terms in another order differs by about 1e-6. A tensor that is wrong, swapped or
# missing is off in the second digit.
SAME = 1e-5


def _on_ranks(script: str, options: list[str]) -> dict[str, Any]:
    """What a script's `run` returns; its ranks are the pool's."""
    import_torchvision()
    module = importlib.import_module(script)
    return module.run(module.parser().parse_args(options), torch.device("cpu"))


def _options(script: str) -> list[str]:
    """Those that README.md gives a script."""
    return readme_line(script).partition(f"{script}.py")[2].split()


def _by_torchrun(folder: Path, script: str, *options: str) -> dict[str, Any]:
    """What a script writes with `--json` when it is started as README.md says, and what it prints."""
    result = folder / "result.json"
    printed = run_shell(shlex.join([*readme_line(script).split(), *options, "--json", str(result)]), ROOT)
    return json.loads(result.read_text()) | {"printed": printed}


def _as_a_script(folder: Path, script: str, *options: str) -> dict[str, Any]:
    """The same on ranks of the pool, without a launcher."""
    result = folder / "result.json"
    given = [*_options(script), *options, "--json", str(result)]
    printed = run_script(ROOT / "examples" / f"{script}.py", *given, processes=2)
    return json.loads(result.read_text()) | {"printed": printed.out}


@pytest.mark.parametrize(
    ("start", "plugin", "then"),
    [
        (_as_a_script, "low_level_zero", "none"),
        pytest.param(_by_torchrun, "low_level_zero", "none", marks=pytest.mark.deep),
        pytest.param(_by_torchrun, "torch_ddp", "gemini", marks=pytest.mark.deep),
        pytest.param(_by_torchrun, "gemini", "torch_fsdp", marks=pytest.mark.deep),
        pytest.param(_by_torchrun, "torch_fsdp", "none", marks=pytest.mark.deep),
    ],
)
def test_an_epoch_of_resnet_on_two_ranks_is_that_of_one_device_from_their_checkpoint(
    tmp_path: Path, start: Callable[..., dict[str, Any]], plugin: str, then: str, ranks
):
    small = ["--epochs", "2", "--images", "32", "--batch-size", "16", "--size", "8", "--dtype", "float64"]
    small += ["--checkpoint", f"{tmp_path}/saved"]
    two = start(tmp_path, "booster_resnet", "--plugin", plugin, "--interval", "1", *small)
    (one,) = ranks(1).run(_on_ranks, "booster_resnet", ["--plugin", then, "--resume", "1", *small])
    assert len(two["losses"]) == 4 and "accuracy on digits never trained on" in two["printed"]
    assert one["losses"] == pytest.approx(two["losses"][2:], rel=EXACT)


# Half of the last digit of a number in float8 e4m3 (3 bits after the point). That of a mean over 64 images, whose
# errors have either sign, is less. A run whose steps are skipped stays at the first loss, which is further away.
LOW = 2**-4


def test_a_vit_learns_alike_in_every_precision_and_warms_up(ranks):
    names = "fp32", "fp16", "bf16", "fp8", "fp16_naive"
    small = ["--epochs", "1", "--layers", "1", "--width", "32", "--warmup", "0.5", "--lr", "1e-2"]
    runs, _ = ranks(2).run(_on_ranks, "booster_vit_amp", [*_options("booster_vit_amp"), *small])
    assert tuple(runs) == names
    exact = runs["fp32"]
    assert exact["losses"][-1] < (1 - 2 * LOW) * exact["losses"][0]
    assert exact["rates"][0] < exact["rates"][10] > exact["rates"][-1]
    assert len({tuple(run["losses"]) for run in runs.values()}) == len(names), "two names compute the same"
    for name in names:
        assert runs[name]["losses"] == pytest.approx(exact["losses"], rel=LOW), name


@pytest.mark.parametrize(
    ("processes", "options"),
    [(2, ("--zero-stage", "1")), pytest.param(4, ("--zero-stage", "2"), marks=pytest.mark.deep)],
)
def test_transformers_alone_reads_the_llama_and_its_loss_is_the_same(processes: int, options: tuple[str, ...], ranks):
    small = ["--steps", "4", "--layers", "2", "--width", "32", "--context", "16", "--precision", "fp32"]
    small += ["--size-per-shard", "0.05"]
    given = [*_options("booster_llama_hybrid"), *small, *options]
    result, *_ = ranks(processes).run(_on_ranks, "booster_llama_hybrid", given)
    assert result["losses"][-1] < result["losses"][0]
    assert result["plain"] == pytest.approx(result["validation"], rel=SAME)
    assert result["files"] > 1
