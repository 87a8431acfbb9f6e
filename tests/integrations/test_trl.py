"""TRL's `GRPOTrainer` on sharded models, beside itself in one process. Its loss is float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardlib.errors import PlanError
from shardlib.testing import shared_pool
from tests.integrations.sampled import drawn, samples
from tests.integrations.trained import Ran

# TRL says so of its own argument, and asks transformers 5.23 by a former name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def _compare(ran: Ran, exact: Ran) -> None:
    torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ran.logs, exact.logs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sharding", "processes"),
    [
        ("dp=2,tp=2", 4),  # data ranks have answers of their own, and ranks of a tp group the same
        *(pytest.param(way, 2, marks=pytest.mark.deep) for way in ("tp=2", "dp=2 | zero(3)", "dp=2 | fsdp()")),
    ],
)
def test_grpo_learns_from_given_answers_as_in_one_process(sharding: str, processes: int, tmp_path: Path):
    exact = samples(None, str(tmp_path / "alone"), drawn)
    for ran in shared_pool(processes).run(samples, sharding, str(tmp_path / "run"), drawn):
        _compare(ran, exact)


def test_grpo_samples_what_one_process_samples(tmp_path: Path):
    """Ranks of a tp group draw the same numbers, and those of one process."""
    exact = samples(None, str(tmp_path / "alone"))
    for ran in shared_pool(2).run(samples, "tp=2", str(tmp_path / "run")):
        _compare(ran, exact)


def test_grpo_samples_on_data_ranks(tmp_path: Path):
    """Each draws numbers of its own."""
    first, second = shared_pool(2).run(samples, "dp=2 | zero(3)", str(tmp_path / "run"))
    assert first.logs == second.logs
    assert all(torch.equal(first.weights[name], value) for name, value in second.weights.items())


def _refusal(folder: str, **options: int | bool) -> str:
    with pytest.raises(PlanError) as raised:
        samples("tp=2", folder, **options)
    return str(raised.value)


def test_a_group_that_the_data_ranks_do_not_fill_is_refused(tmp_path: Path):
    for said in shared_pool(2).run(_of_half_a_group, str(tmp_path)):
        assert said == (
            "num_generations=16 was given, and 8 answers are sampled at a time: "
            "per_device_train_batch_size=8 of 1 data ranks, in 1 steps. Let the first divide the second."
        )


def _of_half_a_group(folder: str) -> str:
    return _refusal(folder, per_device_train_batch_size=8, num_generations=16)


def _by_trls_own_means(folder: str) -> str:
    return _refusal(folder, use_vllm=True)


def test_trls_own_way_to_vllm_is_refused(tmp_path: Path):
    for said in shared_pool(2).run(_by_trls_own_means, str(tmp_path)):
        assert said.startswith("TrainingArguments(use_vllm=True)") and "vllm_rollouts" in said
