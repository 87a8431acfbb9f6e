"""Every plugin trains the numbers of one device, with what the optimizer and its scheduler were before boosting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision

import shardlib as sl
from shardlib.booster import (
    BoostedModule,
    Booster,
    FP16ApexMixedPrecision,
    FP16TorchMixedPrecision,
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from shardlib.errors import CheckpointError, InputError, MeshError, PlanError, ShardingError
from tests.booster.plugins import ALL, OWN, TOLERANCE, made, maker
from tests.booster.training import Run, Trained, adamw, gpt, plainly


def train(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> list[Trained]:
    plugin, make = made(name, **({"precision": "fp32"} if name in OWN else {})), maker(name)
    run = Run(plugin, dtype, make=make)
    assert run.model.module is run.model and run.model.unwrap() is run.model
    assert run.model.to("cpu").to(dtype).cpu() is run.model  # where it is already, as scripts call it after boost
    with pytest.raises(ShardingError, match="Move and cast a model before shard_model or boost"):
        run.model.half()
    first = run.train(steps=1)
    return [first, Run(plugin, dtype, make=make).train(steps=2, clip=0.5, accumulate=2)]


@pytest.mark.parametrize("name", ALL)
def test_a_plugin_trains_the_numbers_of_one_device(ranks, name):
    make = maker(name)
    clipped = plainly(torch.float64, steps=2, clip=0.5, accumulate=2, make=make)
    exact = [plainly(torch.float64, steps=1, make=make), clipped]
    four = name in ("zero 2 in groups", "hybrid", "hybrid, zero 3", "experts", "experts, zero 3")
    for runs in ranks(4 if four else 2).run(train, name, torch.float64):
        for run, alone in zip(runs, exact, strict=True):
            assert run.error(alone) < TOLERANCE
            assert run.rates == alone.rates
            for key, value in alone.weights.items():
                torch.testing.assert_close(run.weights[key], value, rtol=TOLERANCE, atol=TOLERANCE)


def train_low(name: str, precision: str) -> Trained:
    if name == "ddp":
        objects = {"fp16": FP16TorchMixedPrecision(init_scale=2.0**10)}
        return Run(made(name), mixed_precision=objects.get(precision, precision)).train(clip=5.0)
    scale = {"initial_scale": 2**10} if name in OWN else {}
    key = "precision" if name in OWN else "mixed_precision"
    return Run(made(name, **scale, **{key: precision})).train(clip=5.0)


@pytest.mark.covering
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_naive"])
@pytest.mark.parametrize("name", ["ddp", "zero 2", "fsdp", "gemini", "hybrid"])
def test_a_precision_is_as_near_to_float64_as_on_one_device(ranks, name, precision):
    """The bound of tests/engine/test_precision.py: twice the error of one device, and a unit in the last place."""
    exact = plainly(torch.float64, clip=5.0)
    alone = "zero 1" if name == "hybrid" else name  # its mesh has two ranks at least; one device is one device
    single = ranks(1).run(train_low, alone, precision)[0].error(exact)
    unit = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float16).eps
    runs = ranks(2).run(train_low, name, precision)
    assert all(run.losses == runs[0].losses for run in runs)
    assert unit / 100 < runs[0].error(exact) < 2 * single + unit  # it is in few bits, and so near


def _names() -> list[tuple[float, bool]]:
    """Each name of a mixed precision trains."""
    ends = []
    for given in (
        "fp16",
        "bf16",
        "fp8",
        "fp16_naive",
        "fp16_apex",
        *(FP16ApexMixedPrecision(f"O{n}") for n in range(4)),
    ):
        run = Run(TorchDDPPlugin(), mixed_precision=given)
        trained = run.train()
        ends.append((trained.losses[-1] / trained.losses[0], sum(trained.skipped) <= 2))
    return ends


def test_every_name_of_a_mixed_precision_trains(ranks):
    for improved, stepped in ranks(2).run(_names)[0]:
        assert improved < 1 and stepped  # a scale of 2**16 is too large for the first steps


def _clipped_in_step(max_norm: float) -> Trained:
    return Run(LowLevelZeroPlugin(precision="fp32", max_norm=max_norm), torch.float64).train()


def test_max_norm_clips_in_step(ranks):
    exact = plainly(torch.float64, clip=0.1)
    run = ranks(2).run(_clipped_in_step, 0.1)[0]
    assert run.error(exact) < TOLERANCE
    assert run.error(plainly(torch.float64)) > 1e-3  # so much does clipping change


def _overflow() -> tuple[list[bool], list[float], int, list[str]]:
    plugin = LowLevelZeroPlugin(initial_scale=8, hysteresis=2, growth_interval=2)
    run = Run(plugin)
    skipped, scales = [], []
    for step in range(5):
        run.optimizer.zero_grad()
        loss = run.model(torch.zeros(2, 5, dtype=torch.long)).square().mean()
        bad = step in (1, 2) and dist.get_rank() == 1
        run.booster.backward(loss * float("inf") if bad else loss, run.optimizer)
        run.optimizer.step()
        run.scheduler.step()
        skipped.append(run.optimizer.step_was_skipped)
        scales.append(run.optimizer.scaler.scale)
    return skipped, scales, run.scheduler.last_epoch, sorted(map(str, run.scheduler.state_dict()))


def test_an_overflow_on_one_rank_skips_step_and_scheduler_and_backs_off_after_the_hysteresis(ranks):
    for skipped, scales, steps, keys in ranks(2).run(_overflow):
        assert skipped == [False, True, True, False, False]
        assert scales == [8, 8, 4, 4, 8]
        assert steps == 3
        assert "step" not in keys  # a function is nothing that a checkpoint may hold


def _what_boost_returns() -> None:
    model, criterion, loader = gpt(), nn.CrossEntropyLoss(), object()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    kind, before = type(model), [dict(group, params=None) for group in optimizer.param_groups]
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16"))
    boosted = booster.boost(model, optimizer, criterion, loader, scheduler)
    assert boosted[0] is model and boosted[0].unwrap() is model
    assert isinstance(model, kind) and isinstance(model, BoostedModule) and type(model).__name__ == kind.__name__
    assert boosted[1].unwrap() is optimizer and boosted[1].optim is optimizer
    assert boosted[2:] == (criterion, loader, scheduler)
    assert [dict(group, params=None) for group in boosted[1].param_groups] == before
    assert boosted[1].param_groups[0]["params"][0] is next(iter(model.parameters()))
    assert Booster(plugin=TorchDDPPlugin()).boost(gpt())[1:] == (None, None, None, None)


def _meaningless_on_ranks() -> None:
    model = gpt()
    with pytest.raises(ShardingError, match="do not belong to the model"):
        Booster(plugin=TorchDDPPlugin()).boost(model, adamw(gpt()))
    optimizer = adamw(model)
    other = torch.optim.lr_scheduler.StepLR(adamw(gpt()), 1)
    with pytest.raises(ShardingError, match="another optimizer"):
        Booster(plugin=TorchDDPPlugin()).boost(model, optimizer, lr_scheduler=other)
    with pytest.raises(MeshError, match="without a plugin"):
        Booster().boost(model, optimizer)
    with pytest.raises(PlanError, match="stages are 1 and 2"):
        Booster(plugin=LowLevelZeroPlugin(stage=3)).boost(model, optimizer)
    with pytest.raises(PlanError, match="one of the two"):
        Booster(plugin=HybridParallelPlugin(tp_size=1, pp_size=2)).boost(model, optimizer)
    run = Run(LowLevelZeroPlugin())  # after all of that nothing had changed
    with pytest.raises(ShardingError, match="neither"):
        run.booster.no_sync()
    run.model(torch.zeros(2, 5, dtype=torch.long)).square().mean().backward()
    with pytest.raises(ShardingError, match=r"booster\.backward"):
        run.optimizer.step()
    with pytest.raises(ShardingError, match="one for each boost"):
        run.booster.boost(gpt(), run.optimizer)
    sl.shard_model(model, "dp=2", {"**": None})


def test_boost_returns_five_and_keeps_what_it_was_given(ranks):
    ranks(2).run(_what_boost_returns)


def test_what_cannot_be_boosted_is_refused_before_anything_changes(ranks):
    ranks(2).run(_meaningless_on_ranks)


def _different_seeds() -> list[float]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model = Booster(plugin=TorchDDPPlugin()).boost(model)[0]
    x = torch.arange(24.0).reshape(8, 3).sin().chunk(2)[dist.get_rank()]
    out = model(x)
    return [model[0].weight.sum().item(), model[1].running_mean.sum().item(), out.sum().item()]


def test_data_parallel_begins_with_rank_0_and_normalises_with_all_examples(ranks):
    first, second = ranks(2).run(_different_seeds)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    out = model(torch.arange(24.0).reshape(8, 3).sin())
    assert first[:2] == second[:2]
    assert first[1] == pytest.approx(model[1].running_mean.sum().item(), rel=1e-5)
    assert [first[2], second[2]] == pytest.approx([half.sum().item() for half in out.chunk(2)], rel=1e-4, abs=1e-5)


IN_FP16: list[tuple[Any, dict[str, Any]]] = [
    (LowLevelZeroPlugin, {}),
    (GeminiPlugin, {}),
    (HybridParallelPlugin, {}),
    (TorchFSDPPlugin, {"mixed_precision": MixedPrecision(param_dtype=torch.float16)}),
]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TorchDDPPlugin(broadcast_buffers=False), ["broadcast_buffers=False", "equal on all ranks"]),
        (lambda: TorchDDPPlugin(bucket_cap_mbs=5), ["bucket_cap_mbs", 'Did you mean "bucket_cap_mb"?']),
        (lambda: LowLevelZeroPlugin(cast_inputs=False), ["cast_inputs=False", "inputs are always cast"]),
        (lambda: LowLevelZeroPlugin(fp8_communication=True), ["fp8_communication", "communication_dtype"]),
        (lambda: HybridParallelPlugin(scheduler_nodes=[1]), ["scheduler_nodes=[1]", "pp_style", "give None"]),
        (lambda: GeminiPlugin(placement_policy="cuda").transforms(gpt()), ['"static"', "offload_optim_frac"]),
        (lambda: GeminiPlugin(offload_param_frac=1).transforms(gpt()), ["offload_optim_frac at least"]),
        (lambda: GeminiPlugin(tp_size=2, strict_ddp_mode=True).transforms(gpt()), ["strict_ddp_mode"]),
        (lambda: HybridParallelPlugin(custom_policy=object()).rules(gpt()), ["custom_policy", "mapping"]),
        (lambda: TorchFSDPPlugin(sharding_strategy="FULLSHARD").mesh_shape(), ["FULL_SHARD", "Did you mean"]),
        (lambda: LowLevelZeroPlugin(precision="bf15").transforms(gpt()), ["'bf16'", "Did you mean"]),
        (lambda: LowLevelZeroPlugin(use_fp8=True).transforms(gpt()), ['precision="bf16"']),
        *[
            (lambda booster=booster: booster.boost(gpt(torch.bfloat16)), ["is bfloat16", "Build the model in float32"])
            for booster in (Booster(mixed_precision="fp16"), *(Booster(plugin=kind(**fp16)) for kind, fp16 in IN_FP16))
        ],
        (lambda: Booster(mixed_precision="fp16_torch"), ["fp16_naive", "FP16TorchMixedPrecision"]),
        (lambda: Booster(mixed_precision="bf16", plugin=GeminiPlugin()), ["precision of its own", "GeminiPlugin()"]),
        (lambda: Booster(plugin="gemini"), ["TorchDDPPlugin()"]),
        (lambda: FP16ApexMixedPrecision(opt_level="O4").transforms(gpt()), ["O0, O1, O2, O3"]),
        (lambda: FP16ApexMixedPrecision("O1", keep_batchnorm_fp32=True).transforms(gpt()), ["says nothing"]),
        (lambda: HybridParallelPlugin(num_model_chunks=2).transforms(gpt()), ["a pipeline's", "pp_size is 1"]),
        (lambda: HybridParallelPlugin(pp_size=2, pp_style="zbv").transforms(gpt()), ['"zbv" with 2']),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(make, words):
    with pytest.raises(PlanError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- data -----------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count: int = 24) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def _batches(plugin: Any, size: int, resume: dict[str, int] | None, stop: int | None = None) -> Any:
    loader = plugin.prepare_dataloader(Numbers(), batch_size=size, shuffle=True, seed=3, drop_last=True)
    loader.sampler.set_epoch(2)
    if resume is not None:
        loader.load_state_dict(resume)
    got = []
    for batch in loader:
        got.append(batch.tolist())
        if len(got) == stop:
            break
    return got, loader.state_dict()


def test_model_ranks_get_the_same_batches_and_data_ranks_share_them(ranks):
    told = [got for got, _ in ranks(4).run(_batches, HybridParallelPlugin(tp_size=2), 3, None)]
    assert told[0] == told[1] and told[2] == told[3]
    assert sorted(n for batches in (told[0], told[2]) for batch in batches for n in batch) == list(range(24))


def test_the_position_of_a_dataloader_fits_another_number_of_data_ranks(ranks):
    whole = ranks(2).run(_batches, TorchDDPPlugin(), 3, None)
    begun = ranks(2).run(_batches, TorchDDPPlugin(), 3, None, 2)
    assert begun[0][1] == begun[1][1] == {"epoch": 2, "examples": 12}
    on_two = ranks(2).run(_batches, TorchDDPPlugin(), 3, begun[0][1])
    assert [got for got, _ in on_two] == [got[2:] for got, _ in whole]
    on_four = ranks(4).run(_batches, TorchDDPPlugin(), 2, {"epoch": 2, "examples": 8})
    steps = [sorted(n for got, _ in on_four for n in got[step]) for step in range(2)]
    on_one = ranks(1).run(_batches, TorchDDPPlugin(), 8, {"epoch": 2, "examples": 8})[0][0]
    assert steps == [sorted(batch) for batch in on_one]
    assert on_two[0][1] == {"epoch": 3, "examples": 0}  # at the end of an epoch the next one begins


def _saved_position(folder: str) -> list[list[int]]:
    plugin = TorchDDPPlugin()
    loader = plugin.prepare_dataloader(Numbers(), batch_size=3, shuffle=True)
    batches = iter(loader)
    next(batches)
    sl.save(f"{folder}/position", dataloader=loader, random=False)
    again = plugin.prepare_dataloader(Numbers(), batch_size=3, shuffle=True)
    sl.load(f"{folder}/position", dataloader=again)
    assert [b.tolist() for b in again] == [b.tolist() for b in batches]
    return [b.tolist() for b in again]


def test_save_keeps_the_position_and_the_next_epoch_is_whole(ranks, tmp_path):
    assert [len(epoch) for epoch in ranks(2).run(_saved_position, str(tmp_path))] == [4, 4]


def test_a_run_that_goes_on_from_the_end_of_an_epoch_begins_the_next_one():
    first, second, alone = (
        TorchDDPPlugin().prepare_dataloader(Numbers(), batch_size=8, shuffle=True) for _ in range(3)
    )
    assert len([*first]) == 3 and first.state_dict() == {"epoch": 1, "examples": 0}
    second.load_state_dict(first.state_dict())
    alone.sampler.set_epoch(1)
    assert second.epoch == 1 and [b.tolist() for b in second] == [b.tolist() for b in alone]
    first.sampler.set_epoch(1)
    next(iter(first))
    assert first.state_dict() == {"epoch": 1, "examples": 8}


@pytest.mark.parametrize(
    "given", [{}, [], None, "x", {"epoch": 1}, {"epoch": 1, "examples": "4"}, {"epoch": 0, "examples": -1}]
)
def test_what_is_no_position_is_refused(given: Any):
    loader = TorchDDPPlugin().prepare_dataloader(Numbers(), batch_size=2)
    with pytest.raises(CheckpointError) as caught:
        loader.load_state_dict(given)
    assert f"was given {given!r}; give what its state_dict() returned" in str(caught.value)


def test_data_that_nobody_can_share_is_refused():
    with pytest.raises(InputError, match="no length"):
        TorchDDPPlugin().prepare_dataloader(iter([1]), batch_size=1)
