"""Experts of a model of one's own, spread over ranks that carry different tokens."""

from __future__ import annotations

import copy
import functools
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib.engine.feature.recording import record_collectives
from shardlib.optim import Lamb
from shardlib.testing import equivalent
from tests.engine.mixture import CHOICES, EMBED, EXPERTS, Batched, Mixture, Model, limit_capacity
from tests.engine.whole import whole

_ROWS, _SEQ = 8, 3
RULES = sl.Rules({"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}, unmatched="replicate")

SPLIT = sl.Rules(
    {
        "experts.up": "expert@ep ff@tp embed",
        "experts.down": "expert@ep embed ff@tp",
        "experts.output": "replicate",
    },
    unmatched="replicate",
)

STAGES = RULES.with_stages("0-1 | 2-3")


def batch(step: int) -> torch.Tensor:
    return torch.randn(_ROWS, _SEQ, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _small_batch(step: int) -> torch.Tensor:
    return batch(step)[:2, :1]


def _in_a_row() -> nn.Module:
    return nn.Sequential(nn.Linear(4, EMBED), Mixture(), Mixture(), nn.Linear(EMBED, 3))


Options = dict[str, Any]
CASES: dict[str, tuple[Callable[[], nn.Module], str, Options]] = {
    "unevenly": (Model, "ep=2", {}),
    "one expert a rank, and two": (Model, "ep=4", {}),
    "in parts": (Model, "dp=2,ep=2", {"transforms": [sl.zero(1), sl.zero(3, only="router")]}),
    "several passes": (Model, "dp=2,ep=2", {"accumulate": 2, "no_sync": True}),
    "beside an axis of one rank": (Model, "dp=1,ep=2", {"transforms": [sl.zero(1)]}),
    "beside an axis of one rank, in units": (Model, "fsdp=1,ep=2", {"transforms": [sl.fsdp()], "accumulate": 3}),
    "several passes that all reduce": (Model, "ep=2", {"accumulate": 2}),
    "a rank that nobody asks": (functools.partial(Model, favourites=(4, 3)), "ep=2", {}),
    "ranks that nobody asks": (functools.partial(Model, favourites=(0, 1)), "dp=2,ep=2", {"transforms": [sl.zero(2)]}),
    "fewer tokens than choices": (Model, "ep=2", {"batch": _small_batch}),
    "once more in backward": (Model, "ep=2", {"transforms": [sl.checkpoint_activations("layers.*")]}),
    "in host memory": (Model, "dp=2,ep=2", {"transforms": [sl.zero(3), sl.offload("all")]}),
    "by an optimizer of whole tensors": (
        Model,
        "ep=2,tp=2",
        {"rules": SPLIT, "transforms": [sl.zero(1)], "optimizer": functools.partial(Lamb, lr=1e-2)},
    ),
    "in stages": (_in_a_row, "pp=2,ep=2", {"rules": STAGES, "transforms": [sl.pipeline("1f1b", 2), sl.zero(1)]}),
    "in stages, their gradients late": (
        _in_a_row,
        "pp=2,ep=2",
        {"rules": RULES.with_stages("0 | 1 | 2 | 3"), "transforms": [sl.pipeline("zbv", 4), sl.zero(3)]},
    ),
    "each split over tp": (Model, "dp=1,ep=2,tp=2", {"rules": SPLIT}),
}


_IN_OTHERS = "unevenly", "in stages", "each split over tp"  # cases that others contain


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.deep if case in _IN_OTHERS else ()) for case in CASES]
)
def test_training_gives_the_numbers_of_one_device(case: str):
    model, mesh, options = CASES[case]
    options = {"batch": batch, "rules": RULES, **options}
    report = equivalent(model, mesh=mesh, clip=0.3, steps=2, **options)
    assert report, str(report)


# --- gradients -----------------------------------------------------------------------------------------------------


def _start(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options).double()


def _sharded(mesh: str, *transforms: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    single = _start(**options)
    return single, sl.shard_model(copy.deepcopy(single), mesh, RULES, transforms=transforms)


def _mine(rows: torch.Tensor) -> torch.Tensor:
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def _worst(model: nn.Module, single: nn.Module) -> float:
    want = {name: parameter.grad for name, parameter in single.named_parameters()}
    return max(
        ((whole(p.grad) - want[name]).abs().max() / want[name].abs().max()).item()
        for name, p in model.named_parameters()
    )


def _passes() -> float:
    single, model = _sharded("ep=2", sl.accumulate(3))
    for step in range(3):
        (single(batch(step)).square().mean() / 3).backward()
        model(_mine(batch(step))).square().mean().backward()
    return _worst(model, single)


def test_passes_of_a_step_are_averaged_where_no_bucket_carries_gradients_of_experts(ranks):
    assert max(ranks(2).run(_passes)) < 1e-10


def _after_another_that_one_rank_has_freed() -> float:
    """Clip by torch's own function, which takes other collectives by torch's rules than by ours."""
    _, other = _sharded("ep=2", sl.zero(2))
    kept = [other] if dist.get_rank() else []
    del other
    gc.collect()
    single, model = _sharded("ep=2")
    single(batch(0)).square().mean().backward()
    model(_mine(batch(0))).square().mean().backward()
    for each in (single, model):
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
    assert len(kept) == dist.get_rank()
    return _worst(model, single)


def test_ranks_use_the_same_rules_also_where_some_have_freed_another_model_on_the_mesh(ranks):
    assert max(ranks(2).run(_after_another_that_one_rank_has_freed)) < 1e-10


def _unequal() -> float:
    """Each rank has another number of rows, and the loss is the mean over all of them."""
    single, model = _sharded("dp=2,ep=2", sl.zero(1))
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    rows, bounds = batch(0), [0, 1, 4, 6, 8]
    single(rows).square().mean().backward()
    part = model(rows[bounds[dist.get_rank()] : bounds[dist.get_rank() + 1]]).square()
    optimizer.backward((part.sum(), part.numel()))
    optimizer.step()
    torch.optim.SGD(single.parameters(), lr=0.1).step()
    trained = sl.full_state_dict(model)
    return max((trained[name] - value).abs().max().item() for name, value in single.state_dict().items())


def test_ranks_with_other_numbers_of_tokens_take_the_step_of_one_device(ranks):
    assert max(ranks(4).run(_unequal)) < 1e-10


def _norms(mesh: str) -> tuple[float, float]:
    """How far shardlib's norm, and that of torch's own clipping, are from one device's."""
    single = _start()
    model = sl.shard_model(copy.deepcopy(single), mesh, SPLIT)
    single(batch(0)).square().mean().backward()
    index, count = sl.get_plan(model).mesh.data_place(sl.get_plan(model).mesh.coordinate(dist.get_rank()))
    model(batch(0).chunk(count)[index]).square().mean().backward()
    want = nn.utils.clip_grad_norm_(single.parameters(), math.inf)
    torchs = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    return (sl.booster.get_grad_norm(model) - want).abs().item(), (whole(torchs) - want).abs().item()


@pytest.mark.parametrize("mesh", ["dp=1,ep=2,tp=2", "dp=2,ep=2,tp=1"])
def test_a_norm_counts_each_element_of_each_expert_once_by_torch_s_own_means_too(ranks, mesh: str):
    for ours, torchs in ranks(4).run(_norms, mesh):
        assert ours < 1e-12 and torchs < 1e-12


class _Choosing(nn.Module):
    """One linear layer or two, behind a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.ways = Mixture(), nn.ModuleList(nn.Linear(EMBED, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, ways: int) -> torch.Tensor:
        x = x + self.mixture(x)
        return sum(way(x) for way in self.ways[:ways])


def _some_lack_gradients(*transforms: Any) -> float:
    """Those of the first place on ep. What ranks lack has to be told over ep too; experts are not summed over it."""
    torch.manual_seed(0)
    single = _Choosing().double()
    model = sl.shard_model(copy.deepcopy(single), "dp=2,ep=2", RULES, transforms=transforms)
    for step in range(2):  # buckets are in the order that the first pass has shown
        single.zero_grad()
        model.zero_grad()
        rows = torch.randn(8, EMBED, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for rank, part in enumerate(rows.chunk(4)):
            (single(part, 1 + rank % 2).square().mean() / 4).backward()
        model(_mine(rows), 1 + dist.get_rank() % 2).square().mean().backward()
    return _worst(model, single)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_that_some_ranks_do_not_use_has_the_mean_over_all(ranks, stage: int):
    assert max(ranks(4).run(_some_lack_gradients, *([sl.zero(stage)] if stage else []))) < 1e-10


# --- what is sent --------------------------------------------------------------------------------------------------


def _sent() -> tuple[list[tuple[str, int, str]], list[int], list[int]]:
    """Collectives of a step; and for each layer how many times a token of this rank went to a rank, and came here."""
    single, model = _sharded("ep=2")
    rows, wanted, coming = batch(0), [], []
    for layer in single.layers:
        layer[1].experts.register_forward_pre_hook(
            lambda _module, given: wanted.append(given[1] // 3)
        )  # 3 and 2 experts
    single(rows)
    me, half = dist.get_rank(), len(rows) * _SEQ // 2
    own = [torch.stack([(to == rank).any(-1) for rank in range(2)], -1) for to in wanted]
    sent = [int(goes[me * half : (me + 1) * half].sum()) for goes in own]
    coming = [int(goes[:, me].sum()) for goes in own]
    model(_mine(rows)).square().mean().backward()
    with record_collectives(model) as log:
        model(_mine(rows)).square().mean().backward()
    return (
        [(each.module, each.bytes, each.phase) for each in log.collectives if each.kind == "all_to_all"],
        sent,
        coming,
    )


def test_tokens_go_once_to_each_rank_that_has_their_experts_and_to_no_other(ranks):
    """Beside them their experts' numbers and weights, and how many come. In backward results' gradients go, and those
    of tokens and weights come back."""
    for collectives, sent, coming in ranks(2).run(_sent):
        tokens = _ROWS * _SEQ // 2
        assert all(rows < 2 * tokens for rows in sent)  # or the test could not tell
        for layer, (out, back) in enumerate(zip(sent, coming, strict=True)):
            name, choice = f"layers.{layer}.1.experts", 8 * CHOICES
            forward = [2 * 8, out * EMBED * 8, out * choice, out * choice, back * EMBED * 8]
            backward = [out * EMBED * 8, back * EMBED * 8, back * choice]
            here = [(size, phase) for module, size, phase in collectives if module == name]
            assert sorted(size for size, phase in here if phase == "forward") == sorted(forward)
            assert sorted(size for size, phase in here if phase == "backward") == sorted(backward)
        assert len(collectives) == 2 * 8


def _with_all_chosen() -> nn.Module:
    model = _start(favourites=tuple(range(EXPERTS)))
    for layer in model.layers:
        layer[1].experts.__class__ = Batched
    return model


def _measured() -> list[tuple[str, int, str]]:
    model = sl.shard_model(_with_all_chosen(), "ep=2", RULES)
    model(_mine(batch(0))).sum().backward()
    with record_collectives(model) as log:
        model(_mine(batch(0))).sum().backward()
    return [(each.kind, each.bytes, each.phase) for each in log.collectives]


def test_a_dry_run_tells_what_travels_if_experts_are_equally_popular(ranks):
    """Here they are: every token chooses all."""
    example = batch(0)[: _ROWS // 2]
    made = sl.plan(_with_all_chosen(), "ep=2", RULES, example=example)
    assert made.report is not None
    predicted = [(each.kind, each.bytes, each.phase) for each in made.report.collectives]
    assert predicted == ranks(2).run(_measured)[0]
    assert any("ranks of their experts" in note for note in made.notes)


# --- capacity ------------------------------------------------------------------------------------------------------


def _limited(factor: float) -> tuple[float, float]:
    single, model = _sharded("ep=2", sl.expert_capacity(factor))
    free = copy.deepcopy(single)
    for layer in single.layers:
        limit_capacity(layer[1].experts, factor)
    for rows in batch(0).chunk(2):
        (single(rows).square().mean() / 2).backward()
        (free(rows).square().mean() / 2).backward()
    model(_mine(batch(0))).square().mean().backward()
    return _worst(model, single), _worst(model, free)


def test_choices_beyond_the_capacity_of_an_expert_are_dropped(ranks):
    for worst, without in ranks(2).run(_limited, 0.75):
        assert worst < 1e-10 < without
    for worst, without in ranks(2).run(_limited, 100.0):
        assert max(worst, without) < 1e-10


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _trained(mesh: str, *transforms: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    _, model = _sharded(mesh, *transforms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(_mine(batch(step))).square().mean().backward()
    sl.clip_grad_norm_(model, 0.1)
    optimizer.step()


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sl.full_state_dict(model).items()}


def _saves(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = _trained("dp=2,ep=2", sl.zero(3))
    _step(model, optimizer, 0)
    sl.save(folder, model, optimizer)
    before = _values(model)
    _step(model, optimizer, 1)
    return before, _values(model)


def _goes_on(folder: str, mesh: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = _trained(mesh)
    sl.load(folder, model, optimizer)
    before = _values(model)
    _step(model, optimizer, 1)
    return before, _values(model)


def test_a_checkpoint_goes_on_with_experts_on_other_ranks(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    saved, end = ranks(4).run(_saves, folder)[0]
    for mesh in ("ep=4", "ep=2"):
        loaded, there = ranks(sl.MeshShape(mesh).world_size).run(_goes_on, folder, mesh)[0]
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        assert all((there[name] - value).abs().max() < 1e-10 for name, value in end.items())
