"""Trainers of transformers on sharded models, beside their own classes in one process: losses and weights to 1e-10."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from shardlib.testing import shared_pool
from tests.integrations.trained import Ran, run

WAYS = {
    "tp": ("tp=2", 2),
    "dp": ("dp=2", 2),
    "fsdp": ("dp=2 | fsdp()", 2),
    "zero": ("dp=2 | zero(2)", 2),
    "dp x tp": ("dp=2,tp=2 | zero(2)", 4),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine"},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.1, "optim": "sgd", "warmup_steps": 3},
    "evaluation": {"eval_strategy": "epoch", "first": "evaluate", "then": "predict", "weight_decay": 0.1},
}


@cache
def _alone(training: str) -> Ran:
    with TemporaryDirectory() as folder:
        return run(None, folder, **TRAININGS[training])


def _on_ranks(way: str, folder: Path, **options: Any) -> list[Ran]:
    sharding, world = WAYS[way]
    return shared_pool(world).run(run, sharding, str(folder), **options)


def _equal(ran: Ran, exact: Ran) -> None:
    torch.testing.assert_close(ran.logs, exact.logs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ran.predicted, exact.predicted)
    torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-10, atol=1e-10)


@pytest.mark.covering
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_trains_as_in_one_process(tmp_path: Path, way: str, training: str):
    for ran in _on_ranks(way, tmp_path, **TRAININGS[training]):
        _equal(ran, _alone(training))
