"""`shard_model` trains the same numbers as one device, in every way a training loop may use it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.testing import assert_equivalent
from shardlib.testing.models import MLP, Numbers, Transformer, batch_for, rules_for

# Neither the vocabulary nor the width of the MLP divides by the ranks of any mesh; queries, keys and values are one
# layer, the head's weight is the embedding's.
GPT = functools.partial(Transformer, vocab=15, heads=4, layers=2, tied=True)
UNEVEN = functools.partial(MLP, width=7)
RULES = rules_for(MLP())
SGD = functools.partial(torch.optim.SGD, lr=1e-2)


def _prove(mesh: str, model: Callable[[], nn.Module] = UNEVEN, rules: Any = None, **options: Any) -> None:
    made = model()
    given = {"rules": rules_for(made) if rules is None else rules, "rng": "fast", "steps": 2, **options}
    assert_equivalent(model, batch_for(made), mesh, **given)


_MESHES = "tp=2", "tp=4", "dp=2,tp=2", "dp=4", "dp=2,fsdp=2"


@pytest.mark.parametrize(
    ("mesh", "compile"),
    [
        *((mesh, None) for mesh in _MESHES),
        *(pytest.param(mesh, "auto", marks=[pytest.mark.compiled, pytest.mark.deep]) for mesh in _MESHES),
    ],
)
def test_gpt_with_fused_qkv_and_tied_head(mesh: str, compile: str | None):
    """Compiled ones are proved by default with dropout too: test_exact_models.py, test_recompute.py."""
    _prove(mesh, GPT, compile=compile)


@pytest.mark.parametrize(
    "options", [{"accumulate": 3}, {"accumulate": 2, "no_sync": True}, {"bucket_mb": 1e-3}], ids=str
)
def test_several_passes_and_many_small_buckets_give_the_same_gradients(options: dict[str, Any]):
    _prove("dp=2,tp=2", **options)


@pytest.mark.parametrize("mesh", ["dp=1,tp=2", "dp=1,tp=1"])
def test_size_one_axes_do_nothing(mesh: str):
    _prove(mesh)


def _two_steps_on_one_rank(*, sharded: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT()
    if sharded:
        model = sl.shard_model(model, "dp=1,tp=1", rules_for(model))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(batch_for(GPT())(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_mesh_of_one_rank_changes_no_bit(ranks):
    found, wanted = (ranks(1).run(_two_steps_on_one_rank, sharded=sharded)[0] for sharded in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _of_a_plan_and_transforms() -> tuple[bool, torch.dtype]:
    made = sl.plan(UNEVEN(), "dp=1,tp=1", RULES)
    model = sl.shard_model(UNEVEN(), "dp=1,tp=1", made, transforms=sl.precision("bf16"))
    return sl.get_plan(model).rows == (made | sl.precision("bf16")).rows, next(model.parameters()).dtype


def test_transforms_apply_to_a_plan_too(ranks):
    assert ranks(1).run(_of_a_plan_and_transforms) == [(True, torch.bfloat16)]


class Picture(nn.Module):
    """Weights with channels last in memory, and one with its dims swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.swapped = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)) @ self.swapped


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("tp=2", marks=pytest.mark.deep), "dp=2,tp=2"])
def test_parameters_that_are_not_contiguous(mesh: str):
    rules = sl.Rules({"conv": "colwise"} if "tp" in mesh else {}, unmatched="replicate")
    assert_equivalent(Picture, Numbers((8, 3, 5, 5)), mesh, rules, steps=2)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(8, 4, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    "given",
    [
        {"attention": "(qkv heads@tp head)", "attention.out_proj": "rowwise"},
        {"attention": "(qkv heads@tp head)"},
        {"attention.out_proj": "rowwise"},  # a module whose forward is never called
    ],
    ids=str,
)
def test_multihead_attention_of_torch(given: dict[str, str]):
    rules = sl.Rules(given, sizes={"qkv": 3, "heads": 4} if "qkv" in str(given) else {}, unmatched="replicate")
    assert_equivalent(Attending, Numbers((8, 5, 8)), "tp=2", rules, optimizer=SGD, steps=2)


class Reading(nn.Module):
    """Modules whose weights others read: a table tied by hand, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.never_called = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.inner = nn.ModuleList(MLP(width=7) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for mlp in self.inner:
            x = x + nn.functional.pad(mlp(x), (0, 1))
            x = x + torch.tanh(nn.functional.linear(x, self.never_called.weight, self.never_called.bias))
        return self.norm(x) @ self.embed.weight.t()


def _ids(step: int) -> torch.Tensor:
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(step))


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2, "no_sync": True},
        pytest.param({"compile": "auto"}, marks=[pytest.mark.compiled, pytest.mark.deep]),
    ],
    ids=str,
)
@pytest.mark.parametrize("rules", [{}, RULES.rules, {"never_called": "colwise"}, {"never_called": "rowwise"}], ids=str)
def test_weights_that_other_modules_read(rules: dict[str, str], options: dict[str, Any]):
    given = sl.Rules({**rules, "embed": "rowwise"}, unmatched="replicate")
    assert_equivalent(Reading, _ids, "dp=2,tp=2", given, optimizer=SGD, steps=2, **options)


def _penalised(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """As gradient penalties and second-order methods take it."""
    x = batch.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return slope.square().mean() + output.sin().mean()


@pytest.mark.parametrize(
    "rules",
    [RULES.rules, {**RULES.rules, "^output": "batch@tp embed"}, {"up": "colwise", "mix": "colwise"}],
    ids=["rowwise", "rows of the output split", "colwise"],
)
def test_the_gradient_of_a_gradient(rules: dict[str, str]):
    _prove("tp=2", rules=sl.Rules(rules, unmatched="replicate"), loss=_penalised)


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_residual_stream_laid_out_on_the_sequence(mesh: str):
    _prove(mesh, GPT, rules_for(GPT(), sequence=True))


@pytest.mark.parametrize("width", [1, 7, *(pytest.param(width, marks=pytest.mark.deep) for width in (3, 8))])
def test_uneven_and_empty_shards(width: int):
    _prove("tp=4", functools.partial(MLP, width=width))


_ALIKE = [pytest.param(name, marks=pytest.mark.deep) for name in ("Adam", "RMSprop", "Adagrad")]


@pytest.mark.parametrize("optimizer", ["SGD", "NAdam", "Adafactor", *_ALIKE])
def test_optimizers_on_local_shards_and_on_dtensors(optimizer: str):
    _prove("dp=2,tp=2", optimizer=functools.partial(getattr(torch.optim, optimizer), lr=1e-2))


class _Small(nn.Module):
    """Two layers without a norm after them."""

    def __init__(self, outs: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, outs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class _Adding(nn.Module):
    """Adds to what a split module gave, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = _Small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mlp(x)
        y += x
        return y


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Adding() for _ in range(2))
        self.frozen = _Small(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.frozen(x.detach()).relu_().mul_(x[:, :5])


_SMALL = {"up": "colwise", "down": "rowwise"}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("rules", "compile"),
    [(_SMALL, None), ({"up": "colwise", "down": "colwise"}, None), (_SMALL, "auto")],
    ids=["reduced", "gathered", "compiled"],
)
def test_what_a_split_module_gave_may_be_written_to(rules: dict[str, str], compile: str | None):
    def frozen(model: nn.Module, _step: int) -> None:
        model.frozen.requires_grad_(False)

    assert_equivalent(_InPlace, Numbers((8, 6)), "tp=2", rules, steps=2, before_step=frozen, compile=compile)


class _Passing(_Small):
    """Returns what it was given, what it makes in two forms, and a parameter."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = super().forward(x)
        return x, y, y.view(-1), self.down.bias


def _seen_by_others() -> None:
    model = sl.shard_model(_Passing().double(), "tp=2", _SMALL, compile=None)
    for output in model(torch.ones(8, 6, dtype=torch.float64, requires_grad=True) * 1):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            output += 1


def test_what_others_see_may_not(ranks):
    """Autograd would not follow the write to them: an error, never a wrong gradient."""
    ranks(2).run(_seen_by_others)


# --- what else a loop does ----------------------------------------------------------------------------------------


def _mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = UNEVEN().double()
    return model if seed == 0 else model.apply(_drawn)


def _drawn(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def _rows(step: int) -> torch.Tensor:
    """This rank's part of a global batch, on "dp=2,tp=2"."""
    return batch_for(UNEVEN())(step).chunk(2)[dist.get_rank() // 2]


def _no_sync() -> torch.Tensor:
    model = sl.shard_model(_mlp(), "dp=2,tp=2", RULES)
    with sl.no_sync(model):
        model(_rows(0)).square().mean().backward()
    grad = model.down.bias.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


def test_inside_no_sync_each_data_rank_keeps_its_own_gradient(ranks):
    own = ranks(4).run(_no_sync)
    assert torch.equal(own[0], own[1])
    assert not torch.equal(own[0], own[3])


def _frozen() -> nn.Module:
    model = UNEVEN()
    model.up.requires_grad_(False)
    return model


def _thaw(model: nn.Module, step: int) -> None:
    model.up.requires_grad_(step > 0)


def test_frozen_parameters_stay_frozen_and_may_thaw():
    _prove("dp=2,tp=2", _frozen, before_step=_thaw, steps=3)


class Branches(nn.Module):
    """Uses `left` or `right` for each four rows, by their first element, so that ranks may use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.left(four) if four[0, 0] > 0 else self.right(four) for four in x.split(4)])


def _signed(step: int) -> torch.Tensor:
    first, second = ((1, 1), (1, -1), (-1, -1))[step]
    rows = Numbers((8, 6))(step).abs()
    return torch.cat([rows[:4] * first, rows[4:] * second])


def test_parameters_unused_on_some_ranks_or_on_all():
    assert_equivalent(Branches, _signed, "dp=2", {"**": None})


def test_torchs_own_gradient_clipping_sees_the_global_norm():
    """What is clipped shows in the step, since SGD takes gradients as large as they are."""
    _prove("dp=2,tp=2", clip=0.01, optimizer=SGD)


def _state_dicts() -> None:
    sharded, first, other = sl.shard_model(_mlp(), "dp=2,tp=2", RULES), _mlp().state_dict(), _mlp(1).state_dict()
    saved = copy.deepcopy(sharded.state_dict())
    assert all(tensor.shape == first[name].shape for name, tensor in saved.items())
    for given, wanted in ((saved, first), (other, other), (saved, first)):
        sharded.load_state_dict(given)
        found = sl.full_state_dict(sharded)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_state_dicts_go_round_and_plain_ones_load(ranks):
    ranks(4).run(_state_dicts)


def _optimizer_state() -> None:
    reference, sharded = _mlp(), sl.shard_model(_mlp(), "dp=2,tp=2", RULES)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (reference, sharded)]
    for step in range(2):
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            rows = batch_for(UNEVEN())(step) if model is reference else _rows(step)
            model(rows).square().mean().backward()
            optimizer.step()
        if step == 0:  # the state of one device continues the sharded run
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    state = optimizers[1].state[sharded.up.weight]["exp_avg"]
    assert isinstance(state, DTensor) and state.shape == reference.up.weight.shape
    assert optimizers[1].param_groups[0]["fused"] is None, "the kernel chosen for the step is not the user's choice"
    assert all(p is q for p, q in zip(optimizers[1].param_groups[0]["params"], sharded.parameters(), strict=True))
    torch.testing.assert_close(sl.full_state_dict(sharded), dict(reference.state_dict()), rtol=1e-10, atol=1e-12)


def test_optimizer_state_is_global_outside_and_loads_from_one_device(ranks):
    ranks(4).run(_optimizer_state)


def _first_step_without_the_model() -> torch.Tensor:
    model = sl.shard_model(_mlp(), "dp=2", RULES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(_rows(0)).square().mean().backward()
    first = optimizer.param_groups[0]["params"][0]
    wanted = first.detach() - first.grad
    del model
    gc.collect()
    optimizer.step()
    return (first.detach() - wanted).abs().max()


def test_an_optimizer_steps_first_when_its_model_is_gone(ranks):
    assert ranks(2).run(_first_step_without_the_model) == [0, 0]


def _batch_norm(dtype: torch.dtype) -> tuple[float, float]:
    torch.manual_seed(0)
    alone = nn.BatchNorm2d(3).to(dtype)
    x = torch.randn(8, 3, 128, 128).to(dtype)  # of each channel twice as many values as float16 can count
    sharded = sl.shard_model(copy.deepcopy(alone), "dp=2", {"**": None})
    rank = dist.get_rank()
    ours, one = sharded(x[4 * rank : 4 * rank + 4]), alone(x)[4 * rank : 4 * rank + 4]
    assert ours.dtype == dtype
    return (ours - one).abs().max().item(), (sharded.running_var - alone.running_var).abs().max().item()


def test_batch_norm_counts_more_examples_than_half_precision_can(ranks):
    (largest, variance), _ = ranks(2).run(_batch_norm, torch.float16)
    # Both sides sum in float32. Outputs below 8 lie 2**-8 apart in float16, and the running variance, near 1, 2**-10.
    assert largest <= 2**-8 and variance <= 2**-10


class NormAndActivation(nn.BatchNorm2d):
    """A forward of its own, as timm's `BatchNormAct2d` has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.3, self.eps)
        return y.relu()


def _images(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def test_a_subclass_of_batch_norm_keeps_its_own_forward():
    model = functools.partial(_convolution, NormAndActivation)
    assert_equivalent(model, _images, "dp=2,tp=2", rules={"0": "replicate", "1": "replicate"}, steps=2)


def _convolution(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm(4))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNEVEN()

    def forward(self, batch: dict[str, Any], scale: float) -> dict[str, Any]:
        y = self.net(batch["x"][0]) * scale
        return {"y": [y], "n": len(batch), "sum": (y.sum(), None)}


def _nested() -> None:
    model = sl.shard_model(Nested().double(), "tp=2", RULES)
    out = model({"x": [batch_for(UNEVEN())(0)]}, 2.0)
    assert type(out["y"][0]) is torch.Tensor and out["n"] == 1 and out["sum"][0].item() == out["y"][0].sum().item()


def test_nested_structures_in_and_out(ranks):
    ranks(2).run(_nested)


def test_dropout_draws_what_one_device_draws():
    _prove("tp=2", functools.partial(GPT, dropout=0.3))


def _data_ranks_draw_differently() -> None:
    torch.manual_seed(0)
    sl.shard_model(nn.Linear(4, 4), "dp=2,tp=2", {"**": None})
    drawn = [torch.empty(1) for _ in range(4)]
    dist.all_gather(drawn, torch.rand(1))
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and drawn[0] != drawn[2]


def test_data_ranks_have_random_streams_of_their_own(ranks):
    ranks(4).run(_data_ranks_draw_differently)


def _alive_after_training(keeps_its_output: bool) -> bool:
    model = sl.shard_model(_mlp(), "dp=2,tp=2", RULES)
    if keeps_its_output:
        model.register_forward_hook(lambda model, _args, output: setattr(model, "last", output))
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(_rows(0))
    output.square().mean().backward()
    optimizer.step()
    alive = weakref.ref(model)
    del model, optimizer, output
    gc.collect()
    return alive() is not None


@pytest.mark.parametrize("keeps_its_output", [False, True])
def test_a_sharded_model_that_nobody_holds_is_freed(ranks, keeps_its_output: bool):
    assert ranks(4).run(_alive_after_training, keeps_its_output) == [False] * 4
