"""`shard_model` trains the same numbers as one device, in every way a training loop may use it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from tests.engine import models
from tests.engine.same_numbers import (
    TOLERANCE,
    assert_same_numbers,
    data_place,
    gradients,
    local_rows,
    relative,
    values,
)

MESHES = {"tp=2": 2, "tp=4": 4, "dp=2,tp=2": 4, "dp=4": 4, "dp=2,fsdp=2": 4}


def _gpt_case(mesh: str, changes: dict[str, Any], options: dict[str, Any]) -> None:
    rules = sl.Rules(models.GPT_RULES, sizes=models.GPT_SIZES, unmatched="replicate")
    assert_same_numbers(lambda: models.gpt(**changes), models.tokens, models.spread, mesh, rules, **options)


@pytest.mark.covering
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("compile", [None, "auto"])
def test_gpt_with_fused_qkv_and_tied_head(ranks, mesh, compile):
    ranks(MESHES[mesh]).run(_gpt_case, mesh, {}, {"compile": compile})


def test_gradients_accumulate_over_backward_passes(ranks):
    ranks(4).run(_gpt_case, "dp=2,tp=2", {"tied": False}, {"accumulate": 3, "compile": None})


def test_many_small_buckets_give_the_same_gradients(ranks):
    ranks(4).run(_gpt_case, "dp=2,tp=2", {}, {"bucket_mb": 1e-3, "compile": None})


def test_size_one_axes_do_nothing(ranks):
    ranks(2).run(_gpt_case, "dp=1,tp=2", {}, {"compile": None})
    ranks(1).run(_gpt_case, "dp=1,tp=1", {}, {"compile": None})


def _two_steps_on_one_rank(*, sharded: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = models.gpt()
    if sharded:
        rules = sl.Rules(models.GPT_RULES, sizes=models.GPT_SIZES)
        model = sl.shard_model(model, "dp=1,tp=1", rules)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        models.spread(model(*models.tokens(step)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_mesh_of_one_rank_changes_no_bit(ranks):
    found, wanted = (ranks(1).run(_two_steps_on_one_rank, sharded=sharded)[0] for sharded in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class _Picture(nn.Module):
    """Weights with channels last in memory, and one with its dims swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.swapped = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)) @ self.swapped


def _pictures(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


def _strides(mesh: str) -> None:
    rules = sl.Rules({"conv": "colwise"} if "tp" in mesh else {}, unmatched="replicate")
    assert_same_numbers(_Picture, _pictures, models.spread, mesh, rules)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_parameters_that_are_not_contiguous(ranks, mesh):
    ranks(MESHES.get(mesh, 2)).run(_strides, mesh)


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 4, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


def _sequences(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64),), {}


def _attention_of_torch(given: dict[str, str]) -> None:
    rules = sl.Rules(given, sizes={"qkv": 3, "heads": 4} if "qkv" in str(given) else {}, unmatched="replicate")
    assert_same_numbers(_Attending, _sequences, models.spread, "tp=2", rules, optimizer=torch.optim.SGD)


@pytest.mark.parametrize(
    "rules",
    [
        {"attention": "(qkv heads@tp head)", "attention.out_proj": "rowwise"},
        {"attention": "(qkv heads@tp head)"},
        {"attention.out_proj": "rowwise"},  # a module whose forward is never called
    ],
    ids=str,
)
def test_multihead_attention_of_torch(ranks, rules):
    ranks(2).run(_attention_of_torch, rules)


class _Reading(nn.Module):
    """Modules whose weights others read: a table tied by hand, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.never_called = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.inner = nn.ModuleList(models.MLP() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for mlp in self.inner:
            x = x + nn.functional.pad(mlp(x), (0, 1))
            x = x + torch.tanh(nn.functional.linear(x, self.never_called.weight, self.never_called.bias))
        return self.norm(x) @ self.embed.weight.t()


def _reading(step: int) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    return (torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(step)),), {}


def _read_elsewhere(mesh: str, rules: dict[str, str], options: dict[str, Any]) -> None:
    given = sl.Rules({**rules, "embed": "rowwise"}, unmatched="replicate")
    assert_same_numbers(_Reading, _reading, models.spread, mesh, given, optimizer=torch.optim.SGD, **options)


@pytest.mark.covering
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "no_sync": True}, {"compile": None}], ids=str)
@pytest.mark.parametrize("rules", [{}, models.MLP_RULES, {"never_called": "colwise"}, {"never_called": "rowwise"}])
def test_weights_that_other_modules_read(ranks, rules, options):
    ranks(4).run(_read_elsewhere, "dp=2,tp=2", rules, options)


def _gradients_of_gradients(rules: dict[str, str]) -> None:
    torch.manual_seed(0)
    reference = models.MLP().double()
    sharded = sl.shard_model(copy.deepcopy(reference), "tp=2", rules, compile=None)
    for model in (reference, sharded):
        x = models.rows(0)[0][0].requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(models.spread(output), x, create_graph=True)
        (slope.square().sum() + output.sin().sum()).backward()
    wanted = gradients(reference)
    assert all(relative(found, wanted[name]) <= TOLERANCE for name, found in gradients(sharded).items())


@pytest.mark.parametrize(
    "rules", [models.MLP_RULES, {**models.MLP_RULES, "^output": "batch@tp embed"}, {"up": "colwise", "down": "colwise"}]
)
def test_the_gradient_of_a_gradient(ranks, rules):
    """As gradient penalties and second-order methods take it."""
    ranks(2).run(_gradients_of_gradients, rules)


def _sequence_parallel(mesh: str) -> None:
    rules = sl.Rules(
        {
            **models.GPT_RULES,
            "blocks.*.norm1.output": "batch seq embed",
            "blocks.*.norm2.output": "batch seq embed",
            "attn.proj.output": "batch seq@tp embed",
            "mlp.down.output": "batch seq@tp embed",
            "blocks.*.output": "batch seq@tp embed",
        },
        sizes=models.GPT_SIZES,
        unmatched="replicate",
    )
    assert_same_numbers(models.gpt, models.tokens, models.spread, mesh, rules, compile=None)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_residual_stream_laid_out_on_the_sequence(ranks, mesh):
    ranks(MESHES[mesh]).run(_sequence_parallel, mesh)


def _mlp(mesh: str, width: int, options: dict[str, Any]) -> None:
    assert_same_numbers(lambda: models.MLP(width), models.rows, models.spread, mesh, models.MLP_RULES, **options)


@pytest.mark.parametrize("width", [1, 3, 7, 8])
def test_uneven_and_empty_shards(ranks, width):
    ranks(4).run(_mlp, "tp=4", width, {})


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
def test_optimizers_on_local_shards_and_on_dtensors(ranks, optimizer):
    ranks(4).run(_mlp, "dp=2,tp=2", 7, {"optimizer": getattr(torch.optim, optimizer)})


# --- what else a loop does ----------------------------------------------------------------------------------------


def _pair(mesh: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    reference = models.MLP().double()
    return reference, sl.shard_model(copy.deepcopy(reference), mesh, models.MLP_RULES, **options)


def _close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert {name: relative(got[name], want[name]) for name in want if relative(got[name], want[name]) > TOLERANCE} == {}


def _no_sync() -> None:
    reference, sharded = _pair("dp=2,tp=2")
    with sl.no_sync(sharded):
        models.spread(sharded(*local_rows(models.rows(0)[0], sl.plan_of(sharded).mesh))).backward()
    own = gradients(sharded)["down.bias"]
    others = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(others, own)
    assert not torch.equal(others[0], others[3]), "inside no_sync each data rank keeps its own gradient"
    models.spread(sharded(*local_rows(models.rows(1)[0], sl.plan_of(sharded).mesh))).backward()
    for step in range(2):
        models.spread(reference(*models.rows(step)[0])).backward()
    _close(gradients(sharded), gradients(reference))


def test_no_sync_reduces_the_sum_later(ranks):
    ranks(4).run(_no_sync)


def _frozen_then_thawed() -> None:
    reference, sharded = _pair("dp=2,tp=2")
    for model in (reference, sharded):
        model.up.requires_grad_(False)
    for step in range(3):
        for model in (reference, sharded):
            model.zero_grad()
            model.up.requires_grad_(step > 0)
        models.spread(reference(*models.rows(step)[0])).backward()
        models.spread(sharded(*local_rows(models.rows(step)[0], sl.plan_of(sharded).mesh))).backward()
        _close(gradients(sharded), gradients(reference))


def test_frozen_parameters_stay_frozen_and_may_thaw(ranks):
    ranks(4).run(_frozen_then_thawed)


def _unused() -> None:
    torch.manual_seed(0)
    reference = models.Branches().double()
    sharded = sl.shard_model(copy.deepcopy(reference), "dp=2", {"**": None})
    index, _ = data_place(sl.MeshShape("dp=2"))
    for signs in ((1, 1), (1, -1), (-1, -1)):
        batch = [models.rows(0)[0][0].abs() * sign for sign in signs]
        for model in (reference, sharded):
            model.zero_grad()
        (sum(reference(x).square().mean() for x in batch) / 2).backward()
        sharded(batch[index]).square().mean().backward()
        _close(gradients(sharded), gradients(reference))


def test_parameters_unused_on_some_ranks_or_on_all(ranks):
    ranks(2).run(_unused)


def _clip() -> None:
    reference, sharded = _pair("dp=2,tp=2")
    models.spread(reference(*models.rows(0)[0])).backward()
    models.spread(sharded(*local_rows(models.rows(0)[0], sl.plan_of(sharded).mesh))).backward()
    want = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    got = nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)
    assert relative(got.full_tensor() if isinstance(got, DTensor) else got, want) <= TOLERANCE
    _close(gradients(sharded), gradients(reference))


def test_torchs_own_gradient_clipping_sees_the_global_norm(ranks):
    ranks(4).run(_clip)


def _state_dicts() -> None:
    reference, sharded = _pair("dp=2,tp=2")
    _close(sl.full_state_dict(sharded), reference.state_dict())
    saved = copy.deepcopy(sharded.state_dict())
    assert saved["up.weight"].shape == reference.up.weight.shape
    torch.manual_seed(1)
    other = models.MLP().double()
    sharded.load_state_dict(other.state_dict())
    _close(values(sharded), values(other))
    sharded.load_state_dict(saved)
    _close(values(sharded), values(reference))


def test_state_dicts_go_round_and_plain_ones_load(ranks):
    ranks(4).run(_state_dicts)


def _optimizer_state() -> None:
    reference, sharded = _pair("dp=2,tp=2")
    pairs = [(m, torch.optim.AdamW(m.parameters())) for m in (reference, sharded)]
    for step in range(2):
        for model, optimizer in pairs:
            batch = models.rows(step)[0]
            batch = batch if model is reference else local_rows(batch, sl.plan_of(sharded).mesh)
            optimizer.zero_grad()
            models.spread(model(*batch)).backward()
            optimizer.step()
        if step == 0:  # the state of one device continues the sharded run
            pairs[1][1].load_state_dict(copy.deepcopy(pairs[0][1].state_dict()))
    state = pairs[1][1].state[sharded.up.weight]["exp_avg"]
    assert isinstance(state, DTensor) and state.shape == reference.up.weight.shape
    assert pairs[1][1].param_groups[0]["fused"] is None, "the kernel chosen for the step is not the user's choice"
    assert all(p is q for p, q in zip(pairs[1][1].param_groups[0]["params"], sharded.parameters(), strict=True))
    _close(values(sharded), values(reference))


def test_optimizer_state_is_global_outside_and_loads_from_one_device(ranks):
    ranks(4).run(_optimizer_state)


def _nested() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.MLP()

        def forward(self, batch: dict[str, Any], scale: float) -> dict[str, Any]:
            y = self.net(batch["x"][0]) * scale
            return {"y": [y], "n": len(batch), "sum": (y.sum(), None)}

    torch.manual_seed(0)
    model = sl.shard_model(Nested().double(), "tp=2", models.MLP_RULES)
    out = model({"x": [models.rows(0)[0][0]]}, 2.0)
    assert type(out["y"][0]) is torch.Tensor and out["n"] == 1 and out["sum"][0].item() == out["y"][0].sum().item()


def test_nested_structures_in_and_out(ranks):
    ranks(2).run(_nested)


def _dropout() -> None:
    rules = sl.Rules(models.GPT_RULES, sizes=models.GPT_SIZES)
    assert_same_numbers(
        lambda: models.gpt(dropout=0.3), models.tokens, models.spread, "tp=2", rules, compile=None, same_random=True
    )


def test_dropout_draws_what_one_device_draws(ranks):
    ranks(2).run(_dropout)


def _data_ranks_draw_differently() -> None:
    torch.manual_seed(0)
    sl.shard_model(nn.Linear(4, 4), "dp=2,tp=2", {"**": None})
    drawn = [torch.empty(1) for _ in range(4)]
    dist.all_gather(drawn, torch.rand(1))
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and drawn[0] != drawn[2]


def test_data_ranks_have_random_streams_of_their_own(ranks):
    ranks(4).run(_data_ranks_draw_differently)


def _alive_after_training(keeps_its_output: bool) -> bool:
    model = sl.shard_model(models.MLP(), "dp=2,tp=2", models.MLP_RULES)
    if keeps_its_output:
        model.register_forward_hook(lambda model, _args, output: setattr(model, "last", output))
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(models.rows(0)[0][0].float())
    output.square().mean().backward()
    optimizer.step()
    alive = weakref.ref(model)
    del model, optimizer, output
    gc.collect()
    return alive() is not None


@pytest.mark.parametrize("keeps_its_output", [False, True])
def test_a_sharded_model_that_nobody_holds_is_freed(ranks, keeps_its_output: bool):
    assert ranks(4).run(_alive_after_training, keeps_its_output) == [False] * 4
