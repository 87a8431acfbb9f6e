"""Precision: a sharded run in few bits is no further from float64 than the same recipe on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.errors import ShardingError
from shardlib.testing.models import Tokens, rules_for
from shardlib.transforms import LossScale
from tests.engine.low_precision import gpt, train

RECIPES = {
    "bf16": sl.precision("bf16"),
    "bf16, reduced in float32": sl.precision("bf16", reduce="float32"),
    "bf16, norms kept": sl.precision("bf16", keep="norm*"),
    "bf16 autocast": sl.precision("bf16", autocast=True),
    "fp16": sl.precision("fp16", scaler=LossScale(init_scale=2.0**10)),
    "fp16_naive": sl.precision("fp16_naive", scaler=LossScale(init_scale=2.0**10)),
}
STAGES = {"replicate": sl.replicate(), "zero(2)": sl.zero(2), "zero(3)": sl.zero(3)}


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "stage"), [(mesh, stage) for stage in STAGES for mesh in ("dp=2", "dp=2,tp=2")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_is_as_near_to_float64_as_on_one_device(ranks, recipe, mesh, stage):
    exact = ranks(1).run(train, "dp=1", dtype=torch.float64, clip=5.0)[0]
    single = ranks(1).run(train, "dp=1", RECIPES[recipe], clip=5.0)[0].error(exact)
    # Losses of single devices in few bits are themselves off by rounding that sharding orders otherwise: one unit in
    # the last place of what the loss is computed from is what a sum in another order may move it by.
    unit = torch.finfo(torch.float16 if "fp16" in recipe else torch.bfloat16).eps
    runs = ranks(sl.MeshShape(mesh).world_size).run(train, mesh, RECIPES[recipe], STAGES[stage], clip=5.0)
    assert all(run.losses == runs[0].losses and run.skipped == runs[0].skipped for run in runs)
    assert runs[0].error(exact) < 2 * single + unit


def test_stages_do_not_change_a_bit(ranks):
    """What is stored where decides no number: bf16 with masters is the same at every stage."""
    runs = [ranks(2).run(train, "dp=2", RECIPES["bf16"], stage, clip=5.0)[0].losses for stage in STAGES.values()]
    assert runs[0] == runs[1] == runs[2]


def _overflow(stage: str, bad_rank: int) -> tuple[list[bool], list[float], bool]:
    model = sl.shard_model(
        gpt(), "dp=2", rules_for(gpt()), compile=None, check=False,
        transforms=[sl.precision("fp16", scaler=LossScale(init_scale=8.0, growth_interval=2)), STAGES[stage]],
    )  # fmt: skip
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    scheduler = optimizer.follow(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    skipped, scales = [], []
    unchanged = True
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss = model(Tokens(2, 5, 16)(step)).float().square().mean()
        if step == 1 and dist.get_rank() == bad_rank:
            loss = loss * float("inf")
        optimizer.backward(loss)
        optimizer.step()
        scheduler.step()
        skipped.append(optimizer.step_was_skipped)
        scales.append(optimizer.scaler.scale)
        same = all(torch.equal(_local(a), _local(b)) for a, b in zip(model.parameters(), before, strict=True))
        unchanged = unchanged and same == optimizer.step_was_skipped
    assert scheduler.last_epoch == 3
    return skipped, scales, unchanged


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_backs_off(ranks, stage):
    for bad_rank in (0, 1):
        for skipped, scales, unchanged in ranks(2).run(_overflow, stage, bad_rank):
            assert skipped == [False, True, False, False]
            assert scales == [8.0, 4.0, 4.0, 8.0]
            assert unchanged


def _bytes(stage: str) -> dict[str, int]:
    model = sl.shard_model(gpt(), "dp=2", {"**": None}, transforms=[sl.precision("bf16"), STAGES[stage]], compile=None)
    optimizer = torch.optim.AdamW(model.parameters())  # a plain one keeps the copies too
    model(Tokens(2, 5, 16)(0)).square().mean().backward()
    optimizer.step()

    def size(tensors: Any) -> int:
        return sum(_local(t).nbytes for t in tensors if isinstance(t, torch.Tensor) and t.ndim)

    return {
        "parameters": size(model.parameters()),
        "gradients": size(p.grad for p in model.parameters()),
        "state": size(t for state in optimizer.state.values() for t in state.values()),
        "planned": sl.get_plan(model).memory().state,
    }


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_those_of_the_paper(ranks, stage):
    """Two bytes a parameter, four a gradient (they add up in float32), twelve of state: of which N ranks hold 1/N where
    the stage splits them."""
    count = sum(p.numel() for p in gpt().parameters())
    split = {"replicate": (1, 1, 1), "zero(2)": (1, 2, 2), "zero(3)": (2, 2, 2)}[stage]
    for held in ranks(2).run(_bytes, stage):
        assert held["parameters"] == 2 * count / split[0]
        assert held["gradients"] == 4 * count / split[1]
        assert held["state"] == 12 * count / split[2] == held["planned"]


def _bare_with_a_scale() -> None:
    model = sl.shard_model(gpt(), "dp=2", {"**": None}, transforms=[sl.precision("fp16")], compile=None)
    model(Tokens(2, 5, 16)(0)).square().mean().backward()
    with pytest.raises(ShardingError, match="OptimizerWrapper"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_a_plain_optimizer_does_not_step_on_scaled_gradients(ranks):
    ranks(2).run(_bare_with_a_scale)


def _loaded_between_steps() -> float:
    """A parameter that is written to between two steps is what the next step starts from, not the old copy."""
    model = sl.shard_model(gpt(), "dp=2", {"**": None}, transforms=[sl.precision("bf16"), sl.zero(2)], compile=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(Tokens(2, 5, 16)(0)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.head.weight.fill_(3.0)
    optimizer.step()
    return model.head.weight.float().mean().item()


def test_what_is_loaded_between_steps_counts(ranks):
    assert ranks(2).run(_loaded_between_steps) == [3.0, 3.0]


def _accumulated(transforms: tuple[Any, ...], passes: int) -> tuple[float, torch.dtype]:
    """The error of a gradient of many passes, of its own size, against float64."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    batches = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(passes)]
    model = sl.shard_model(
        copy.deepcopy(single), "dp=2", {"**": None}, transforms=[*transforms, sl.accumulate(passes)], compile=None
    )
    single.double()
    for batch in batches:
        (single(batch.double()).square().mean() / passes).backward()
        model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
    errors = []
    for p, want in zip(model.parameters(), single.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        errors.append(float((grad.double() - want.grad).norm() / want.grad.norm()))
    return max(errors), p.grad.dtype


@pytest.mark.parametrize("stage", [pytest.param("replicate", marks=pytest.mark.deep), "zero(2)", "zero(3)"])
def test_gradients_of_bfloat16_add_up_in_float32(ranks, stage: str):
    """A pass rounds its gradient by 2^-9 at most, relative to each element, and errors of passes average out. One
    rounding for the way is of the same size. Sums of 64 passes in bfloat16 round 64 times, each time by the sum's own
    unit: they are some times farther off."""
    low = ranks(2).run(_accumulated, (sl.precision("bf16", grads="bfloat16"), STAGES[stage]), 64)[0]
    error, dtype = ranks(2).run(_accumulated, (sl.precision("bf16"), STAGES[stage]), 64)[0]
    exact, _ = ranks(2).run(_accumulated, (sl.precision("bf16", reduce="float32"), STAGES[stage]), 64)[0]
    beside, _ = ranks(2).run(_accumulated, (sl.precision("bf16", autocast=True), STAGES[stage]), 64)[0]
    assert dtype is torch.float32 and low[1] is torch.bfloat16
    assert exact < 1.5 * beside and error < 2 * beside and 1.5 * max(exact, error) < low[0]
