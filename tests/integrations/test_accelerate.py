"""Accelerate's loop on sharded models, beside Accelerate's own class in one process: losses and weights to 1e-10."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch.utils.data import DataLoader

from shardlib.errors import CheckpointError, MeshError, PlanError
from shardlib.testing import shared_pool
from tests.families.transformer_models import build
from tests.integrations.accelerated import Ran, make, reset, run

from accelerate.utils import AutocastKwargs, DataLoaderConfiguration  # isort: skip
from shardlib.integrations.accelerate import Accelerator  # isort: skip

WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"mesh": "tp=2"}, 2),
    "dp": ({"mesh": "dp=2"}, 2),
    "fsdp": ({"mesh": "dp=2", "transforms": "fsdp()"}, 2),
    "zero": ({"mesh": "dp=2", "transforms": "zero(2)"}, 2),
    "dp x tp": ({"mesh": "dp=2,tp=2", "transforms": "zero(2)"}, 4),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": 0.1, "epochs": 2},
    "evaluation": {"evaluate": True, "epochs": 2},
}


@cache
def _alone(training: str) -> Ran:
    return run(None, **TRAININGS[training])


def _on_ranks(way: str, **options: Any) -> list[Ran]:
    shards, world = WAYS[way]
    return shared_pool(world).run(run, shards, **options)


def _equal(ran: Ran, exact: Ran) -> None:
    for name in ("losses", "norms", "metrics", "rates"):
        torch.testing.assert_close(getattr(ran, name), getattr(exact, name), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-10, atol=1e-10)


@pytest.mark.covering
@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_trains_as_in_one_process(way: str, training: str):
    for ran in _on_ranks(way, **TRAININGS[training]):
        _equal(ran, _alone(training))


@pytest.mark.parametrize(("saved", "loaded"), [("tp", "tp"), ("zero", "dp x tp"), ("fsdp", "tp")])
def test_a_state_resumes_on_its_own_mesh_and_on_another(tmp_path: Path, saved: str, loaded: str):
    exact = run(None, epochs=2, split=True)
    _equal(_on_ranks(saved, epochs=1, split=True, folder=str(tmp_path))[0], run(None, epochs=1, split=True))
    for ran in _on_ranks(loaded, epochs=2, split=True, folder=str(tmp_path), resume=True):
        assert ran.losses == pytest.approx(exact.losses[6:], rel=1e-10)
        assert ran.rates == pytest.approx(exact.rates[6:], rel=1e-10)
        torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-10, atol=1e-10)


def test_old_states_are_removed_and_a_schedule_of_other_data_ranks_is_refused(tmp_path: Path):
    _on_ranks("zero", epochs=2, evaluate=True, folder=str(tmp_path))
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert kept.name == "checkpoint_1"
    plain = build("GPT2LMHeadModel").double()
    load_model(plain, str(tmp_path / "final" / "model.safetensors"))
    torch.testing.assert_close(dict(plain.state_dict()), run(None, epochs=2).weights, rtol=1e-10, atol=1e-10)
    with pytest.raises(CheckpointError, match=r"counted \[2\] steps of a schedule.* and here it counts \[1\]"):
        _on_ranks("tp", epochs=2, folder=str(tmp_path), resume=True)


REFUSED = {
    "fsdp_plugin": (lambda: {"fsdp_plugin": object()}, r'Write transforms="fsdp\(\)"'),
    "deepspeed": (lambda: {"deepspeed_plugin": object()}, r'Write transforms="zero\(2\)"'),
    "megatron": (lambda: {"megatron_lm_plugin": object()}, r'Name the axes in mesh="dp=2,tp=2"'),
    "parallelism": (lambda: {"parallelism_config": object()}, r'Name the axes in mesh="dp=2,tp=2"'),
    "dynamo": (lambda: {"dynamo_backend": "inductor"}, r'Write compile="inductor"'),
    "fp16": (lambda: {"mixed_precision": "fp16"}, r'Write mixed_precision="bf16"'),
    "dispatch": (
        lambda: {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        "each rank reads its own",
    ),
    "autocast": (lambda: {"kwargs_handlers": [AutocastKwargs(enabled=False)]}, "Write the precision as transforms="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_shards_by_other_means_is_refused_with_what_to_write(name: str):
    options, message = REFUSED[name]
    with pytest.raises(PlanError, match=message):
        Accelerator(mesh="tp=2", **options())


def test_a_variable_of_accelerate_launch_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PlanError, match="ACCELERATE_USE_FSDP is set"):
        Accelerator(mesh="tp=2")


def _between_ranks() -> None:
    accelerator = make({"mesh": "dp=2,tp=2"})
    rank, mine = torch.distributed.get_rank(), accelerator.process_index
    assert (accelerator.num_processes, mine) == (2, rank // 2)
    assert accelerator.is_main_process == (rank == 0) and accelerator.is_last_process == (rank == 3)
    assert accelerator.gather({"x": torch.tensor([mine, 5])})["x"].tolist() == [0, 5, 1, 5]
    assert accelerator.gather(torch.tensor(mine)).tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor(mine + 1.0), "mean").item() == 1.5
    assert accelerator.reduce(torch.tensor(mine + 1), "max").item() == 2
    padded = accelerator.pad_across_processes(torch.ones(mine + 1))
    assert padded.tolist() == [1.0, mine]
    if rank == 3:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    everyone = [None] * 4
    torch.distributed.all_gather_object(everyone, [batch.tolist() for batch in loader])
    assert everyone[0] == everyone[1] and everyone[2] == everyone[3]
    assert sorted(number for batch in everyone[0] + everyone[2] for number in batch) == list(range(8))
    with pytest.raises(MeshError, match="need the same"), accelerator.split_between_processes([1, 2]):
        pass
    with pytest.raises(PlanError, match="Write gradient_accumulation_steps= instead"):
        make({"mesh": "dp=2,tp=2", "transforms": "accumulate(2)"}).prepare(build("GPT2LMHeadModel"))
    reset()


def test_gathers_triggers_and_loaders_go_by_data_ranks():
    shared_pool(4).run(_between_ranks)


def _in_bf16(shards: dict[str, Any] | None) -> tuple[list[float], torch.dtype]:
    accelerator = make(shards, mixed_precision="bf16")
    model = build("GPT2LMHeadModel")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(3):
        logits = model(torch.arange(3, 23).view(2, 10), use_cache=False).logits
        loss = logits.float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    reset()
    return losses, logits.dtype


@pytest.mark.parametrize("way", ["tp", "fsdp"])
def test_mixed_precision_is_the_autocast_of_one_process(way: str):
    shards, world = WAYS[way]
    exact, dtype = _in_bf16(None)
    for losses, found in shared_pool(world).run(_in_bf16, shards):
        assert losses == pytest.approx(exact, rel=2e-2) and found == dtype == torch.float32
