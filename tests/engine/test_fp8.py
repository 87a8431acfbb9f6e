"""Linear modules in float8: within the bounds of the formats, alike on any number of ranks, never silently left out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib.engine.feature import fp8
from shardlib.errors import CheckpointError, PlanError
from shardlib.testing.models import Tokens, perturb, rules_for
from shardlib.transforms import parse
from tests.engine.low_precision import Trained, gpt, train

# Of a format: half the distance of neighbours, relative for normal numbers and absolute for subnormal ones, which are
# 2**-3 or 2**-2 of the smallest normal number apart; the largest number.
FORMATS = {fp8.E4M3: (2.0**-4, 2.0**-10, 448.0), fp8.E5M2: (2.0**-3, 2.0**-17, 57344.0)}
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}


def _rounding(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding may move each element by. A scale of a power of two brings the largest above half of the range, so
    that in units of the tensor a subnormal's error is at most doubled."""
    relative, absolute, limit = FORMATS[dtype]
    return torch.maximum(relative * x.abs(), 2 * absolute * x.abs().max() / limit)


def _bound(a: torch.Tensor, a_type: torch.dtype, b: torch.Tensor, b_type: torch.dtype) -> torch.Tensor:
    """Of `a @ b.T` in float8: |(a + da) (b + db) - a b| <= |a| |db| + |da| |b| + |da| |db|, summed over k; then the
    sum of k products in float32, and one rounding of the result to bfloat16."""
    da, db = _rounding(a, a_type), _rounding(b, b_type)
    product = a.abs() @ db.T + da @ b.abs().T + da @ db.T
    size = (a.abs() + da) @ (b.abs() + db).T
    summed = product + a.shape[1] * UNIT[torch.float32] * size
    return summed + UNIT[torch.bfloat16] * ((a @ b.T).abs() + summed)


def _linear(features: tuple[int, int], bias: bool = True) -> nn.Linear:
    module = perturb(nn.Linear(*features, bias=bias)).to(torch.bfloat16)
    fp8.install(module, fp8.Linears(("",)))
    return module


def _scaled_randn(shape: tuple[int, ...], size: float, seed: int) -> torch.Tensor:
    """Normal numbers of one size, some of them a thousand times smaller, and some rows 2**16 times: more than e4m3
    tells from zero beside the others, and not more than e5m2 does."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * size
    x = torch.where(torch.rand(shape[0], 1, generator=generator) < 0.3, x / 2**16, x)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, x / 1000, x).to(torch.bfloat16)


# Whose products are normal numbers of bfloat16 too, the smallest included, some 1e-17 each.
SIZES = st.sampled_from([1e-9, 1e-6, 1.0, 3e4, 1e15])


@given(
    rows=st.integers(1, 40), features=st.tuples(*[st.sampled_from([16, 48, 128])] * 2),
    size=SIZES, grad_size=SIZES, bias=st.booleans(), seed=st.integers(0, 100),
)  # fmt: skip
def test_forward_and_backward_are_within_the_bounds_of_the_formats(rows, features, size, grad_size, bias, seed):
    module = _linear(features, bias)
    x = _scaled_randn((rows, features[0]), size, seed).requires_grad_()
    grad = _scaled_randn((rows, features[1]), grad_size, seed + 1)
    y = module(x)
    y.backward(grad)
    a, w, g = x.detach().double(), module.weight.detach().double(), grad.double()
    offset = 0.0 if module.bias is None else module.bias.detach().double()

    def check(found: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> None:
        assert found.dtype == torch.bfloat16
        assert ((found.double() - wanted).abs() <= bound).all()

    # The bias is added before the result is rounded: that once more.
    both = torch.as_tensor(offset).abs() * (UNIT[torch.bfloat16] + 2 * UNIT[torch.float32])
    check(y.detach(), a @ w.T + offset, _bound(a, fp8.E4M3, w, fp8.E4M3) + both)
    assert x.grad is not None and module.weight.grad is not None
    check(x.grad, g @ w, _bound(g, fp8.E5M2, w.T, fp8.E4M3))
    check(module.weight.grad, g.T @ a, _bound(g.T, fp8.E5M2, a.T, fp8.E4M3))
    if module.bias is not None:
        assert torch.equal(module.bias.grad, grad.sum(0))


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_a_number_is_rounded_to_does_not_depend_on_its_neighbours(dtype):
    """Of normal numbers: from the largest down to 2**13 times smaller. So ranks need not agree on a scale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.exp2(torch.rand(64, 16, generator=generator) * 12) * (torch.randn(64, 16, generator=generator)).sign()
    whole, parts = fp8.rounded(x, dtype), [fp8.rounded(part, dtype) for part in x.split([1, 7, 56])]
    together = torch.cat([values.float() * unit for values, unit in parts])
    assert torch.equal(whole.values.float() * whole.unit, together)
    assert len({unit.item() for _, unit in parts}) > 1 or dtype is fp8.E5M2
    assert (whole.values.float().abs().max() > FORMATS[dtype][2] / 2).item()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("largest", [1.0, 448.0, 448.5, 1.75, 1.7500001, 3e38, 1e-37, 0.0])
def test_the_scale_is_the_largest_that_keeps_all_in_range(dtype, largest):
    limit = FORMATS[dtype][2]
    values, unit = fp8.rounded(torch.tensor([largest, -largest / 3]), dtype)
    exact = torch.tensor(largest, dtype=torch.float32).double().item() / unit.double().item()
    assert exact <= limit
    assert exact > limit / 2 or unit.item() == 2.0**-126
    assert values.float().isfinite().all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(bad):
    """Where float8 has no infinity, one would become a large number."""
    module = _linear((16, 16))
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    x[1, 2] = bad
    assert module(x).isnan().all()


def test_shapes_and_layouts_of_inputs():
    module = _linear((16, 32))
    x = _scaled_randn((6, 16), 1.0, 0)
    wanted = module(x)
    assert torch.equal(module(x.view(3, 2, 16)), wanted.view(3, 2, 32))
    assert torch.equal(module(x.T.contiguous().T), wanted)
    assert torch.equal(module(x[0]), module(x[:1])[0])
    assert module(x[:0]).shape == (0, 32)
    module(x).sum().backward()  # its gradient is one number, expanded


def test_only_the_weight_and_float8_are_kept_for_backward():
    module = _linear((16, 32))
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(torch.ones(8, 16, dtype=torch.bfloat16, requires_grad=True))
    assert [(t.dtype, t.numel()) for t in kept if t is not module.weight] == [(fp8.E4M3, 128), (torch.float32, 1)]


# --- training on ranks ------------------------------------------------------------------------------------------------

FP8, BF16 = sl.precision("fp8"), sl.precision("bf16")
STAGES = {"replicate": sl.replicate(), "zero(1)": sl.zero(1), "zero(2)": sl.zero(2), "zero(3)": sl.zero(3)}


def _errors(found: Trained, exact: Trained) -> tuple[float, float]:
    return found.error(exact), float((found.gradients - exact.gradients).norm() / exact.gradients.norm())


def test_training_on_ranks_is_as_near_to_float64_as_on_one(ranks):
    exact = ranks(1).run(train, "dp=1", dtype=torch.float64)[0]
    single = _errors(ranks(1).run(train, "dp=1", FP8)[0], exact)
    assert single[1] > 3 * _errors(ranks(1).run(train, "dp=1", BF16)[0], exact)[1]  # it was float8
    # Sums over ranks in another order move a loss, and a gradient, by a unit in the last place of bfloat16.
    unit = torch.finfo(torch.bfloat16).eps
    for stage in STAGES.values():
        runs = ranks(2).run(train, "dp=2", FP8, stage)
        assert runs[0].losses == runs[1].losses and torch.equal(runs[0].gradients, runs[1].gradients)
        errors = _errors(runs[0], exact)
        assert errors[0] < 2 * single[0] + unit
        assert errors[1] < 2 * single[1] + unit


def test_stages_do_not_change_a_bit(ranks):
    runs = [ranks(2).run(train, "dp=2", FP8, stage)[0].losses for stage in STAGES.values()]
    assert all(run == runs[0] for run in runs)


def test_scales_of_ranks_need_not_agree(ranks):
    """Gradients on two ranks are as near to those of one rank as in bfloat16, though float8 is 16 times coarser: what
    bfloat16 sums in another order is all that differs. Scales of 448 / amax and 57344 / amax set them 50 times as far
    apart."""
    distances = []
    for recipe in (FP8, BF16):
        one, two = ranks(1).run(train, "dp=1", recipe)[0], ranks(2).run(train, "dp=2", recipe)[0]
        distances.append(_errors(two, one)[1])
    assert distances[0] < 4 * distances[1]


# --- what is told -----------------------------------------------------------------------------------------------------


def _told(model: nn.Module, mesh: str, rules: Any, *transforms: Any) -> tuple[tuple[str, ...], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sl.shard_model(model, mesh, rules, transforms=transforms, compile=None)
    return sl.get_plan(model).notes, [str(warning.message) for warning in caught]


def _told_of_gpt(mesh: str, transform: Any, rules: Any = None, **changes: Any) -> tuple[tuple[str, ...], list[str]]:
    notes, warned = _told(gpt(**changes), mesh, rules or {"**": None}, transform)
    return tuple(note for note in notes if "float8" in note), [text for text in warned if "float8" in text]


ATTENTION = [f"blocks.{i}.attn.{name}" for i in range(2) for name in ("qkv", "proj")]
MLPS = [f"blocks.{i}.mlp.{name}" for i in range(2) for name in ("up", "down")]
ALL = [*ATTENTION[:2], *MLPS[:2], *ATTENTION[2:], *MLPS[2:]]


def _names(names: list[str]) -> str:
    return ", ".join(names)


def test_what_multiplies_in_float8_is_told(ranks):
    notes, warned = ranks(2).run(_told_of_gpt, "dp=2", FP8)[0]
    assert notes == (f"Multiply in float8: {_names([*ALL, 'head'])}.",)
    assert warned == []
    chosen = sl.precision("fp8", linears=("blocks.1.mlp", "attn.qkv"))
    notes, warned = ranks(2).run(_told_of_gpt, "dp=2", chosen)[0]
    assert notes == (f"Multiply in float8: {_names([ATTENTION[0], ATTENTION[2], *MLPS[2:]])}.",)


def test_features_that_are_not_multiples_of_16_are_told(ranks):
    notes, warned = ranks(2).run(_told_of_gpt, "dp=2", FP8, vocab=20)[0]
    spared = "Not in float8, since its features are not multiples of 16: head."
    assert notes == (f"Multiply in float8: {_names(ALL)}.", spared)
    assert warned == [spared]


def test_what_is_kept_in_float32_is_told(ranks):
    notes, warned = ranks(2).run(_told_of_gpt, "dp=2", sl.precision("fp8", keep="mlp"))[0]
    spared = f"Not in float8, since its weight is float32, not bfloat16: {_names(MLPS)}."
    assert notes == (f"Multiply in float8: {_names([*ATTENTION, 'head'])}.", spared)
    assert warned == [spared]


def test_regions_of_a_model_axis_are_told(ranks):
    rules = sl.Rules({"mlp.up": "colwise", "mlp.down": "rowwise"}, unmatched="replicate")
    notes, warned = ranks(2).run(_told_of_gpt, "tp=2", FP8, rules_for(gpt()))[0]
    assert notes[-1].startswith("Not in float8, since it computes on DTensors, in a region of a model axis: blocks.0")
    assert len(warned) == 1 and notes[-1] in warned[0]
    notes, warned = ranks(2).run(_told_of_gpt, "tp=2", FP8, rules)[0]
    assert notes == (
        f"Multiply in float8: {_names([*ATTENTION, 'head'])}.",
        f"Not in float8, since it computes on DTensors, in a region of a model axis: {_names(MLPS)}.",
    )
    assert warned == [notes[1]]


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Odd(nn.Module):
    """Linear modules whose products are not made by `nn.Linear.forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.attention, self.plain = Own(16, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16)


def _choose(model: nn.Module, device: str = "cpu", **changes: Any) -> fp8.Linears:
    made = sl.plan(model, "dp=2", {"**": None}, transforms=[sl.precision("fp8", **changes)])
    return fp8.choose(model, made, torch.device(device), ())


def test_products_that_are_made_elsewhere_are_told():
    with pytest.warns(UserWarning, match="Not in float8") as caught:
        linears = _choose(Odd())
    assert len(caught) == 1
    assert linears.notes() == (
        "Multiply in float8: plain.",
        "Not in float8, since Own has a forward of its own: own.",
        "Not in float8, since nn.MultiheadAttention reads its weight without calling it: attention.out_proj.",
    )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_hardware_without_float8_is_told(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if capability >= (8, 9):
        assert _choose(nn.Linear(16, 16), "cuda").names == ("",)
        return
    with pytest.warns(UserWarning, match=r"takes a GPU of compute capability 8.9, not 8.0: the model itself"):
        assert _choose(nn.Linear(16, 16), "cuda").names == ()


def test_a_device_of_another_kind_is_told():
    with pytest.warns(UserWarning, match="not on xpu: the model itself"):
        assert _choose(nn.Linear(16, 16), "xpu").names == ()


@pytest.mark.parametrize("wrong", ["mpl", "norm"])
def test_a_pattern_without_a_linear_module_is_refused(wrong):
    with pytest.raises(PlanError) as raised:
        _choose(gpt(), linears=("mlp", wrong))
    assert str(raised.value).startswith(
        f'precision("fp8", linears="{wrong}"): the pattern matches none of the 9 linear modules of this Transformer, '
        "nor a module that one is in; patterns are written as in rules."
    )


def _refused_model_is_as_before() -> None:
    model = gpt()
    before = dict(model.named_parameters())
    with pytest.raises(PlanError, match="matches none"):
        sl.shard_model(model, "dp=1", {"**": None}, transforms=[sl.precision("fp8", linears="mpl")])
    assert all(p is before[name] for name, p in model.named_parameters())


def test_a_refused_model_is_as_before(ranks):
    ranks(1).run(_refused_model_is_as_before)


def _autocast() -> list[bool]:
    """Whether calls under autocast multiplied in float8: on, switched off by the model, to float16."""
    model = sl.shard_model(
        perturb(nn.Linear(32, 32)), "dp=1", {"**": None}, compile=None, transforms=[sl.precision("fp8", autocast=True)]
    )
    x = _scaled_randn((8, 32), 1.0, 0).float()
    exact = F.linear(x, model.weight, model.bias)
    coarse = []
    for context in (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False)):
        with context:
            y = model.forward(x)  # inside of the model's own autocast
        coarse.append(bool((y - exact).norm() > 2**-7 * exact.norm()))
    assert model(x).dtype == torch.float32 and model.weight.dtype == torch.float32
    model(x).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    return [*coarse, bool((model(x) - exact).norm() > 2**-7 * exact.norm())]


def test_under_autocast_as_autocast_says(ranks):
    assert ranks(1).run(_autocast)[0] == [True, False, True]


# --- delayed scaling --------------------------------------------------------------------------------------------------

DELAYED = sl.precision("fp8", scaling="delayed", history=3)


def _delayed(features: tuple[int, int], steps: int = 3) -> tuple[nn.Linear, fp8.History]:
    module = nn.Linear(*features).bfloat16()
    history = fp8.History(("",), steps, torch.device("cpu"))
    fp8.install(module, fp8.Linears(("",), history=history))
    return module, history


@pytest.mark.parametrize("dtype", FORMATS)
@given(data=st.data())
def test_what_is_beyond_earlier_steps_is_cut_off_and_the_rest_is_within_the_format(dtype, data):
    """In range, an element is off by half the distance of its neighbours, relative or, if subnormal, absolute; that of
    a scale which leaves at most one power of two unused. Beyond, it becomes the largest number, of its sign."""
    relative, absolute, limit = FORMATS[dtype]
    earlier = data.draw(st.floats(2.0**-60, 2.0**60, width=32))
    size = earlier * data.draw(st.sampled_from([2.0**-20, 0.1, 1.0, 3.0, 2.0**10]))
    x = _scaled_randn((8, 16), size, data.draw(st.integers(0, 100))).float()
    values, unit = fp8.rounded(x, dtype, x.abs().max(), torch.tensor(earlier))
    most = limit * unit.double()
    assert earlier <= most < 2 * earlier * (1 + 2.0**-20)
    exact, found = x.double(), values.double() * unit.double()
    inside = exact.abs() <= most
    bound = torch.maximum(relative * exact.abs(), absolute * unit.double())
    assert ((found - exact).abs() <= bound)[inside].all()
    assert torch.equal(found[~inside], (most * exact.sign())[~inside])


def test_the_first_step_is_scaled_by_itself_and_later_ones_by_those_before():
    module, history = _delayed((16, 32), steps=2)
    plain = _linear((16, 32))
    plain.load_state_dict(module.state_dict())

    def run(x: torch.Tensor) -> bool:
        """Whether a step is what current scaling makes."""
        results = []
        for each in (module, plain):
            each.zero_grad()
            y = each(x)
            y.backward(torch.ones_like(y))
            results.append((y.detach(), each.weight.grad))
        history.end_step(None)
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    x = _scaled_randn((8, 16), 1.0, 0)
    assert run(x)
    assert history.largest[0].tolist() == [x.abs().max().item(), module.weight.abs().max().item(), 1.0]
    assert run(x)  # as large as before
    assert not run(x * 64)  # cut off
    assert run(x * 64)
    assert run(x * 64) and run(x * 64)
    assert history.largest[0, 0] == 64 * x.abs().max()
    run(x), run(x)
    assert history.largest[0, 0] == x.abs().max()  # what is longer ago is forgotten


def test_what_is_only_looked_at_does_not_count():
    module, history = _delayed((16, 16))
    with torch.no_grad():
        module(torch.ones(4, 16, dtype=torch.bfloat16))
    assert not history.now.any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_and_forgotten(bad):
    module, history = _delayed((16, 16))
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    module(x)
    history.end_step(None)
    x[1, 2] = bad
    assert module(x).isnan().all()
    history.end_step(None)
    assert history.largest[0, 0] == 1


def _histories(mesh: str, *transforms: Any) -> tuple[torch.Tensor, list[bool], torch.Tensor]:
    """Scales after each step of a model whose ranks see other examples; largest magnitudes of this rank alone."""
    model = sl.shard_model(gpt(), mesh, {"**": None}, transforms=transforms, compile=None)
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-3)
    seen, alone = [], []
    for step in range(5):
        optimizer.zero_grad()
        ids = Tokens(8, 5, 16)(step).chunk(dist.get_world_size())[dist.get_rank()]
        for part in ids.chunk(sl.get_plan(model).step.accumulate):
            optimizer.backward(F.cross_entropy(model(part).flatten(0, 1), part.flatten()))
            alone.append(optimizer.stateful["fp8_history"].now.any().item())
        optimizer.step()
        seen.append(optimizer.stateful["fp8_history"].largest.clone())
    return torch.stack(seen), alone, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_ranks_agree_on_scales_bit_for_bit(ranks):
    runs = ranks(2).run(_histories, "dp=2", DELAYED)
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][2], runs[1][2])
    assert runs[0][0].all() and len(runs[0][0].unique(dim=0)) == 5
    single = ranks(1).run(_histories, "dp=1", DELAYED)[0][0]
    # What is largest on any rank is what is largest on one device, but for the scale of a gradient of half as many.
    torch.testing.assert_close(runs[0][0][0, :, :2], single[0, :, :2], rtol=2.0**-6, atol=0)
    torch.testing.assert_close(runs[0][0][0, :, 2], 2 * single[0, :, 2], rtol=2.0**-4, atol=0)


def test_a_step_of_several_passes_is_one_entry(ranks):
    for largest, under_way, _ in ranks(2).run(_histories, "dp=2", DELAYED, sl.accumulate(2), sl.zero(2)):
        assert under_way == [True, False] * 5
        assert len(largest.unique(dim=0)) == 5


def test_training_with_delayed_scales_is_as_near_to_float64_as_with_current_ones(ranks):
    exact = ranks(1).run(train, "dp=1", dtype=torch.float64)[0]
    current = _errors(ranks(1).run(train, "dp=1", FP8)[0], exact)
    # Cut off is what grew since the last three steps, by a few percent: less than float8 rounds.
    for mesh, stage in (("dp=1", sl.replicate()), ("dp=2", sl.zero(2)), ("dp=2", sl.zero(3))):
        runs = ranks(sl.MeshShape(mesh).world_size).run(train, mesh, DELAYED, stage)
        assert all(run.losses == runs[0].losses for run in runs)
        assert _errors(runs[0], exact)[0] < 2 * current[0] + torch.finfo(torch.bfloat16).eps


def test_stages_do_not_change_a_bit_with_delayed_scales(ranks):
    runs = [ranks(2).run(train, "dp=2", DELAYED, stage)[0].losses for stage in STAGES.values()]
    assert all(run == runs[0] for run in runs)
    again = ranks(2).run(train, "dp=2", DELAYED, sl.checkpoint_activations())[0].losses
    assert again == runs[0]


def _continued(folder: str, by: str) -> list[tuple[float, list[Any]]]:
    """Losses and histories of six steps; after three, everything goes into a new model."""
    made = [sl.shard_model(gpt(), "dp=2", {"**": None}, transforms=[DELAYED], compile=None) for _ in range(2)]
    optimizers = [sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-2) for model in made]
    seen = []
    for step in range(6):
        which = int(step > 2 and by != "")
        if step == 3 and by == "save":
            sl.save(folder, made[0], optimizers[0])
            sl.load(folder, made[1], optimizers[1])
        elif step == 3 and by == "state_dict":
            made[1].load_state_dict(made[0].state_dict())
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        ids = Tokens(8, 5, 16)(step).chunk(2)[dist.get_rank()]
        optimizers[which].zero_grad()
        loss = F.cross_entropy(made[which](ids).flatten(0, 1), ids.flatten())
        optimizers[which].backward(loss)
        optimizers[which].step()
        seen.append((loss.item(), optimizers[which].stateful["fp8_history"].state_dict()["steps"].tolist()))
    return seen


@pytest.mark.parametrize("by", ["save", "state_dict"])
def test_scales_are_saved_with_the_optimizer(ranks, tmp_path, by):
    wanted = ranks(2).run(_continued, "", "")
    assert ranks(2).run(_continued, str(tmp_path / "saved"), by) == wanted
    assert len({loss for loss, _ in wanted[0]}) == 6


def test_histories_of_other_lengths_and_models():
    long, short = (fp8.History(("a", "b"), steps, torch.device("cpu")) for steps in (4, 2))
    for step in range(6):
        long.now.fill_(step)
        long.end_step(None)
    assert long.state_dict()["steps"][:, 0, 0].tolist() == [2, 3, 4, 5]
    short.load_state_dict(long.state_dict())
    assert short.state_dict()["steps"][:, 0, 0].tolist() == [4, 5] and short.largest.eq(5).all()
    long.load_state_dict(short.state_dict())
    assert long.state_dict()["steps"][:, 0, 0].tolist() == [0, 0, 4, 5]
    with pytest.raises(CheckpointError, match=r"In one of them only: b, c\. Choose the same linears="):
        long.load_state_dict(fp8.History(("a", "c"), 4, torch.device("cpu")).state_dict())


def test_delayed_scaling_is_written_and_read():
    text = 'precision("fp8", scaling="delayed")'
    assert repr(parse(text)) == text
    assert parse(text) == sl.precision("fp8", scaling="delayed")
    made = sl.plan(nn.Linear(16, 16), "dp=2", {"**": None}, transforms=[DELAYED])
    assert made.step.fp8_history == 3
    assert (made | sl.zero(2)).step.fp8_history == 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"name": "bf16", "scaling": "delayed"}, 'scaling contradicts the rest: it is for "fp8"'),
        ({"name": "fp8", "history": 4}, 'history contradicts the rest: it is for scaling="delayed"'),
        ({"name": "fp8", "scaling": "late"}, 'scaling is "current" or "delayed"'),
        ({"name": "fp8", "scaling": "delayed", "history": 0}, "history is a number of steps, from 1 up"),
    ],
)
def test_contradictions_about_scales_are_refused(wrong, message):
    with pytest.raises(PlanError, match=message):
        sl.precision(**wrong)
