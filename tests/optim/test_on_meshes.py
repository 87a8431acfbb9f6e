"""Each optimizer trains a sharded model to the numbers of one device, at each stage of ZeRO, beside a split axis."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardlib as sl
from shardlib import optim
from shardlib.booster import Booster, LowLevelZeroPlugin
from shardlib.engine import _torch
from shardlib.optim.lr_scheduler import CosineAnnealingWarmupLR, LinearWarmupLR
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Tokens, Transformer, perturb, rules_for
from shardlib.testing.strategies import ModelFactory
from tests.engine.host import elsewhere

# As in `tests/engine/test_zero.py`: dims that no number of ranks divides, a fused qkv, a tied head, no bias of keys.
GPT = ModelFactory(
    Transformer, (("vocab", 7), ("heads", 2), ("head", 4), ("layers", 2), ("tied", True), ("bias", False))
)
STAGES = {"zero(1)": sl.zero(1), "zero(2)": sl.zero(2), "zero(3)": sl.zero(3)}


def _galore(params: Any) -> torch.optim.Optimizer:
    given = list(params)
    matrices = [p for p in given if p.ndim == 2]
    groups = [{"params": matrices, "rank": 2, "update_proj_gap": 2}, {"params": [p for p in given if p.ndim != 2]}]
    return optim.GaLoreAdamW(groups, 1e-2, eps=1e-4)


WHOLE = {
    "Lamb": lambda params: optim.Lamb(params, 1e-2, weight_decay=0.01, bias_correction=True),
    "FusedLAMB": lambda params: optim.FusedLAMB(params, 1e-2, max_grad_norm=0.1),
    "Lars": lambda params: optim.Lars(params, 0.5, 0.9, eeta=0.02, weight_decay=0.1),
    "CAME": lambda params: optim.CAME(params, 1e-3),
    "Adafactor": lambda params: optim.Adafactor(params),
    "GaLoreAdamW": _galore,
}
ELEMENTWISE = {
    "HybridAdam": lambda params: optim.HybridAdam(params, 1e-2, eps=1e-4, weight_decay=0.1),
    "HybridAdam, uncorrected": lambda params: optim.HybridAdam(params, 1e-2, bias_correction=False, eps=1e-4),
    "FusedSGD": lambda params: optim.FusedSGD(params, 1e-2, momentum=0.9, weight_decay=0.1, wd_after_momentum=True),
}


def _prove(mesh: str, optimizer: Any, *transforms: Any, **options: Any) -> None:
    rules = rules_for(GPT())
    assert_equivalent(
        GPT, Tokens(8, 5, 7), mesh=mesh, rules=rules, transforms=transforms, optimizer=optimizer, **options
    )


@pytest.mark.covering
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", WHOLE)
def test_whole_tensors_at_each_stage(optimizer, stage):
    _prove("dp=2,tp=2", WHOLE[optimizer], STAGES[stage], steps=3 if optimizer == "GaLoreAdamW" else 2)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_elements_at_each_stage(optimizer):
    for stage in ("zero(1)", "zero(3)"):
        _prove("dp=2,tp=2", ELEMENTWISE[optimizer], STAGES[stage], steps=2)


def test_whole_tensors_split_over_a_model_axis_alone():
    _prove("tp=2", WHOLE["GaLoreAdamW"])
    _prove("tp=2", WHOLE["FusedLAMB"])


def _on_the_host(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    with elsewhere():
        return sl.shard_model(model, mesh, rules_for(GPT()), transforms=[sl.zero(2), sl.offload("state")], compile=None)


@pytest.mark.parametrize("name", ["HybridAdam", "FusedSGD"])
def test_state_on_the_host_steps_there(name):
    assert_equivalent(GPT, Tokens(8, 5, 7), "dp=2", shard=_on_the_host, optimizer=ELEMENTWISE[name], steps=2)


def _pieces() -> int:
    model = _on_the_host(perturb(GPT()), sl.mesh("dp=1"))
    optimizer = optim.HybridAdam(model.parameters())
    model(Tokens(8, 5, 7)(0)).square().mean().backward()
    real = _torch.step_without_hooks
    with elsewhere(), mock.patch.object(_torch, "step_without_hooks", side_effect=real) as stepped:
        optimizer.step()
    return stepped.call_count


def test_one_piece_steps_on_the_host_while_others_are_on_the_way(ranks):
    assert ranks(1).run(_pieces)[0] > 3


# --- state that is not of a parameter's shape, on another mesh ------------------------------------------------------


def _goes_on(folder: str, name: str, mesh: str, stage: int, first: int, last: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = perturb(GPT(), 0 if first == 0 else 1).double()
    model = sl.shard_model(model, mesh, rules_for(model), transforms=[sl.zero(stage)], compile=None)
    optimizer = WHOLE[name](model.parameters())
    if first:
        sl.load(folder, model, optimizer)
    shape = sl.MeshShape(mesh)
    place = shape.data_place(shape.coordinate(dist.get_rank()))
    for step in range(first, last):
        optimizer.zero_grad()
        _loss(model, step, *place).backward()
        optimizer.step()
    sl.save(folder, model, optimizer)
    return sl.full_state_dict(model)


@pytest.mark.parametrize("name", ["GaLoreAdamW", "CAME", "Lars"])
def test_whole_tensors_go_on_from_a_checkpoint_on_another_mesh(ranks, tmp_path, name):
    straight = ranks(1).run(_goes_on, str(tmp_path / "straight"), name, "dp=1", 1, 0, 4)[0]
    ranks(2).run(_goes_on, str(tmp_path / "parted"), name, "dp=2", 2, 0, 3)  # GaLore is between two projections then
    found = ranks(4).run(_goes_on, str(tmp_path / "parted"), name, "dp=2,tp=2", 3, 3, 4)[0]
    for key, value in straight.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10)


# --- with schedules -------------------------------------------------------------------------------------------------


def _wrapped() -> list[float]:
    model = sl.shard_model(perturb(GPT()), "dp=2", {"**": None}, transforms=[sl.zero(2), sl.accumulate(2)])
    optimizer = sl.OptimizerWrapper(optim.HybridAdam, model, lr=1.0)
    scheduler = optimizer.follow(LinearWarmupLR(optimizer, total_steps=3, warmup_steps=1))
    rates = []
    for step in range(6):
        optimizer.zero_grad()
        optimizer.backward(_loss(model, step, dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_a_schedule_takes_the_steps_that_a_wrapper_takes(ranks):
    assert ranks(2).run(_wrapped) == [[0.5, 1.0, 1.0, 0.5, 0.5, 0.0]] * 2


# --- boosted, with a schedule, from before boosting to after loading ------------------------------------------------

STEPS = 6


def _built(seed: int = 0) -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = perturb(GPT(), seed).double()
    optimizer = optim.HybridAdam(model.parameters(), lr=1e-2, eps=1e-4)
    return model, optimizer, CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2)


def _loss(model: Any, step: int, index: int = 0, count: int = 1) -> torch.Tensor:
    return model(Tokens(8, 5, 7)(step).chunk(count)[index]).square().mean()


def _alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer, scheduler = _built()
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, model.state_dict()


def _run(folder: str, first: int, last: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps of a boosted run, which goes on from a checkpoint unless it begins, and leaves one."""
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp32", cpu_offload=True))
    model, optimizer, scheduler = _built(first)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    if first:
        booster.load_model(model, f"{folder}/model")
        booster.load_optimizer(optimizer, f"{folder}/optimizer")
        booster.load_lr_scheduler(scheduler, f"{folder}/scheduler")
    rates = []
    for step in range(first, last):
        optimizer.zero_grad()
        booster.backward(_loss(model, step, dist.get_rank(), dist.get_world_size()), optimizer)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    booster.save_model(model, f"{folder}/model", shard=True)
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    booster.save_lr_scheduler(scheduler, f"{folder}/scheduler")
    return rates, sl.full_state_dict(model)


def test_a_boosted_run_with_a_schedule_goes_on_from_a_checkpoint(ranks, tmp_path):
    rates, weights = _alone()
    begun = ranks(2).run(_run, str(tmp_path), 0, 3)[0][0]
    rest, found = ranks(2).run(_run, str(tmp_path), 3, STEPS)[0]
    assert begun + rest == rates
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
