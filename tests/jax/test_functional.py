"""One script on both engines has the same losses, and both say what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import InputError, PlanError
from shardlib.functional import adamw, functional, train_step
from tests.house.source import ROOT


def _both(folder: Path, *options: str) -> dict[str, list[float]]:
    result = folder / "losses.json"
    command = [sys.executable, "examples/two_engines.py", "--steps", "3", *options, "--json", str(result)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/at_start{os.pathsep}{ROOT}"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    torchs, jaxs = (run.stdout.partition(f" on {engine}:\n")[2].splitlines()[:9] for engine in ("torch", "jax"))
    assert torchs[0] == jaxs[0] and any("│ 0" in line for line in torchs), "the parameter lies alike on both"
    return json.loads(result.read_text())


@pytest.mark.deep
def test_both_engines_train_the_gpt_to_the_same_losses(tmp_path: Path):
    picture = tmp_path / "placement.png"
    losses = _both(tmp_path, "--zero", "3", "--context", "16", "--png", str(picture))
    assert losses["jax"] == pytest.approx(losses["torch"], rel=1e-12)
    assert losses["jax"][0] > losses["jax"][2]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.deep
def test_both_engines_train_a_llama_to_the_same_losses(tmp_path: Path):
    """Whose norms and angles are of float32 in any case."""
    losses = _both(tmp_path, "--model", "llama")
    assert losses["jax"] == pytest.approx(losses["torch"], rel=1e-6)


def test_what_is_refused_is_explained():
    apply, params = functional(nn.Linear(4, 2), "dp=1", {"**": None})
    with pytest.raises(InputError, match=r"\"weight\" that is not the model's own tensor"):
        apply({"weight": torch.ones(2, 4)}, torch.ones(3, 4))
    with pytest.raises(InputError, match=r"given Linear; give the function that functional\("):
        train_step(nn.Linear(4, 2), adamw(1e-3), lambda model, x: model(x).sum())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"given the loss 'mse'; give a function loss\(model, "):
        train_step(apply, adamw(1e-3), "mse")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a state that is a dict; begin with step\.init"):
        train_step(apply, adamw(1e-3), lambda model, x: model(x).sum())(params, torch.ones(3, 4))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"for torch; give shardlib.functional.adamw"):
        train_step(apply, "adamw", lambda model, x: model(x).sum())
    with pytest.raises(PlanError, match=r"engine='tpu'.*give \"torch\" or \"jax\""):
        functional(nn.Linear(4, 2), "dp=1", {"**": None}, engine="tpu")
    with pytest.raises(PlanError, match=r"scales the loss, .* Use shardlib.jax.train_step"):
        scaled, _ = functional(
            nn.Linear(4, 2), "dp=1", {"*": None}, transforms=sl.precision("fp16_naive"), engine="jax"
        )
        train_step(scaled, adamw(1e-3), lambda model, x: model(x).sum())
    with pytest.raises(InputError, match=r"for JAX; give shardlib.functional.adamw"):
        train_step(functional(nn.Linear(4, 2), "dp=1", {"*": None}, engine="jax")[0], "adamw", lambda model, x: x)
    assert adamw(1e-3).of_torch(params.values()).defaults["weight_decay"] == 0.01


@pytest.mark.parametrize("given", ["x", None, True, -1.0, float("nan"), lambda step: 0.1])
def test_options_that_are_no_numbers_are_refused(given: Any):
    for name in ("lr", "eps", "weight_decay"):
        with pytest.raises(InputError, match=rf"adamw\({name}=.* was given; give a number .* optax.adamw\(schedule\)"):
            adamw(**{"lr": 1e-3, name: given})
    for betas in (given, (0.9, given), (0.9, 1.0)):
        with pytest.raises(InputError, match=r"adamw\(betas=.* two numbers below 1"):
            adamw(1e-3, betas=betas)
    assert adamw(np.float32(1e-3), weight_decay=0).lr == np.float32(1e-3)
