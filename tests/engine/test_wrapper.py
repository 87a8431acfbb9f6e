"""`OptimizerWrapper`: losses with counts, steps of several passes, schedulers, groups, and state by name."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardlib as sl
from shardlib.errors import CheckpointError, InputError, ShardingError
from shardlib.testing.at_scale import at_scale
from shardlib.testing.models import MLP, Tokens, Transformer, perturb, rules_for
from shardlib.transforms import LossScale

STAGES = {"replicate": (), "zero(1)": (sl.zero(1),), "zero(2)": (sl.zero(2),), "zero(3)": (sl.zero(3),)}
SOME_STAGES = [pytest.param(stage, marks=pytest.mark.deep) if stage == "zero(1)" else stage for stage in STAGES]


def _gpt() -> nn.Module:
    torch.manual_seed(0)
    return perturb(Transformer(vocab=9, heads=2, head=4, layers=2, tied=True)).double()


def _sharded(mesh: str, *transforms: Any) -> nn.Module:
    return sl.shard_model(_gpt(), mesh, rules_for(_gpt()), transforms=transforms, compile=None)


def _data_rank(mesh: str) -> tuple[int, int]:
    shape = sl.MeshShape(mesh)
    return shape.data_place(shape.coordinate(dist.get_rank()))


def _tokens(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, with another number of targets that count for every rank and microbatch."""
    ids = Tokens(2, 6, 9)(100 * step + 10 * micro + rank)
    targets = ids.clone()
    targets[:, : 1 + (2 * rank + micro) % 5] = -100
    return ids, targets


def _sum_and_count(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def _unequal_counts(mesh: str, stage: str, *, mean: bool) -> float:
    """Train a single device on everything beside the ranks on their parts; the largest relative difference."""
    rank, ranks = _data_rank(mesh)
    single, model = _gpt(), _sharded(mesh, *STAGES[stage])
    reference = torch.optim.AdamW(single.parameters(), lr=1e-2)
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-2)
    for step in range(2):
        reference.zero_grad()
        every = [_sum_and_count(single, *_tokens(step, micro, r)) for micro in range(2) for r in range(ranks)]
        (sum(total for total, _ in every) / sum(count for _, count in every)).backward()
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        reference.step()
        optimizer.zero_grad()
        for micro in range(2):
            total, count = _sum_and_count(model, *_tokens(step, micro, rank))
            if mean:
                optimizer.backward(total / count, weight=count)
            else:
                optimizer.backward((total, count.item()))
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), norm, rtol=1e-12, atol=0)
        optimizer.step()
    trained = sl.full_state_dict(model)
    return max(
        ((trained[name] - value).abs().max() / value.abs().max()).item() for name, value in single.state_dict().items()
    )


@pytest.mark.covering
@pytest.mark.parametrize("stage", SOME_STAGES)
@pytest.mark.parametrize("mean", [True, False], ids=["weight", "sum and count"])
def test_unequal_counts_give_the_gradient_of_one_device(ranks, stage, mean):
    for mesh in ("dp=3", "dp=2,tp=2"):
        worst = ranks(sl.MeshShape(mesh).world_size).run(_unequal_counts, mesh, stage, mean=mean)
        assert max(worst) < 1e-10


def _accumulating(stage: str, mesh: str = "dp=2") -> tuple[float, list[bool], int]:
    single, model = _gpt(), _sharded(mesh, *STAGES[stage], sl.accumulate(3))
    rank, ranks = _data_rank(mesh)
    reference = torch.optim.SGD(single.parameters(), lr=0.1)
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    scheduler = optimizer.follow(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    skipped = []
    for step in range(6):
        ids = Tokens(4, 6, 9)(step)
        (single(ids).square().mean() / 3).backward()
        if step % 3 == 2:
            reference.step()
            reference.zero_grad()
            reference.param_groups[0]["lr"] *= 0.5
        optimizer.zero_grad()
        optimizer.backward(model(ids.chunk(ranks)[rank]).square().mean())
        optimizer.step()
        scheduler.step()
        skipped.append(optimizer.step_was_skipped)
    trained = sl.full_state_dict(model)
    worst = max(((trained[n] - v).abs().max() / v.abs().max()).item() for n, v in single.state_dict().items())
    return worst, skipped, scheduler.last_epoch


@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_that_accumulates_steps_after_so_many_passes_and_its_scheduler_too(ranks, stage):
    for worst, skipped, epochs in ranks(2).run(_accumulating, stage):
        assert worst < 1e-10
        assert skipped == [True, True, False] * 2
        assert epochs == 2


def _clip_norm(optimizer: Any) -> None:
    optimizer.clip_grad_norm_(0.05)


def _clip_value(optimizer: Any) -> None:
    optimizer.clip_grad_value_(0.1)


_CLIPS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "norm": (_clip_norm, lambda params: nn.utils.clip_grad_norm_(params, 0.05)),
    "value": (_clip_value, lambda params: nn.utils.clip_grad_value_(params, 0.1)),
}


def _clipped_in_every_pass(stage: str, mesh: str, clip: str, *, counts: bool, scaled: bool) -> float:
    """A step of the loop in README; the largest relative error of an update."""
    rank, ranks = _data_rank(mesh)
    low = (sl.precision("fp16", scaler=LossScale(init_scale=2.0**10)),) if scaled else ()
    single = _gpt().float() if scaled else _gpt()
    model = sl.shard_model(
        copy.deepcopy(single), mesh, rules_for(_gpt()), compile=None,
        transforms=(at_scale, *low, *STAGES[stage], sl.accumulate(3), at_scale),
    )  # fmt: skip
    start = {name: value.detach().clone() for name, value in single.state_dict().items()}
    single.double()
    rate = 100.0  # updates are large beside what half precision tells apart in a weight
    reference = torch.optim.SGD(single.parameters(), lr=rate)
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=rate)
    every = [[_tokens(0, micro, r) for r in range(ranks)] for micro in range(3)]
    number = sum(int((targets != -100).sum()) for of_pass in every for _, targets in of_pass)
    for of_pass in every:
        for ids, targets in of_pass:
            total, _ = _sum_and_count(single, ids, targets)
            (total / number if counts else total / targets.numel() / ranks / 3).backward()
        optimizer.zero_grad()
        total, count = _sum_and_count(model, *of_pass[rank])
        optimizer.backward((total, count.item()) if counts else total / of_pass[rank][1].numel())
        if _CLIPS[clip][0] is not None:
            _CLIPS[clip][0](optimizer)
        optimizer.step()
    largest = {name: rate * p.grad.abs().max() for name, p in single.named_parameters()}
    if _CLIPS[clip][1] is not None:
        _CLIPS[clip][1](single.parameters())
    reference.step()
    worst, trained = 0.0, sl.full_state_dict(model)
    for name, value in single.named_parameters():
        update = value.detach() - start[name]
        size = largest[name] if clip == "value" else update.abs().max()  # what roundings are in proportion to
        worst = max(worst, ((trained[name] - start[name] - update).abs().max() / size).item())
    return worst


def _all_clipped_in_every_pass(stage: str, mesh: str, clip: str) -> list[float]:
    return [
        _clipped_in_every_pass(stage, mesh, clip, counts=counts, scaled=scaled)
        for scaled in (False, True)
        for counts in (False, True)
    ]


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", _CLIPS)
def test_a_loop_that_clips_in_every_pass_steps_as_one_device(ranks, stage: str, mesh: str, clip: str):
    """In half precision, numbers are off by some units of 2^-11 for each layer and sum; a mistake by a part of them."""
    for worst in ranks(sl.MeshShape(mesh).world_size).run(_all_clipped_in_every_pass, stage, mesh, clip):
        assert max(worst[:2]) < 1e-10 and max(worst[2:]) < 2**-11 * 50


def _skipping_a_pass_that_raises(stage: str) -> float:
    """Steps of two passes, and of one between them that raises; the largest relative difference of a weight."""

    def fail(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    rank, ranks = _data_rank("dp=2")
    single, model = _gpt(), _sharded("dp=2", at_scale, *STAGES[stage], at_scale)
    reference = torch.optim.SGD(single.parameters(), lr=0.1)
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    for step in range(2):
        every = [_sum_and_count(single, *_tokens(step, micro, r)) for micro in (0, 2) for r in range(ranks)]
        reference.zero_grad()
        (sum(loss for loss, _ in every) / sum(count for _, count in every)).backward()
        reference.step()
        optimizer.zero_grad()
        for micro in range(3):
            ids, targets = _tokens(step, micro, rank)
            out = model(ids)
            if micro == 1:
                out.register_hook(fail)
            loss, count = _sum_and_count(lambda _ids, out=out: out, ids, targets)
            with contextlib.suppress(ArithmeticError):
                optimizer.backward((loss, count.item()))
        optimizer.step()
    trained = sl.full_state_dict(model)
    return max(((trained[n] - v).abs().max() / v.abs().max()).item() for n, v in single.state_dict().items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_pass_that_raises_does_not_count(ranks, stage: str):
    assert max(ranks(2).run(_skipping_a_pass_that_raises, stage)) < 1e-10


@pytest.mark.parametrize("mesh", ["dp=1", "tp=2"])
def test_passes_are_averaged_where_no_bucket_carries_their_gradients(ranks, mesh):
    for worst, _, _ in ranks(sl.MeshShape(mesh).world_size).run(_accumulating, "replicate", mesh):
        assert worst < 1e-10


def _half_a_step() -> None:
    model = _sharded("dp=2", sl.accumulate(2))
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    model(Tokens(2, 6, 9)(0)).square().mean().backward()
    with pytest.raises(ShardingError, match="2 backward passes"):
        bare.step()


def test_a_plain_optimizer_does_not_take_half_a_step(ranks):
    ranks(2).run(_half_a_step)


def _groups() -> None:
    model = _sharded("dp=2", sl.zero(2))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW([{"params": decayed}], lr=0.1, weight_decay=0.5), model)
    optimizer.add_param_group({"params": others, "weight_decay": 0.0})
    optimizer.param_groups[1]["lr"] = 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.backward(model(Tokens(2, 6, 9)(0)).square().mean())
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == (param.ndim < 2), name
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.unwrap() is optimizer.inner


def test_groups_may_be_added_and_edited_later(ranks):
    ranks(2).run(_groups)


def _train(model: nn.Module, optimizer: Any, steps: range, mesh: str) -> None:
    rank, count = _data_rank(mesh)
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(model(Tokens(4, 6, 9)(step).chunk(count)[rank]).square().mean())
        optimizer.step()


def _state_goes_from_one_device_and_back(mesh: str, stage: str) -> float:
    """Two steps on a single device, its state dicts loaded, two more on the mesh: as four on the single device."""
    single = _gpt()
    reference = torch.optim.AdamW(single.parameters(), lr=1e-2)

    def train_single(steps: range) -> None:
        for step in steps:
            reference.zero_grad()
            single(Tokens(4, 6, 9)(step)).square().mean().backward()
            reference.step()

    train_single(range(2))
    model = _sharded(mesh, *STAGES[stage])
    model.load_state_dict(single.state_dict())
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))  # by number, as torch.optim writes it
    assert optimizer.param_groups[0]["lr"] == 1e-2
    _train(model, optimizer, range(2, 3), mesh)
    again = _sharded(mesh, *STAGES[stage])
    again.load_state_dict(sl.full_state_dict(model))
    second = sl.OptimizerWrapper(torch.optim.AdamW, again)
    second.load_state_dict(optimizer.state_dict())  # by name, in parts
    _train(again, second, range(3, 4), mesh)
    train_single(range(2, 4))
    trained = sl.full_state_dict(again)
    return max(((trained[n] - v).abs().max() / v.abs().max()).item() for n, v in single.state_dict().items())


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_state_loads_from_one_device_and_by_name(ranks, stage):
    for mesh in ("dp=2", "dp=2,tp=2"):
        assert max(ranks(sl.MeshShape(mesh).world_size).run(_state_goes_from_one_device_and_back, mesh, stage)) < 1e-10


def _hooks() -> None:
    model = sl.shard_model(MLP(), "dp=2", {"**": None}, transforms=[sl.zero(2)])
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=1.0)
    told: list[Any] = []
    before = {name: param.detach().clone() for name, param in model.named_parameters()}

    def look(given: Any, args: Any, kwargs: Any) -> None:
        assert given is optimizer and args == (optimizer,) and not kwargs
        told.append((torch.equal(before[name], param), float(param.grad.full_tensor().sum())))  # type: ignore[operator]

    name, param = next(iter(model.named_parameters()))
    optimizer.register_step_pre_hook(look)
    last = optimizer.register_step_post_hook(look)
    optimizer.backward((model(torch.ones(2, model.ins)).sum(), 2))
    optimizer.clip_grad_norm_(1e9)
    grad = float(param.grad.full_tensor().sum())  # type: ignore[operator]
    optimizer.step()
    assert told == [(True, grad), (False, grad)]
    last.remove()
    optimizer.register_state_dict_pre_hook(lambda _: told.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, made: {**made, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: {k: v for k, v in given.items() if k != "junk"})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given["param_groups"][0].update(lr=0.5))
    optimizer.register_load_state_dict_post_hook(lambda _: told.append("loaded"))
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)
    assert told[2:] == ["saving", "loaded"] and optimizer.param_groups[0]["lr"] == 0.5
    optimizer.register_step_pre_hook(lambda *_: ((), {}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="gave new arguments"):
        optimizer.step()


def test_hooks_of_the_wrapper_are_called_with_it(ranks):
    ranks(2).run(_hooks)


class Transposed(nn.Module):
    """A weight whose memory is that of its transpose, as a layer has that loads files of another convention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _state_in_other_strides(loads: str) -> float:
    """A checkpoint gives state in row-major memory, whatever the strides of the parameter."""
    x, models = torch.randn(4, 5, generator=torch.Generator().manual_seed(1)).double(), []
    saved: dict[str, Any] = {}
    for mesh in ("", "dp=2"):
        model = sl.shard_model(Transposed(), mesh, {"**": None}, compile=None) if mesh else Transposed()
        for step in range(2):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if mesh and loads == "wrapper":
                optimizer = sl.OptimizerWrapper(optimizer, model)
            if step:
                optimizer.load_state_dict(saved)
            rows = x.chunk(2)[dist.get_rank()] if mesh else x
            model(rows).square().mean().backward()
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            for entry in saved["state"].values():
                entry |= {key: entry[key].contiguous() for key in ("exp_avg", "exp_avg_sq")}
            optimizer.zero_grad()
        models.append(model.weight.detach())
    return float((models[1] - models[0]).abs().max())


@pytest.mark.parametrize("loads", ["wrapper", "torch"])
def test_loaded_state_has_any_strides(ranks, loads):
    """torch's fused kernels read the memory of the state as that of the parameter."""
    assert max(ranks(2).run(_state_in_other_strides, loads)) < 1e-12


def _refusals() -> None:
    model = sl.shard_model(MLP(), "dp=2", {"**": None}, transforms=[sl.zero(1)])
    other = nn.Linear(2, 2)
    with pytest.raises(ShardingError, match="do not belong to the model"):
        sl.OptimizerWrapper(torch.optim.SGD(other.parameters(), lr=1), model)
    with pytest.raises(ShardingError, match="not sharded by shardlib"):
        sl.OptimizerWrapper(torch.optim.SGD, other)
    with pytest.raises(ShardingError, match="options lr"):
        sl.OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=1), model, lr=2)
    with pytest.raises(ShardingError, match="built from"):
        sl.OptimizerWrapper("adam", model)
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=1)
    loss = model(torch.ones(2, model.ins)).sum()
    for wrong, message in [
        ((loss, 1, 2), "3 values"),
        (torch.ones(3), r"a loss of \(3,\)"),
        (1.0, "a loss of float"),
        ((loss, -1), "count"),
        ((loss, float("nan")), "count"),
        ((loss, None), "the count None"),
    ]:
        with pytest.raises(InputError, match=message):
            optimizer.backward(wrong)
    optimizer.backward((loss, 2))
    with pytest.raises(InputError, match="some without"):
        optimizer.backward(model(torch.ones(2, model.ins)).sum())
    for wrong, message in [
        ({}, "param_groups"),
        ({"state": {}, "param_groups": []}, "0 param groups"),
        ({"state": {}, "param_groups": [{"params": ["a"]}]}, "other parameters"),
        ({"state": {}, "param_groups": [{"params": [0]}]}, "1 parameters"),
        (None, "was given NoneType; give what state_dict"),
        (_saved(model, "away", (2,)), "state of 'away', and none of its param groups"),
        (_saved(model, "up.bias", (3, 3)), r'"momentum_buffer" of "up.bias" has global shape \(3, 3\)'),
    ]:
        with pytest.raises(CheckpointError, match=message):
            optimizer.load_state_dict(wrong)
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1
    with pytest.raises(ShardingError, match="do not belong to the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


def _saved(model: nn.Module, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    groups = [{"params": [name for name, _ in model.named_parameters()], "lr": 2}]
    return {"state": {name: {"momentum_buffer": torch.ones(shape)}}, "param_groups": groups}


def test_what_is_refused(ranks):
    ranks(2).run(_refusals)


def _state_of_another_layout() -> None:
    models = [
        sl.shard_model(nn.Linear(4, 6), mesh, rules, transforms=transforms, compile=None)
        for mesh, rules, transforms in (("tp=2", {"^": "colwise"}, ()), ("dp=2", {"**": None}, (sl.zero(3),)))
    ]
    optimizers = [sl.OptimizerWrapper(torch.optim.AdamW, model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
    with pytest.raises(CheckpointError, match=r'of "weight" is a DTensor of other shards.*full tensors'):
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))


def test_state_that_is_laid_out_otherwise_is_refused(ranks):
    ranks(2).run(_state_of_another_layout)
