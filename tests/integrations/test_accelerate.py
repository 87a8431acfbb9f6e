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
from tests.families.params import params
from tests.families.transformer_models import build
from tests.integrations.accelerated import DEEP_RESUMED, RESUMED, Ran, make, model_for, reset, run

from accelerate.utils import AutocastKwargs, DataLoaderConfiguration  # isort: skip
from shardlib.integrations.accelerate import Accelerator  # isort: skip

WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "tp": ({"mesh": "tp=2"}, 2),
    "dp": ({"mesh": "dp=2"}, 2),
    "fsdp": ({"mesh": "dp=2", "transforms": "fsdp()"}, 2),
    "zero": ({"mesh": "dp=2", "transforms": "zero(2)"}, 2),
    "dp x tp": ({"mesh": "dp=2,tp=2", "transforms": "zero(2)"}, 4),
    "ep": ({"mesh": "ep=2"}, 2),
    "ep x tp": ({"mesh": "ep=2,tp=2", "transforms": "zero(2)"}, 4),
}
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": 0.1, "epochs": 2},
    "evaluation": {"evaluate": True, "epochs": 2},
}


@cache
def _alone(**options: Any) -> Ran:
    return run(None, **options)


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
    model = model_for(way)
    for ran in _on_ranks(way, model_class=model, **TRAININGS[training]):
        _equal(ran, _alone(model_class=model, **TRAININGS[training]))


@pytest.mark.parametrize("ways", params(RESUMED, deep=DEEP_RESUMED))
def test_a_state_resumes_on_its_own_mesh_and_on_another(tmp_path: Path, ways: tuple[str, str]):
    saved, loaded = ways
    options: dict[str, Any] = {"split": True, "model_class": model_for(ways)}
    exact = _alone(epochs=2, **options)
    _equal(_on_ranks(saved, epochs=1, folder=str(tmp_path), **options)[0], _alone(epochs=1, **options))
    for ran in _on_ranks(loaded, epochs=2, folder=str(tmp_path), resume=True, **options):
        assert ran.losses == pytest.approx(exact.losses[6:], rel=1e-10)
        assert ran.rates == pytest.approx(exact.rates[6:], rel=1e-10)
        torch.testing.assert_close(ran.weights, exact.weights, rtol=1e-10, atol=1e-10)


def test_old_states_are_removed_and_a_schedule_of_other_data_ranks_is_refused(tmp_path: Path):
    _on_ranks("zero", epochs=2, evaluate=True, folder=str(tmp_path))
    (kept,) = (tmp_path / "checkpoints").iterdir()
    assert kept.name == "checkpoint_1"
    plain = build("GPT2LMHeadModel").double()
    load_model(plain, str(tmp_path / "final" / "model.safetensors"))
    torch.testing.assert_close(dict(plain.state_dict()), _alone(epochs=2).weights, rtol=1e-10, atol=1e-10)
    with pytest.raises(CheckpointError, match=r"counted \[2\] steps of a schedule.* and here it counts \[1\]"):
        _on_ranks("tp", epochs=2, folder=str(tmp_path), resume=True)


REFUSED = {
    "fsdp_plugin": (lambda: {"fsdp_plugin": object()}, r'Write transforms="fsdp\(\)"'),
    "deepspeed": (lambda: {"deepspeed_plugin": object()}, r'Write transforms="zero\(2\)"'),
    "megatron": (lambda: {"megatron_lm_plugin": object()}, r'Name the axes in mesh="dp=2,tp=2"'),
    "parallelism": (lambda: {"parallelism_config": object()}, r'Name the axes in mesh="dp=2,tp=2"'),
    "dynamo": (lambda: {"dynamo_backend": "inductor"}, r'Write compile="inductor"'),
    "fp8": (lambda: {"mixed_precision": "fp8"}, r'Write mixed_precision="bf16"'),
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
    with pytest.raises(MeshError, match="has a pipeline axis"):
        make({"mesh": "dp=2,pp=2"})
    with pytest.raises(PlanError, match="write gradient_accumulation_steps=2 instead"):
        make({"mesh": "dp=2,tp=2", "transforms": "accumulate(2)"}).prepare(build("GPT2LMHeadModel"))
    with pytest.raises(PlanError, match='write mixed_precision="fp16"'):
        make({"mesh": "dp=2,tp=2", "transforms": 'precision("fp16")'}).prepare(build("GPT2LMHeadModel"))
    reset()


def test_gathers_triggers_and_loaders_go_by_data_ranks():
    shared_pool(4).run(_between_ranks)


@pytest.mark.parametrize("way", params(["zero", "ep x tp"], deep=["tp", "dp", "fsdp", "dp x tp", "ep"]))
def test_mixed_precision_is_the_autocast_of_one_process(way: str):
    options = {"precision": "bf16", "model_class": model_for(way)}
    exact, in_float32 = _alone(**options), _alone(model_class=options["model_class"])
    assert exact.losses != pytest.approx(in_float32.losses, rel=1e-6)
    for ran in _on_ranks(way, **options):
        assert ran.losses == pytest.approx(exact.losses, rel=2e-2)
        assert ran.output == exact.output == torch.float32  # Accelerate converts what the model returns


@pytest.mark.parametrize("way", params(["dp x tp", "ep"], deep=["tp", "dp", "fsdp", "zero", "ep x tp"]))
def test_a_loss_scale_and_the_steps_that_it_skips_are_those_of_one_process(tmp_path: Path, way: str):
    """The first data rank alone overflows. A norm that is clipped before gradients are unscaled is 1000 times larger.

    float16 has 3 bits more than bfloat16, whose losses are compared to 2e-2. In a mixture, router logits that differ
    by rounding may send a token to another expert, by the kernels of the machine: of the 36 tokens of a batch, one that
    is predicted by another expert may change the mean by a 36th.
    """
    limit = 2.5e-3 + ("ep" in way) / 36
    options = {"precision": "fp16", "model_class": model_for(way), "clip": 0.1, "overflows": 1, "split": True}
    exact = run(None, epochs=2, **options)
    assert exact.skipped == [False, True, *[False] * 5, True, *[False] * 4]
    assert exact.scales == [2.0**power for power in (10, 9, 9, 9, 10, 10, 10, 9, 9, 9, 10, 10)]
    first = _on_ranks(way, epochs=1, folder=str(tmp_path), **options)
    resumed = _on_ranks(way, epochs=2, folder=str(tmp_path), resume=True, **options)
    for before, after in zip(first, resumed, strict=True):
        assert (before.skipped + after.skipped, before.scales + after.scales) == (exact.skipped, exact.scales)
        assert before.rates + after.rates == exact.rates
        assert before.losses + after.losses == pytest.approx(exact.losses, rel=limit)
        assert before.norms + after.norms == pytest.approx(exact.norms, rel=limit, nan_ok=True)
