"""Every stage of ZeRO trains the numbers of one device: whatever optimizer, mesh, accumulation and clipping."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.engine.data.gradients import GradientReducer
from shardlib.engine.sharded import record_of
from shardlib.errors import ShardingError
from shardlib.testing import assert_equivalent
from shardlib.testing.equivalence.measure import FLOAT64_LIMIT, distance, scale_of, size
from shardlib.testing.models import MLP, Numbers, Tokens, perturb, rules_for
from shardlib.testing.strategies import ModelFactory
from tests.engine.tiny import GPT, Lamb
from tests.engine.whole import gradients, values

STAGES = {
    "zero(1)": sl.zero(1),
    "zero(2)": sl.zero(2),
    "zero(3)": sl.zero(3),
    "fsdp()": sl.fsdp(),
    "fsdp(kept)": sl.fsdp(reshard_after_forward=False),
}
MESHES = ["dp=2", "dp=3", "dp=2,tp=2", "tp=2,dp=2", "dp=2,fsdp=2"]


def _prove(mesh: str, *transforms: Any, **options: Any) -> None:
    rows = 6 if sl.MeshShape(mesh).data_ranks == 3 else 8
    options = {"steps": 2, **options}
    assert_equivalent(GPT, Tokens(rows, 5, 7), mesh=mesh, rules=rules_for(GPT()), transforms=transforms, **options)


@pytest.mark.covering
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_on_each_mesh(stage, mesh):
    _prove(mesh, STAGES[stage])


@pytest.mark.covering
@pytest.mark.parametrize("stage", ["zero(1)", "zero(2)", "zero(3)"])
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"accumulate": 3, "no_sync": True}, {"clip": 0.1}, {"bucket_mb": 1e-4}],
    ids=["accumulate", "no_sync", "clip", "small buckets"],
)
def test_accumulation_clipping_and_buckets_of_one_tensor(stage, options):
    _prove("dp=2,tp=2", STAGES[stage], **options)


@pytest.mark.parametrize("stage", ["zero(2)", "zero(3)"])
def test_axes_may_be_chosen_and_patterns_may_leave_tensors_out(stage):
    number = int(stage[5])
    _prove("dp=2,fsdp=2", sl.zero(number, axis="fsdp"))
    _prove("dp=2", sl.zero(number, only="blocks.*"))
    _prove("dp=2", sl.zero(number), sl.replicate(only="blocks.1"))


def test_hybrid_sharding_and_nested_axes():
    _prove("dp=2,fsdp=2", sl.hsdp(shard="fsdp", replicate="dp"))
    _prove("dp=2,fsdp=2", sl.zero(2, axis="fsdp"), sl.zero(1, axis=("dp", "fsdp")))


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["dp=2", "dp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"optimizer": lambda p: _muon(p)}], ids=["", "2", "muon"])
@pytest.mark.parametrize("stage", [1, 2])
def test_updated_parameters_may_arrive_while_the_next_forward_runs(mesh, options, stage):
    _prove(mesh, sl.zero(stage, overlap=True), **{"steps": 3, **options})


@pytest.mark.compiled
def test_updated_parameters_may_arrive_while_compiled_blocks_run():
    _prove("dp=2", sl.zero(1, overlap=True), sl.replicate("blocks.1"), compile="aot_eager")


def _pending(model: nn.Module) -> list[str]:
    """Modules whose parameters have not arrived."""
    updates = record_of(model).updates
    return sorted({unit for bucket in updates._pending for unit in bucket.units})


def _trained_with(overlap: bool) -> tuple[list[torch.Tensor], list[list[str]]]:
    model = _model(sl.zero(1, overlap=overlap), bucket_mb=1e-3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    arriving, saw = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: saw.append(_pending(model)))
    for step in range(3):
        _backward(model, step)
        optimizer.step()
        arriving.append(_pending(model))
    model.state_dict()
    arriving.append(_pending(model))
    return [p.detach() for p in model.parameters()], arriving + saw


def test_blocks_wait_for_their_own_updates_only(ranks):
    there, _ = ranks(2).run(_trained_with, False)[0]
    for params, seen in ranks(2).run(_trained_with, True):
        assert all(torch.equal(a, b) for a, b in zip(params, there, strict=True))
        blocks = ["blocks.0", "blocks.1"]
        assert seen[:4] == [["", *blocks]] * 3 + [[]]  # after each step, and after state_dict()
        assert seen[4:] == [[]] * 2 + [blocks[1:], []] * 2


def _what_waits(what: str, folder: str) -> bool:
    model = _model(sl.zero(1, overlap=True), bucket_mb=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model)
    optimizer.step()
    assert _pending(model)
    if what == "full_state_dict":
        sl.full_state_dict(model)
    elif what == "save":
        sl.save(folder, model, optimizer)
    elif what == "load_state_dict":
        model.load_state_dict({name: torch.full_like(p, 7.0) for name, p in model.state_dict().items()})
        optimizer.zero_grad()
        assert all(bool((p == 7).all()) for p in model.parameters())
    else:
        optimizer.step()
        model.eval()(Tokens(4, 5, 7)(0))
    return not _pending(model)


@pytest.mark.parametrize("what", ["full_state_dict", "save", "load_state_dict", "two steps, then eval"])
def test_what_reads_parameters_waits_for_them(ranks, what, tmp_path):
    assert all(ranks(2).run(_what_waits, what, str(tmp_path / "saved")))


@pytest.mark.compiled
@pytest.mark.deep
@pytest.mark.parametrize("stage", ["zero(2)", "zero(3)"])
def test_blocks_may_be_compiled_while_parameters_are_stored_in_parts(stage):
    """With dropout that is drawn again they are by default: see test_recompute.py."""
    _prove("dp=2,tp=2", STAGES[stage], compile="auto")


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True)


def _adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


def _lamb(params: Any) -> torch.optim.Optimizer:
    sl.register_optimizer(Lamb, needs="tensor")
    return Lamb(params)


@pytest.mark.covering
@pytest.mark.parametrize("stage", ["zero(1)", "zero(2)", "zero(3)"])
@pytest.mark.parametrize("optimizer", [_momentum, _adafactor, _muon, _lamb], ids=lambda f: f.__name__[1:])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
def test_each_optimizer_at_each_stage(optimizer, stage, mesh):
    _prove(mesh, STAGES[stage], optimizer=optimizer, clip=1.0)


def _whole_states_are_shared_out() -> tuple[int, int]:
    model = sl.shard_model(perturb(GPT()), "dp=2", rules_for(GPT()), transforms=[sl.zero(2)])
    optimizer = _lamb(model.parameters())
    model(Tokens(4, 5, 7)(0)).square().mean().backward()
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, DTensor)]
    return sum(t.to_local().numel() for t in held), sum(t.numel() for t in held)


def test_state_of_optimizers_that_need_whole_tensors_lies_in_parts_between_steps(ranks):
    parts, wholes = zip(*ranks(2).run(_whole_states_are_shared_out), strict=True)
    assert sum(parts) == wholes[0] == wholes[1]


# --- what users see -------------------------------------------------------------------------------------------------


def _model(*transforms: Any, mesh: str = "dp=2", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = perturb(GPT())
    return sl.shard_model(model, mesh, rules_for(model), transforms=transforms, **options)


def _backward(model: nn.Module, step: int = 0) -> None:
    rows = Tokens(4, 5, 7)(step).chunk(dist.get_world_size())[dist.get_rank()]
    model(rows).square().mean().backward()


def _gradients_and_state_are_dtensors() -> None:
    for stage in (1, 2, 3):
        model = _model(sl.zero(stage))
        optimizer = torch.optim.AdamW(model.parameters(), fused=None)
        _backward(model)
        optimizer.step()
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) == (stage == 3)
            for tensor in (param.grad, optimizer.state[param]["exp_avg"]):
                assert isinstance(tensor, DTensor) and tensor.shape == param.shape, name
                assert tensor.to_local().numel() < tensor.numel(), name


def test_gradients_and_state_are_dtensors_of_global_shape(ranks):
    ranks(2).run(_gradients_and_state_are_dtensors)


def _a_state_dict_goes_both_ways(mesh: str) -> None:
    plain = perturb(GPT())
    model = _model(sl.zero(3), mesh=mesh)
    with torch.no_grad():
        for param in plain.parameters():
            param.add_(1.0)
    model.load_state_dict(plain.state_dict())
    loaded = sl.full_state_dict(model)
    assert all(torch.equal(loaded[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("mesh", ["dp=3", "dp=2,tp=2"])
def test_a_plain_state_dict_goes_into_stored_parts_and_out_again(ranks, mesh):
    ranks(sl.MeshShape(mesh).world_size).run(_a_state_dict_goes_both_ways, mesh)


def _a_closure() -> float:
    model = _model(sl.zero(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(Tokens(4, 5, 7)(0)).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[0]
    return losses[0] - model(Tokens(4, 5, 7)(0)).square().mean().item()


def test_a_closure_runs_once_before_parameters_are_replaced_by_parts(ranks):
    assert all(drop > 0 for drop in ranks(2).run(_a_closure))


class Reader(nn.Module):
    """Reads another module's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        assert self.blocks[1].weight.shape == (8, 8) and self.blocks[1].weight.dtype == torch.float32
        return nn.functional.linear(x, self.blocks[0].weight)


def _reads_a_stored_parameter() -> None:
    torch.manual_seed(0)
    plain, x = Reader(), torch.ones(2, 8)
    model = sl.shard_model(copy.deepcopy(plain), "dp=2", {"**": None}, transforms=[sl.zero(3)])
    assert torch.equal(model(x), plain(x))
    assert isinstance(model.blocks[0].weight, DTensor)  # and the model is as it was
    assert model.blocks[1](torch.ones(2, 8)).shape == (2, 8)


def test_a_stored_parameter_is_never_computed_with(ranks):
    """A module that reads it gets it gathered."""
    ranks(2).run(_reads_a_stored_parameter)


def _steps_on_local_gradients(stage: int, kind: Any) -> None:
    """The gradient of the last parameter is not reduced, so that the step raises when others have been replaced."""
    model, twice = _model(sl.zero(stage)), _model(sl.zero(stage))
    optimizers = [kind([p for p in one.parameters() if p.ndim == 2]) for one in (model, twice)]
    groups, params = optimizers[1].param_groups, [*optimizers[1].param_groups[0]["params"]]
    for step in range(2):
        for one in (model, twice):
            one.zero_grad()
            _backward(one, step)
        optimizers[0].step()
        reduced, params[-1].grad = params[-1].grad, torch.ones_like(params[-1])  # zeros would be accepted
        with pytest.raises(ShardingError, match="no_sync"):
            optimizers[1].step()
        assert optimizers[1].param_groups is groups
        assert [*map(id, groups[0]["params"])] == [*map(id, params)]
        assert {*optimizers[1].state} <= {*params}
        params[-1].grad = reduced
        optimizers[1].step()
    expected, found = values(model), values(twice)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.covering
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_on_what_was_never_reduced_is_refused_and_changes_nothing(ranks, stage, kind):
    ranks(2).run(_steps_on_local_gradients, stage, kind)


class _Broken(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("half-way")


class _MayBreak(nn.Module):
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(self.up(x))
        return self.down(_Broken.apply(y) if self.breaks else y)


_ROWS = Numbers((8, 6))


def _loss_of_rows(model: nn.Module, step: int) -> torch.Tensor:
    shape = sl.get_plan(model).mesh
    index, count = shape.data_place(shape.coordinate(dist.get_rank()))
    return model(_ROWS(step).chunk(count)[index]).square().mean()


def _reduced(model: nn.Module) -> None:
    _loss_of_rows(model, 0).backward()


def _not_reduced(model: nn.Module) -> None:
    with sl.no_sync(model):
        _loss_of_rows(model, 0).backward()


def _both(model: nn.Module) -> None:
    _reduced(model)
    _not_reduced(model)


def _raised(model: nn.Module) -> None:
    model.breaks = True
    with pytest.raises(ArithmeticError, match="half-way"):
        _loss_of_rows(model, 0).backward()
    model.breaks = False


def _raised_in_the_second(model: nn.Module) -> None:
    _reduced(model)
    _raised(model)


def _raised_alone(model: nn.Module) -> None:
    with sl.no_sync(model):
        _raised(model)


def _by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


BEFORE = [_reduced, _not_reduced, _both, _raised, _raised_in_the_second, _raised_alone]
CLEARED = {
    "model": lambda model: model.zero_grad(),
    "model, in place": lambda model: model.zero_grad(set_to_none=False),
    "optimizer": lambda model: torch.optim.SGD(model.parameters()).zero_grad(),
    "optimizer, in place": lambda model: torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False),
    "wrapper": lambda model: sl.OptimizerWrapper(torch.optim.SGD, model).zero_grad(),
    "wrapper, in place": lambda model: sl.OptimizerWrapper(torch.optim.SGD, model).zero_grad(set_to_none=False),
    "by hand": _by_hand,
}


def _gradients_of_rows(*steps: int) -> dict[str, torch.Tensor]:
    """On one device."""
    torch.manual_seed(0)
    model = _MayBreak().double()
    for step in steps:
        model(_ROWS(step)).square().mean().backward()
    return gradients(model)


def _off(model: nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
    found = gradients(model)
    assert found.keys() == wanted.keys()
    return any(distance(found[name], want, scale_of(size(want), 1.0)) > FLOAT64_LIMIT for name, want in wanted.items())


def _sharded_mlp(mesh: str, *transforms: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return sl.shard_model(
        _MayBreak().double(), mesh, {"up": "colwise", "down": "rowwise"}, transforms=transforms, check=False, **options
    )


ALL = list(CLEARED)
PAIRS = [*itertools.product(ALL[:2], BEFORE, [False, True]), *((how, _both, True) for how in ALL[2:])]


def _left_over(mesh: str, *transforms: Any) -> list[tuple[str, str, bool]]:
    """After which backward passes, cleared how, the gradients of later ones are not theirs alone."""
    wanted = {False: _gradients_of_rows(2), True: _gradients_of_rows(1, 2)}
    found = []
    model = _sharded_mlp(mesh, *transforms, bucket_mb=1e-5, compile=None)
    for how, before, alone in PAIRS:
        before(model)
        CLEARED[how](model)
        if alone:
            with sl.no_sync(model):
                _loss_of_rows(model, 1).backward()
        _loss_of_rows(model, 2).backward()
        if _off(model, wanted[alone]):
            found.append((how, before.__name__, alone))
        CLEARED["by hand"](model)
    return found


@pytest.mark.parametrize("stage", ["none", pytest.param("zero(1)", marks=pytest.mark.deep), "zero(2)", "zero(3)"])
def test_nothing_of_gradients_that_were_cleared_is_left(ranks, stage):
    assert ranks(2).run(_left_over, "dp=2", *([STAGES[stage]] if stage in STAGES else [])) == [[]] * 2


def test_nothing_of_them_is_left_beside_a_model_axis(ranks):
    assert ranks(4).run(_left_over, "fsdp=2,tp=2", sl.fsdp()) == [[]] * 4


def _as_on_accelerators(act: Any, *args: Any) -> Any:
    """Act where autograd drops a pass that has raised in a thread of its own: too late for the user's next line."""
    with mock.patch.object(GradientReducer, "_give_back", lambda _reducer: None):
        return act(*args)


def _added_after_a_raised_pass(mesh: str, *transforms: Any) -> bool:
    model = _sharded_mlp(mesh, *transforms, bucket_mb=1e-5, compile=None)
    _raised_in_the_second(model)
    _loss_of_rows(model, 1).backward()
    wanted, first = _gradients_of_rows(0, 1), _gradients_of_rows(0)
    for name in ("down.weight", "down.bias"):  # of which the pass that raised made gradients
        wanted[name] = wanted[name] + first[name]
    return _off(model, wanted)


@pytest.mark.parametrize("stage", ["none", "zero(1)", "zero(2)"])
def test_gradients_of_a_raised_pass_are_the_users_where_another_thread_drops_it(ranks, stage):
    transforms = [STAGES[stage]] if stage in STAGES else []
    assert ranks(2).run(_as_on_accelerators, _left_over, "dp=2", *transforms) == [[]] * 2
    assert ranks(2).run(_as_on_accelerators, _added_after_a_raised_pass, "dp=2", *transforms) == [False] * 2
    assert ranks(2).run(_added_after_a_raised_pass, "dp=2", *transforms) == [False] * 2


def _broken_off_steps(stage: int) -> None:
    model = _sharded_mlp("dp=2,tp=2", sl.zero(stage), sl.accumulate(3))
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model)
    _reduced(model)
    _raised(model)
    optimizer.zero_grad()
    for step in (1, 2, 3):
        _loss_of_rows(model, step).backward()
    assert not _off(model, {name: grad / 3 for name, grad in _gradients_of_rows(1, 2, 3).items()})


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_of_several_passes_of_which_one_raised_begins_anew(ranks, stage):
    ranks(4).run(_broken_off_steps, stage)


def _in_turn(mesh: str, *transforms: Any) -> None:
    sharded = _sharded_mlp(mesh, *transforms)
    torch.manual_seed(0)
    single = _MayBreak().double()
    for step, alone in enumerate([False, True, True, False, True, False]):
        single(_ROWS(step)).square().mean().backward()
        with sl.no_sync(sharded) if alone else contextlib.nullcontext():
            _loss_of_rows(sharded, step).backward()
        if alone:
            for param in (*single.parameters(), *sharded.parameters()):
                param.grad.mul_(0.5)
        else:
            assert not _off(sharded, gradients(single)), step


@pytest.mark.parametrize("transform", [sl.zero(1), sl.zero(3), sl.hsdp(shard="fsdp", replicate="dp")], ids=repr)
def test_gradients_may_be_reduced_and_not_in_turn_and_scaled_in_between(ranks, transform):
    mesh = "dp=2,fsdp=2" if "hsdp" in repr(transform) else "dp=2,tp=2"
    ranks(4).run(_in_turn, mesh, transform)


def _unknown_optimizer() -> None:
    class Unknown(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad, alpha=0.1)

    model = _model(sl.zero(2))
    _backward(model)
    with pytest.warns(UserWarning, match="register_optimizer"):
        Unknown(model.parameters(), {}).step()
    model = _model(sl.zero(3))
    _backward(model)
    with pytest.raises(ShardingError, match="register_optimizer"):
        Unknown(model.parameters(), {}).step()


def test_an_optimizer_that_nothing_is_known_of_is_asked_for(ranks):
    ranks(2).run(_unknown_optimizer)


def _unused(mode: str) -> list[str]:
    """Rank 1 does not use the second layer; nobody uses the third. (What is stored in parts has to be used by all.)"""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers[0](x)
            return y if dist.get_rank() and mode != "zero(3)" else self.layers[1](y)

    torch.manual_seed(0)
    transforms = [STAGES[mode]] if mode in STAGES else []
    model = sl.shard_model(Part(), "dp=2", {"**": None}, transforms=transforms, check=False)
    model(torch.ones(2, 4)).sum().backward()
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("mode", ["replicate", "zero(1)", "zero(2)", "zero(3)"])
def test_a_parameter_that_some_ranks_leave_unused_has_a_gradient_and_one_that_all_do_has_none(ranks, mode):
    assert ranks(2).run(_unused, mode) == [["layers.2.weight"]] * 2


class _Counted(nn.Module):
    """Adds the number of nonzero elements, whose backward returns no gradient, or on one rank another norm."""

    def __init__(self, order_of_one: float = 0.0) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.arange(1.0, 5.0)), nn.Linear(4, 4)
        self.order_of_one = order_of_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = self.order_of_one if dist.get_rank() else 0.0
        return self.out(x).sum() + torch.linalg.norm(self.scale, order)


_ON_TP = {"scale": "dim@tp", "out": "colwise"}
_WITHOUT_GRADIENT = [
    ("tp=2", {"**": None}, None),
    ("tp=2", _ON_TP, None),
    ("dp=2,tp=1", {"**": None}, None),
    *[("dp=2,tp=1", {"**": None}, stage) for stage in ("zero(1)", "zero(2)", "zero(3)")],
]


def _undefined(mesh: str, rules: Any, stage: str | None, order_of_one: float = 0.0) -> tuple[float | None, list[float]]:
    """The gradient of `scale` after three steps, of which the first two are one of two passes; its values then."""
    torch.manual_seed(0)
    transforms = [] if stage is None else [STAGES[stage]]
    model = sl.shard_model(_Counted(order_of_one), mesh, rules, transforms=transforms, check=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for passes in (2, 1):
        optimizer.zero_grad()
        for each in range(passes):
            with contextlib.nullcontext() if each == passes - 1 else sl.no_sync(model):
                model(torch.ones(2, 4)).backward()
        assert model.out.weight.grad is not None
        optimizer.step()
    grad = model.scale.grad
    total = None if grad is None else float(getattr(grad, "full_tensor", lambda: grad)().abs().sum())
    return total, sl.full_state_dict(model)["scale"].tolist()


@pytest.mark.parametrize(("mesh", "rules", "stage"), _WITHOUT_GRADIENT)
def test_a_backward_that_returns_no_gradient_leaves_a_parameter_as_on_one_device(ranks, mesh, rules, stage):
    for total, scale in ranks(2).run(_undefined, mesh, rules, stage):
        assert not total and scale == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("stage", [None, "zero(1)", "zero(2)", "zero(3)"])
def test_a_gradient_that_one_rank_returns_is_averaged_with_zeros(ranks, stage):
    """The norm of order 1 has a gradient of ones."""
    for total, _ in ranks(2).run(_undefined, "dp=2", {"**": None}, stage, 1.0):
        assert total == 2.0


def _asked_for(order_of_one: float) -> torch.Tensor | None:
    model = sl.shard_model(_Counted(order_of_one), "dp=2", {"**": None}, check=False)
    return torch.autograd.grad(model(torch.ones(2, 4)), [model.scale], allow_unused=True)[0]


def test_autograd_grad_returns_none_where_no_backward_returns_a_gradient(ranks):
    assert ranks(2).run(_asked_for, 0.0) == [None, None]


def test_autograd_grad_refuses_a_gradient_that_the_backward_of_one_rank_does_not_return(ranks):
    with pytest.raises(ShardingError, match=r'autograd\.grad was asked for the gradient of "scale", which'):
        ranks(2).run(_asked_for, 1.0)


def test_a_model_without_blocks_and_one_with_uneven_sizes():
    model = ModelFactory(MLP, (("ins", 5), ("width", 7), ("outs", 3)))
    for stage in STAGES.values():
        assert_equivalent(model, Numbers((6, 5)), mesh="dp=3", rules={"**": None}, transforms=(stage,), steps=2)


def _collectives_of_a_pass() -> list[str]:
    def alone(plan: sl.Plan) -> sl.Plan:
        return plan.replace(step=plan.step.replace(bucket_mb=1, unbucketed_mb=0.01))

    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    sl.shard_model(model, "dp=2,fsdp=2", {"**": None}, transforms=(sl.zero(2, axis="fsdp"), alone), compile=None)
    for _ in range(2):
        with sl.engine.record_collectives(model) as log:
            model(torch.ones(2, 64)).square().mean().backward()
    return [one.kind for one in log.collectives]


def test_replicas_sum_the_shards_of_a_bucket_while_backward_goes_on(ranks):
    """And not all at its end: before the next bucket begins. The last one has the flags alone."""
    assert ranks(4).run(_collectives_of_a_pass) == [["send", "receive", "all_reduce"] * 5] * 4


def _what_can_be_planned_only() -> None:
    with pytest.raises(sl.errors.PlanError, match="these differ in their data axes"):
        _model(sl.fsdp("fsdp"), sl.zero(1), mesh="dp=2,fsdp=2")

    def wide(plan: sl.Plan) -> sl.Plan:
        return plan.map_rows(lambda row: row.replace(stored=sl.Layout(row.stored.dims, dtype=torch.float64)))

    with pytest.raises(sl.errors.PlanError, match="dtype that it is stored in"):
        _model(wide, mesh="dp=2,fsdp=2")


def test_what_can_be_planned_and_not_run_is_refused(ranks):
    ranks(4).run(_what_can_be_planned_only)


def _is_freed(stage: str, has_hooks: bool) -> bool:
    def train() -> tuple[weakref.ref[Any], weakref.ref[Any]]:
        model = _model(STAGES[stage])
        if has_hooks:
            for module in model.modules():
                module.register_forward_hook(lambda *_: setattr(model, "ran", True))
            for param in model.parameters():
                param.register_hook(lambda _: setattr(model, "came_back", True))
        optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model)
        _backward(model)
        optimizer.step()
        return weakref.ref(model), weakref.ref(next(model.parameters()))

    model, param = train()
    for _ in range(3):
        gc.collect()
    return model() is None and param() is None


@pytest.mark.covering
@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_is_freed_with_what_moves_its_parts(ranks, stage, has_hooks):
    """Also where hooks on its parts refer to the model. torch keeps models to which hooks after accumulation refer."""
    assert ranks(2).run(_is_freed, stage, has_hooks) == [True, True]
