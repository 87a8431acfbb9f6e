"""An engine trains the numbers of one device, whatever its config says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig, next_byte_loss
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.trainer import (
    AMP_TYPE,
    GRADIENT_HANDLER,
    BaseGradientHandler,
    BaseOpHook,
    ParallelMode,
    global_context,
    gpc,
    initialize,
    launch,
    register_gradient_handler,
)
from tests.booster.training import STEPS, VOCAB, adamw, gpt, rules
from tests.engine.whole import whole
from tests.trainer.training import TOLERANCE, Trained, assert_equal, batch, by_engine, criterion, mine, plainly

TP = {"tensor": {"size": 2, "mode": "1d", "rules": rules()}}

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "nothing": (2, {}),
    "accumulation": (2, {"gradient_accumulation": 3}),
    "accumulation on one rank": (1, {"gradient_accumulation": 3}),
    "clipping": (2, {"clip_grad_norm": 0.5, "torch_ddp": {"bucket_cap_mb": 1}}),
    "zero 1": (2, {"gradient_accumulation": 2, "clip_grad_norm": 0.5, "zero": {"stage": 1}}),
    "zero 2": (2, {"gradient_accumulation": 2, "clip_grad_norm": 0.5, "zero": {"stage": 2, "cpu_offload": True}}),
    "zero 3": (2, {"gradient_accumulation": 2, "clip_grad_norm": 0.5, "zero": {"stage": 3}}),
    "tensor 2": (2, {"gradient_accumulation": 2, "clip_grad_norm": 0.5, "parallel": TP}),
    "tensor 2, zero 1": (4, {"gradient_accumulation": 2, "parallel": {**TP, "pipeline": 1}, "zero": {"stage": 1}}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_trains_the_numbers_of_one_device_with_whole_batches(ranks, name):
    world, config = CONFIGS[name]
    exact = plainly(config.get("gradient_accumulation", 1), config.get("clip_grad_norm"))
    for run in ranks(world).run(by_engine, config):
        assert_equal(run, exact)


def by_stages(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> Trained:
    """Batches through the schedule that a pipeline's engine has."""
    model = gpt(dtype)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    engine, _, _, scheduler = initialize(
        model, optimizer, criterion, lr_scheduler=scheduler, config=config, verbose=False
    )
    passes, result = config.get("gradient_accumulation", 1), Trained()
    for step in range(STEPS):
        losses = []
        for i in range(passes):
            x = mine(step * passes + i)
            engine.zero_grad()
            output, label, loss = engine.execute_schedule(iter([(x, x)]))
            engine.step()
            scheduler.step()
            losses.append(loss.item())
            assert (output is not None) == gpc.is_last_rank(ParallelMode.PIPELINE)
            assert output is None or (output.shape == (*x.shape, VOCAB) and torch.equal(label, x))
        result.losses.append(sum(losses) / passes)
        result.rates.append(scheduler.get_last_lr()[0])
    result.weights = {name: whole(value).clone() for name, value in sl.full_state_dict(model).items()}
    return result


PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation, clipping": (2, {"gradient_accumulation": 2, "clip_grad_norm": 0.5}),
    "data 2, zero 1": (4, {"gradient_accumulation": 2, "zero": {"stage": 1}}),
    "tensor 2": (4, {"clip_grad_norm": 0.5, "parallel": TP}),
    "interleaved": (2, {"model": {"num_chunks": 2}}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_train_the_numbers_of_one_device(ranks, name):
    world, given = PIPELINES[name]
    config = {**given, "parallel": {**given.get("parallel", {}), "pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    exact = plainly(given.get("gradient_accumulation", 1), given.get("clip_grad_norm"))
    for run in ranks(world).run(by_stages, config):
        assert_equal(run, exact)


@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_a_mode_of_fp16_is_as_near_to_float64_in_stages(ranks, mode):
    config = {**MODES[mode], "gradient_accumulation": 2, "clip_grad_norm": 5.0}
    single = ranks(1).run(by_engine, config, torch.float32)[0].error(plainly(2, 5.0))
    unit = torch.finfo(torch.float16).eps
    staged = {**config, "parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}
    run = ranks(2).run(by_stages, staged, torch.float32)[0]
    assert unit / 100 < run.error(plainly(2, 5.0)) < 2 * single + unit


def by_layout_file(config: dict[str, Any]) -> tuple[list[float], int]:
    """Losses of a model that a layout file is for, and how many of its parameters are split."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, context=8, n_layer=1, n_head=2, d_model=8)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    engine, *_ = initialize(model, optimizer, next_byte_loss, config=config, verbose=False)
    losses = []
    for i in range(3):
        engine.zero_grad()
        loss = engine.criterion(engine(batch(i)), batch(i))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, sum(isinstance(param, DTensor) for param in model.parameters())


def test_a_tensor_size_alone_takes_the_layout_file_for_the_model(ranks):
    alone, none = ranks(1).run(by_layout_file, {})[0]
    for losses, split in ranks(2).run(by_layout_file, {"parallel": {"tensor": 2}}):
        assert losses == pytest.approx(alone, rel=TOLERANCE)
        assert (none, split > 4) == (0, True)


def test_backward_by_grad_is_backward_from_there(ranks):
    for run in ranks(2).run(by_engine, {"gradient_accumulation": 2}, by_grad=True):
        assert_equal(run, plainly(2))


def unequal(kind: str) -> float:
    """Batches of eight and of four rows make a step; relative difference of the losses from one device's."""
    config = {"gradient_accumulation": 2, **({"parallel": TP} if kind == "tensor" else {})}
    single, model = gpt(torch.float64), gpt(torch.float64)
    optimizer = adamw(model)
    engine, *_ = initialize(model, optimizer, criterion, config=config, verbose=False)
    reference = adamw(single)
    worst = 0.0
    for step in range(3):
        parts = [batch(2 * step), batch(2 * step + 1)[:4]]
        reference.zero_grad()
        exact = criterion(single(torch.cat(parts)), torch.cat(parts))
        exact.backward()
        reference.step()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            count, index = gpc.get_world_size(ParallelMode.DATA), gpc.get_local_rank(ParallelMode.DATA)
            x = part.chunk(count)[index]
            loss = criterion(engine(x), x)
            engine.backward(loss, weight=len(x))
            engine.step()
            engine.zero_grad()
            total += loss.detach() * len(x) / 12 * count
        dist.all_reduce(total)
        worst = max(worst, abs(total.item() / dist.get_world_size() - exact.item()) / exact.item())
    return worst


@pytest.mark.parametrize(("world", "kind"), [(1, "alone"), (2, "data"), (2, "tensor")])
def test_batches_of_unequal_size_may_come_with_their_weights(ranks, world, kind):
    assert max(ranks(world).run(unequal, kind)) < TOLERANCE


OLD_ZERO = {
    "model_config": {"reuse_fp16_shard": True, "fp32_reduce_scatter": True},
    "optimizer_config": {"initial_scale": 2**10},
}
MODES: dict[str, dict[str, Any]] = {
    "torch": {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 2.0**10}},
    "apex": {"fp16": {"mode": "apex", "opt_level": "O1"}},
    "naive": {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10, "min_scale": 1}},
    "naive, zero 1": {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**10}, "zero": {"stage": 1}},
    "older zero": {"zero": OLD_ZERO},
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_fp16_is_as_near_to_float64_as_on_one_device(ranks, name):
    """The bound of tests/engine/test_precision.py: twice the error of one device, and a unit in the last place."""
    config = {**MODES[name], "gradient_accumulation": 2, "clip_grad_norm": 5.0}
    exact = plainly(2, 5.0)
    single = ranks(1).run(by_engine, config, torch.float32)[0].error(exact)
    unit = torch.finfo(torch.float16).eps
    runs = ranks(2).run(by_engine, config, torch.float32)
    assert unit / 100 < runs[0].error(exact) < 2 * single + unit  # it is in few bits, and so near


@register_gradient_handler("twice as large")
class Twice(BaseGradientHandler):
    calls = 0

    def handle_gradient(self) -> None:
        type(self).calls += 1
        for param in self._model.parameters():
            if param.grad is not None:
                param.grad.mul_(2)


@GRADIENT_HANDLER.register_module
class AveragedAgain(BaseGradientHandler):
    """What ColossalAI's documentation shows as a handler for data parallelism."""

    def handle_gradient(self) -> None:
        if gpc.data_parallel_size > 1:
            grads = [param.grad for param in self._model.parameters() if param.grad is not None]
            flat = _flatten_dense_tensors(grads)
            flat /= gpc.get_world_size(ParallelMode.DATA)
            dist.all_reduce(flat, group=gpc.get_group(ParallelMode.DATA))
            for grad, synced in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(synced)


def handled(*names: str, **config: Any) -> tuple[Trained, int]:
    Twice.calls = 0
    described = [{"type": name} for name in names]
    return by_engine({"gradient_handler": described, "gradient_accumulation": 2, **config}), Twice.calls


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_handler_comes_once_a_step_and_before_clipping(ranks, stage):
    names = ("DataParallelGradientHandler", "twice as large")  # the first is what the engine does anyway
    for run, calls in ranks(2).run(handled, *names, clip_grad_norm=0.5, zero={"stage": stage}):
        assert calls == 4
        assert_equal(run, plainly(2, 0.5, 2.0))


def test_a_handler_that_averages_over_data_ranks_once_more_changes_nothing(ranks):
    for run, _ in ranks(2).run(handled, "AveragedAgain"):
        assert_equal(run, plainly(2))


def overflowing() -> tuple[int, bool, float]:
    """Under a scale of 2**24 the gradients of float16 are not finite, and the first steps are none."""
    Twice.calls = 0
    config = {"fp16": {"mode": AMP_TYPE.NAIVE, "initial_scale": 2.0**24, "hysteresis": 1}}
    model = gpt()
    optimizer = adamw(model)
    config |= {"gradient_handler": [{"type": "twice as large"}]}
    engine, *_ = initialize(model, optimizer, criterion, config=config, verbose=False)
    engine.backward(criterion(engine(mine(0)), mine(0)))
    engine.step()
    return Twice.calls, engine.optimizer.step_was_skipped, engine.optimizer.scaler.scale


def test_a_step_that_overflows_calls_no_handler(ranks):
    assert ranks(2).run(overflowing) == [(0, True, 2.0**23)] * 2


class Counting(BaseOpHook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def pre_fwd_exec(self, module: Any, *args: Any) -> None:
        self.seen.append("forward")

    def post_bwd_exec(self, module: Any, input: Any) -> None:
        self.seen.append("backward")

    def post_iter(self) -> None:
        self.seen.append("step")


def hooked() -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    engine, *_ = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    hook = Counting()
    engine.add_hook(hook)
    for _ in range(2):
        engine.backward(engine(torch.ones(3, 4)).sum())
        engine.step()
        engine.remove_hook(hook)
    return hook.seen


def test_a_hook_of_modules_is_called_around_those_that_have_parameters(ranks):
    assert ranks(2).run(hooked) == [["forward", "forward", "backward", "backward", "step"]] * 2


def context() -> dict[str, Any]:
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d", "rules": rules()}}, "BATCH_SIZE": 32}
    rank = dist.get_rank()
    launch(config, rank, 4, "localhost", 29500, verbose=False)
    modes = [*ParallelMode, "dp", "tp"]
    before = {mode: gpc.get_ranks_in_group(mode) for mode in modes}
    try:
        gpc.get_group(ParallelMode.DATA)
        refusal = ""
    except sl.errors.LaunchError as error:
        refusal = str(error)
    model = gpt()
    initialize(model, adamw(model), criterion, verbose=False)
    total = torch.tensor(10.0**rank)
    dist.all_reduce(total, group=gpc.get_group(ParallelMode.TENSOR))
    return {
        "ranks": before,
        "the same": all(before[mode] == gpc.get_ranks_in_group(mode) for mode in modes),
        "refusal": refusal,
        "tensor": total.item(),
        "places": [(gpc.get_local_rank(m), gpc.is_first_rank(m), gpc.is_last_rank(m)) for m in ("dp", "tp")],
        "on": [mode for mode in ParallelMode if gpc.is_initialized(mode)],
        "config": (global_context.config.BATCH_SIZE, global_context.config.parallel.tensor.size),
        "mesh": str(gpc.shape),
        "sizes": (gpc.data_parallel_size, gpc.tensor_parallel_size, gpc.pipeline_parallel_size, gpc.get_global_rank()),
    }


def test_the_context_says_where_a_rank_stands(ranks):
    found = ranks(4).run(context)
    third = found[2]
    data, tensor = [0, 2], [2, 3]
    assert third["ranks"] == {
        ParallelMode.GLOBAL: [0, 1, 2, 3],
        ParallelMode.DATA: data,
        ParallelMode.MODEL: tensor,
        ParallelMode.PIPELINE: [2],
        ParallelMode.TENSOR: tensor,
        ParallelMode.PARALLEL_1D: tensor,
        ParallelMode.SEQUENCE: [2],
        ParallelMode.SEQUENCE_DP: data,
        "dp": data,
        "tp": tensor,
    }
    assert all(each["the same"] for each in found)
    assert third["refusal"] == (
        "There is no mesh yet: initialize makes it. Ranks and sizes are known before, groups are not."
    )
    assert [each["tensor"] for each in found] == [11, 11, 1100, 1100]
    assert third["places"] == [(1, False, True), (0, True, False)]
    assert third["on"] == [mode for mode in ParallelMode if mode not in (ParallelMode.PIPELINE, ParallelMode.SEQUENCE)]
    assert third["config"] == (32, 2) and third["mesh"] == "dp=2,tp=2"
    assert third["sizes"] == (2, 2, 1, 2)
