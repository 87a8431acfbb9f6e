"""What training scripts have beside a model and its optimizer, through a change of mesh: it goes along, or is refused
before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardlib as sl
import shardlib.trainer as colossalai
from shardlib.booster import Booster
from shardlib.engine.sharded import param_state_of, record_of
from shardlib.errors import MeshError, PlanError, ShardingError, ShardlibError
from shardlib.testing import shared_pool
from tests.booster import plugins
from tests.weights.language import RULES, adam, backward, difference, ids, loss, mine, seeded, sgd, train

LIMIT = 1e-12
CHANGES = ["dp=4", "dp=2,tp=2", "pp=2,dp=2", "tp=4"]


def _agrees(meshes: list[str], *args: Any, **options: Any) -> None:
    for off in shared_pool(4).run(train, meshes, *args, **options):
        assert len(off) == len(meshes) and max(off) < LIMIT, off


# --- parameters -------------------------------------------------------------------------------------------------------


def _partly_frozen(model: nn.Module) -> nn.Module:
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].attn.requires_grad_(False)
    return model


def _of_trained(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


@pytest.mark.covering
@pytest.mark.parametrize("meshes", [["dp=4", "dp=2,tp=2", "tp=4"], ["pp=2,dp=2", "dp=4", "pp=2,tp=2"]])
@pytest.mark.parametrize("make", [_of_trained, adam])
def test_frozen_parameters_stay_frozen(meshes: list[str], make: Any):
    """Also those of other stages, which ranks do not have."""
    _agrees(meshes, [], make, prepare=_partly_frozen)


@pytest.mark.parametrize(
    "transforms",
    [
        [sl.zero(2, overlap=True)],
        [sl.zero(1), sl.offload("state")],
        [sl.zero(3), sl.offload("all")],
        [sl.zero(2), sl.checkpoint_activations("blocks.*")],
    ],
)
def test_transforms_stay(transforms: Any):
    """With overlap, parameters get their values during the next forward, which comes after the change."""
    _agrees(["dp=4", "dp=2,tp=2", "tp=4"], transforms)


def test_checks_of_every_step_stay():
    _agrees(["dp=4", "dp=2,tp=2", "pp=2,dp=2"], [sl.zero(1)], check="always")


# --- optimizers -------------------------------------------------------------------------------------------------------


def _muon_and_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, eps=1e-4)]


def _named(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=1e-2, eps=1e-4)


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), eps=1e-4, fused=True)


def _plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("make", [_muon_and_adam, _named, _fused, _plain_sgd])
def test_optimizers_go_on(make: Any):
    _agrees(CHANGES, [], make)


def _groups_after(mesh: str) -> bool:
    """Return whether a group has its parameters in their order, and their names."""
    model = sl.shard_model(seeded(), "dp=2,tp=2", RULES)
    optimizer = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=1e-2)
    before = optimizer.param_groups[0]["param_names"]
    for each in (mesh, "dp=4"):
        sl.reshard(model, each, optimizer)
        group, names = optimizer.param_groups[0], {id(p): name for name, p in model.named_parameters()}
        assert [names[id(p)] for p in group["params"]] == group["param_names"]
    return group["param_names"] == before


def test_groups_keep_their_order_and_names():
    assert all(shared_pool(4).run(_groups_after, "dp=4"))
    shared_pool(4).run(_groups_after, "pp=2,dp=2")


class Wide(torch.optim.SGD):
    """Keeps float32 beside bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            sum_ = self.state[param].setdefault("sum", torch.zeros_like(param, dtype=torch.float32))
            param.add_(sum_.add_(param.grad.float()).to(param.dtype), alpha=-0.01)


class Nested(torch.optim.SGD):
    """Keeps a list of tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param].setdefault("seen", []).append(param.grad.clone())


class Flat(torch.optim.SGD):
    """Keeps a tensor of another shape than the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param].setdefault("norms", param.new_zeros(7))


def _stepped(kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32) -> Any:
    """Return a model on "dp=4" after a step, and its optimizer."""
    model = sl.shard_model(seeded().to(dtype), "dp=4", RULES)
    optimizer = kind(model.parameters(), lr=0.1)

    loss(model, mine(ids(0), model)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _wide_state(mesh: str) -> bool:
    sl.register_optimizer(Wide, needs="shard")
    model, optimizer = _stepped(Wide, torch.bfloat16)
    before = {name: optimizer.state[p]["sum"].clone() for name, p in model.named_parameters()}
    sl.reshard(model, mesh, optimizer)
    sl.reshard(model, "dp=4", optimizer)
    after = {name: optimizer.state[p]["sum"] for name, p in model.named_parameters()}
    return all(value.dtype == torch.float32 and torch.equal(value, before[name]) for name, value in after.items())


def test_state_keeps_a_dtype_of_its_own():
    assert all(shared_pool(4).run(_wide_state, "dp=2,tp=2"))


def _state_refused(kind: Any) -> str:
    sl.register_optimizer(kind, needs="shard")
    model, optimizer = _stepped(kind)
    with pytest.raises(ShardingError) as caught:
        sl.reshard(model, "dp=2,tp=2", optimizer)
    assert str(sl.get_plan(model).mesh) == "dp=4"
    sl.reshard(model, "dp=2,tp=2")
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Nested, '"optimizer.state.embed.weight.seen.0" is a tensor inside of a list or dict'),
        (
            Flat,
            'Optimizer state "state.embed.weight.norms" has shape (7,), and its parameter, of global shape (33, 16)',
        ),
    ],
)
def test_state_of_unknown_layout_is_refused_before_anything_changes(kind: Any, said: str):
    for told in shared_pool(4).run(_state_refused, kind):
        assert said in told and "build a new one" in told, told


def _wide_copies(meshes: list[str], part: bool) -> list[float]:
    """Return how far wide copies are from the values of float32, where no optimizer has them yet."""
    single = seeded()
    model = sl.shard_model(copy.deepcopy(single), meshes[0], RULES, transforms=[sl.precision("bf16")])
    optimizer = torch.optim.SGD(list(model.parameters())[:3], lr=0.1) if part else None
    for mesh in meshes[1:]:
        sl.reshard(model, mesh, optimizer)
    exact, held = dict(single.named_parameters()), {}
    for name, param in model.named_parameters():
        state = {} if optimizer is None else optimizer.state.get(param, {})
        held[name] = state.get("master_parameter", param_state_of(param).mutable.master)
    assert len(held) == len(exact)
    return [float((value - exact[name]).abs().max()) for name, value in held.items()]


@pytest.mark.parametrize("part", [False, True])
def test_wide_copies_do_not_need_an_optimizer(part: bool):
    for off in shared_pool(4).run(_wide_copies, ["dp=4", "pp=2,dp=2", "dp=4"], part):
        assert not any(off)


# --- wrapped optimizers, boosters, engines ----------------------------------------------------------------------------


def _wrapped(meshes: list[str], passes: int) -> list[float]:
    """Train with counts, clipping and accumulation; return the differences from one device."""
    single = seeded().double()
    transforms = [sl.zero(2)] if passes == 1 else [sl.zero(2), sl.accumulate(passes)]
    model = sl.shard_model(copy.deepcopy(single), meshes[0], RULES, transforms=transforms)
    optimizer, alone = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-2, eps=1e-4), adam(single)
    off = list[float]()
    for number, mesh in enumerate(meshes):
        if number:
            sl.reshard(model, mesh, optimizer)
        for step in range(passes * number, passes * (number + 1)):
            optimizer.zero_grad()
            if "pp" in mesh:
                backward(model, ids(step), optimizer)
            else:
                rows = mine(ids(step), model)
                optimizer.backward(loss(model, rows), weight=rows[:, 1:].numel())
            (loss(single, ids(step)) / passes).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
        nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        alone.step()
        alone.zero_grad()
        optimizer.zero_grad()
        assert set(optimizer.state_dict()["state"]) == {name for name, _ in model.named_parameters()}
        off.append(difference(model, single))
    return off


@pytest.mark.parametrize("passes", [1, 2])
def test_a_wrapped_optimizer_goes_on(passes: int):
    meshes = CHANGES if passes == 1 else ["dp=4", "dp=2,tp=2", "tp=4"]
    for off in shared_pool(4).run(_wrapped, meshes, passes):
        assert max(off) < LIMIT, off


def _boosted(name: str, mesh: str) -> list[float]:
    single = plugins.maker(name)(torch.float64)
    model = copy.deepcopy(single)
    optimizer, alone = adam(model), adam(single)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in (optimizer, alone)]
    booster = Booster(plugin=plugins.made(name, **({"precision": "fp32"} if name in plugins.OWN else {})))
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, schedulers[0])
    off = list[float]()
    for number, change in enumerate([None, mesh, str(sl.get_plan(model).mesh)]):
        if change is not None:
            sl.reshard(model, change, optimizer)
        tokens = torch.randint(3, 7, (4, 6), generator=torch.Generator().manual_seed(number))
        booster.backward(_square(model(mine(tokens, model))), optimizer)
        _square(single(tokens)).backward()
        optimizer.clip_grad_by_norm(1.0)
        nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        for each in (optimizer, alone, scheduler, schedulers[1]):
            each.step()
        optimizer.zero_grad()
        alone.zero_grad()
        assert model.unwrap() is model and scheduler.get_last_lr() == schedulers[1].get_last_lr()
        off.append(difference(model, single))
    return off


def _square(output: Any) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("ddp", "dp=2,tp=2"),
        pytest.param("zero 2", "dp=2,tp=2", marks=pytest.mark.deep),
        ("zero 2 in groups", "replicate=4,zero=1"),
        pytest.param("fsdp of nodes", "replicate=4,fsdp=1", marks=pytest.mark.deep),
        ("gemini, half of it", "dp=2,tp=2"),
        pytest.param("hybrid", "dp=1,tp=4", marks=pytest.mark.deep),
        ("hybrid, zero 3", "dp=4,tp=1"),
    ],
)
def test_what_a_booster_made_goes_on(name: str, mesh: str):
    for off in shared_pool(4).run(_boosted, name, mesh):
        assert max(off) < plugins.TOLERANCE, off


def _engine(meshes: list[str]) -> list[float]:
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 2)).double()
    model = copy.deepcopy(single)
    tensor = {"size": 2, "mode": "1d", "rules": {"0": "colwise", "2": "rowwise"}}
    config = {"parallel": {"tensor": tensor}, "zero": {"stage": 1}, "gradient_accumulation": 2, "clip_grad_norm": 1.0}
    alone = adam(single)
    engine, *_ = colossalai.initialize(model, adam(model), nn.MSELoss(), config=config, verbose=False)
    off = list[float]()
    for number, mesh in enumerate([None, *meshes]):
        if mesh is not None:
            sl.reshard(engine.model, mesh, engine.optimizer)
        for step in range(2):
            rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * number + step), dtype=torch.float64)
            engine.zero_grad()
            engine.backward(engine(mine(rows, model)).square().mean())
            engine.step()
            (single(rows).square().mean() / 2).backward()
        engine.zero_grad()
        nn.utils.clip_grad_norm_(single.parameters(), 1.0)
        alone.step()
        alone.zero_grad()
        off.append(difference(model, single))
    return off


def test_an_engine_goes_on():
    for off in shared_pool(4).run(_engine, ["dp=4,tp=1", "dp=1,tp=4"]):
        assert max(off) < LIMIT, off


def _scaled(mesh: str) -> tuple[float, float]:
    """Return the loss scale after an overflow, before and after a change of mesh."""
    scale = sl.transforms.LossScale(init_scale=64.0)
    model = sl.shard_model(seeded(), "dp=4", RULES, transforms=[sl.precision("fp16", scaler=scale)])
    optimizer = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-2)

    def step(factor: float) -> float:
        optimizer.backward(loss(model, mine(ids(0), model)) * factor)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer.scaler.scale

    before = step(float("inf"))
    assert optimizer.step_was_skipped
    sl.reshard(model, mesh, optimizer)
    after = step(1.0)
    assert not optimizer.step_was_skipped
    return before, after


def test_the_loss_scale_goes_on():
    assert shared_pool(4).run(_scaled, "dp=2,tp=2") == [(32.0, 32.0)] * 4


def _by_torch_scaler(meshes: list[str]) -> list[float]:
    """Train with torch's GradScaler and an averaged copy."""
    single = seeded().double()
    model = sl.shard_model(copy.deepcopy(single), meshes[0], RULES, transforms=[sl.zero(1)])
    average = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    averages = [AveragedModel(each, **average) for each in (model, single)]
    optimizer, alone, scaler = adam(model), adam(single), torch.amp.GradScaler("cpu", init_scale=256.0)
    off = list[float]()
    for step, mesh in enumerate(meshes):
        if step:
            sl.reshard(model, mesh, optimizer)
            sl.reshard(averages[0].module, mesh)
        scaler.scale(loss(model, mine(ids(step), model))).backward()
        loss(single, ids(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        alone.step()
        optimizer.zero_grad()
        alone.zero_grad()
        for averaged, each in zip(averages, (model, single), strict=True):
            averaged.update_parameters(each)
        off += [difference(model, single), difference(averages[0].module, averages[1].module)]
    return off


def test_a_scaler_of_torch_and_an_average_go_on():
    for off in shared_pool(4).run(_by_torch_scaler, ["dp=4", "dp=2,tp=2", "tp=4"]):
        assert max(off) < LIMIT, off


# --- what the engine keeps --------------------------------------------------------------------------------------------


def _history(mesh: str) -> tuple[bool, bool]:
    """Return whether the history of magnitudes in float8 has come, and whether it is what the optimizer saves."""
    torch.manual_seed(0)
    delayed = sl.precision("fp8", scaling="delayed", history=4)
    model = sl.shard_model(
        nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), "dp=2", {"**": None}, transforms=delayed
    )
    optimizer = sl.OptimizerWrapper(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):
        optimizer.backward(model(torch.randn(32, 32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    before = record_of(model).stateful["fp8_history"].state_dict()["steps"].clone()
    sl.reshard(model, mesh, optimizer)
    history = record_of(model).stateful["fp8_history"]
    assert before.any()
    return torch.equal(history.state_dict()["steps"], before), optimizer.stateful["fp8_history"] is history


def test_the_history_of_float8_moves():
    assert shared_pool(2).run(_history, "fsdp=2") == [(True, True)] * 2


def _reduced(mesh: str, transforms: Any) -> int:
    """Return how often a registered reduction ran after a change of mesh."""
    model = sl.shard_model(seeded(), "dp=4", RULES)
    buckets = list[Any]()

    def reduction(bucket: Any) -> None:
        buckets.append(bucket)
        dist.all_reduce(bucket.tensor, group=bucket.group)

    sl.register_gradient_reduction(model, reduction)
    if transforms:
        with pytest.raises(PlanError, match="register_gradient_reduction was called for this model"):
            sl.reshard(model, sl.plan(seeded(), mesh, RULES, transforms=transforms))
        assert str(sl.get_plan(model).mesh) == "dp=4"
        sl.register_gradient_reduction(model, None)
        sl.reshard(model, sl.plan(seeded(), mesh, RULES, transforms=transforms))
        return 0
    sl.reshard(model, mesh)
    loss(model, mine(ids(0), model)).backward()
    return len(buckets)


def test_a_registered_reduction_goes_along_or_is_refused():
    assert all(shared_pool(4).run(_reduced, "dp=2,tp=2", []))
    shared_pool(4).run(_reduced, "dp=2,tp=2", [sl.zero(1)])


# --- meshes and plans -------------------------------------------------------------------------------------------------


def _ordered(ranks: list[list[int]]) -> float:
    single = seeded()
    model = sl.shard_model(copy.deepcopy(single), "dp=4", RULES, transforms=sl.zero(3))
    sl.reshard(model, DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")))
    return difference(model, single)


def test_a_mesh_may_have_its_ranks_in_another_order():
    assert shared_pool(4).run(_ordered, [[0, 2], [1, 3]]) == [0.0] * 4


def _refused(kind: str) -> str:
    """Return the class and the text of what is said; the model goes on as it was."""
    single = seeded()
    plan = sl.plan(single, "dp=4", RULES)
    edited = plan.replace(step=plan.step.replace(recompute=("^blocks.0",))) if kind == "settings" else None
    if kind == "rows":
        edited = plan.map_rows(
            lambda row: row.replace(
                stored=row.stored, state=sl.plan(single, "dp=4", RULES, transforms=sl.zero(1))[row.name].state
            )
        )
    model = sl.shard_model(copy.deepcopy(single), "dp=4", edited if edited is not None else RULES)
    given: Any = model
    mesh: Any = "dp=2,tp=2"
    optimizer = sgd(model)
    if kind == "some ranks":
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    if kind == "wrapped":
        given = nn.Sequential(model)
    if kind == "one rank" and dist.get_rank() == 2:
        model.head.weight.grad = torch.zeros_like(model.head.weight)
    if kind == "size":
        mesh = "tp=3"
    if kind == "plans":
        mesh = sl.plan(single, "tp=4", RULES if dist.get_rank() else sl.Rules({"**": None}))
    if kind == "history":
        mesh = sl.plan(single, "pp=2,dp=2", RULES, transforms=sl.precision("fp8", scaling="delayed"))
    with pytest.raises(ShardlibError) as caught:
        if kind == "no_sync":
            with sl.no_sync(model):
                sl.reshard(given, mesh, optimizer)
        else:
            sl.reshard(given, mesh, optimizer)
    assert str(sl.get_plan(model).mesh) == "dp=4" and difference(model, single) == 0
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("settings", PlanError, "settings that its rules and transforms do not make, as Step("),
        ("rows", PlanError, 'do not make, as that of "embed.weight". Give reshard() a Plan'),
        ("some ranks", MeshError, "a mesh on ranks [0, 1], in a job of 4 ranks"),
        ("wrapped", ShardingError, "a Sequential that is not sharded. Give the sharded model in it, .0"),
        ("one rank", ShardingError, '1 parameters have gradients, such as "embed.weight"'),
        ("size", MeshError, 'Mesh "tp=3" needs 3 processes, but 4 are running'),
        ("history", PlanError, "delayed scales is planned but not run on a pipeline"),
        ("no_sync", ShardingError, "was called inside no_sync()"),
    ],
)
def test_errors_have_their_class_on_every_rank(kind: str, error: type[Exception], said: str):
    for told in shared_pool(4).run(_refused, kind):
        assert told.startswith(f"{error.__name__}: ") and said in told, told


def test_plans_that_differ_are_told_in_a_line():
    for told in shared_pool(4).run(_refused, "plans"):
        assert "ranks gave different values of plan" in told and max(map(len, told.splitlines())) < 120, told


def _from_before(transforms: Any, of_model: bool) -> str:
    """Run backward of a loss from before, whose parameters are freed. A state dict of before keeps its numbers."""
    model = sl.shard_model(seeded(), "dp=4", RULES, transforms=transforms)
    kept = model.state_dict()
    before = {name: tensor.clone() for name, tensor in kept.items()}
    total = loss(model, mine(ids(0), model)) if of_model else sum(param.sum() for param in model.parameters())
    sl.reshard(model, "dp=2,tp=2")
    assert all(torch.equal(tensor, before[name]) for name, tensor in kept.items())
    with pytest.raises(RuntimeError if of_model else ShardingError) as caught:
        total.backward()
    assert all(param.grad is None for param in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("transforms", [[], [sl.zero(3)]])
def test_a_loss_from_before_is_refused(transforms: Any):
    """By autograd, where it needs the values of a parameter, else by a hook."""
    shared_pool(4).run(_from_before, transforms, True)
    for told in shared_pool(4).run(_from_before, transforms, False):
        assert "on a loss from before reshard()" in told


def _under(mode: Any) -> float:
    single = seeded()
    model = sl.shard_model(copy.deepcopy(single), "dp=4", RULES)
    with mode():
        sl.reshard(model, "tp=4")
    loss(model, ids(0)).backward()
    return difference(model, single)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_mode_of_autograd_reaches_the_parameters(mode: Any):
    assert shared_pool(4).run(_under, mode) == [0.0] * 4


def _freed(mesh: str) -> list[int]:
    """Return the elements that old parameters still hold."""
    model = sl.shard_model(seeded(), "dp=4", RULES)
    before = list(model.parameters())
    sl.reshard(model, mesh)
    return [param.untyped_storage().nbytes() for param in before]


def test_old_parameters_are_freed():
    for held in shared_pool(4).run(_freed, "tp=4"):
        assert not any(held)
