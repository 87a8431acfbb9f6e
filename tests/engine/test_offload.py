"""Offload between two memories: the same numbers as without, and what a plan has on the host lies there.

No test machine has an accelerator. Two things stand for one: a CPU whose memory is called another than the host's, so
that everything is copied there and back and every number is real; and fake tensors of another device, which have no
values, but refuse to be computed with beside those of a CPU.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.engine import _torch, apply, fakes
from shardlib.engine._torch import TorchDispatchMode, pytree
from shardlib.engine.apply import rank_plan
from shardlib.engine.data import full_step, offload, optimizer, units
from shardlib.engine.data.params import local_of
from shardlib.engine.ops import UNSCALE, unscale
from shardlib.engine.ranks import transport
from shardlib.engine.sharded import param_state_of
from shardlib.errors import PlanError, ShardingError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Tokens, Transformer, perturb, rules_for
from shardlib.testing.strategies import ModelFactory
from tests.engine.host import elsewhere
from tests.engine.low_precision import Trained, train
from tests.engine.tiny import GPT, Lamb

STAGES = {"replicate": sl.replicate(), "zero(1)": sl.zero(1), "zero(2)": sl.zero(2), "zero(3)": sl.zero(3)}
ALL = (sl.zero(3), sl.offload("all"))


def _shard(transforms: tuple[Any, ...], model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    with elsewhere():
        return sl.shard_model(model, mesh, rules_for(GPT()), transforms=transforms, compile=None)


def _prove(mesh: str, *transforms: Any, **options: Any) -> None:
    rows = 6 if sl.MeshShape(mesh).data_ranks == 3 else 8
    shard = functools.partial(_shard, transforms)
    assert_equivalent(GPT, Tokens(rows, 5, 7), mesh=mesh, shard=shard, **{"steps": 2, **options})


def _momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True)


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def _adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


def _lamb(params: Any) -> torch.optim.Optimizer:
    sl.register_optimizer(Lamb, needs="tensor")
    return Lamb(params)


class Own(torch.optim.SGD):
    """Not torch's own: it steps once, on everything."""


def _own(params: Any) -> torch.optim.Optimizer:
    sl.register_optimizer(Own, needs="shard")
    return Own(params, lr=1e-2, momentum=0.9)


OPTIMIZERS = [_momentum, _adamw, _adafactor, _muon, _lamb, _own]


@pytest.mark.covering
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda f: f.__name__[1:])
def test_state_on_the_host_trains_the_numbers_of_one_device(make, stage):
    _prove("dp=2,tp=2", STAGES[stage], sl.offload("state"), optimizer=make, accumulate=2, clip=1.0)


@pytest.mark.covering
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", [_adamw, _muon], ids=lambda f: f.__name__[1:])
def test_half_of_the_state_on_the_host_does_too(make, stage):
    _prove("dp=3", STAGES[stage], sl.offload("state", fraction=0.5), optimizer=make)


@pytest.mark.covering
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize(
    "make",
    [_adamw, _muon, _own, *(pytest.param(make, marks=pytest.mark.deep) for make in (_momentum, _adafactor, _lamb))],
    ids=lambda f: f.__name__[1:],
)
def test_parameters_on_the_host_train_the_numbers_of_one_device(make, every):
    if every:
        _prove("dp=2,tp=2", *ALL, optimizer=make, accumulate=2, clip=1.0)
    else:
        _prove("dp=3", sl.fsdp(), sl.offload("all", only="blocks"), optimizer=make)


def test_what_was_stepped_on_the_host_may_be_gathered_while_the_next_forward_runs():
    _prove("dp=2", sl.zero(2, overlap=True), sl.offload("state"), steps=3)


def _on_one_rank() -> None:
    model = sl.shard_model(GPT().double(), "dp=1", rules_for(GPT()), transforms=[sl.offload("state")], compile=None)
    twin = GPT().double()
    twin.load_state_dict(model.state_dict())
    for each in (model, twin):
        stepping = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for step in range(3):
            stepping.zero_grad()
            each(Tokens(4, 5, 7)(step)).square().mean().backward()
            stepping.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert param_state_of(one).mutable.staging.keys() == {"shard", "gradient"}
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_single_rank_offloads_too(ranks):
    ranks(1).run(_elsewhere, _on_one_rank)


def _elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    with elsewhere():
        return function(*args)


# --- bits -------------------------------------------------------------------------------------------------------------


def _trained(mesh: str, *transforms: Any) -> Trained:
    with elsewhere():
        return train(mesh, *transforms, clip=5.0)


BF16 = sl.precision("bf16")


@pytest.mark.covering
@pytest.mark.parametrize("recipe", [BF16, sl.precision("bf16", keep="norm*"), sl.precision("fp16_naive")], ids=repr)
@pytest.mark.parametrize("stage", STAGES)
def test_not_a_bit_differs_from_a_run_without(ranks, recipe, stage):
    """Copies on the host in more bits are rounded there, and gradients widened: to the same bits as on the device."""
    there = ranks(2).run(train, "dp=2", recipe, STAGES[stage], clip=5.0)
    offloads = [sl.offload("state"), sl.offload("state", fraction=0.5)]
    if stage == "zero(3)":
        offloads += [sl.offload("all"), sl.offload("all", only="blocks.1")]
    for each in offloads:
        for run, other in zip(ranks(2).run(_trained, "dp=2", recipe, STAGES[stage], each), there, strict=True):
            assert run.losses == other.losses and torch.equal(run.gradients, other.gradients)


# --- where things lie -------------------------------------------------------------------------------------------------


def _model(*transforms: Any, mesh: str = "dp=2", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = perturb(GPT())
    return sl.shard_model(model, mesh, rules_for(model), transforms=transforms, **{"compile": None, **options})


def _backward(model: nn.Module, step: int = 0) -> None:
    rows = Tokens(4, 5, 7)(step).chunk(dist.get_world_size())[dist.get_rank()]
    model(rows).square().mean().backward()


def _storages(tensors: Any) -> dict[int, int]:
    """Addresses of memory, with its bytes."""
    memories = [local_of(t).untyped_storage() for t in tensors]
    return {memory.data_ptr(): memory.nbytes() for memory in memories if memory.nbytes()}


def _state_of(stepping: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for state in stepping.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]


def _lies_apart(what: str, *transforms: Any) -> None:
    model = _model(*transforms, sl.offload(what))
    stepping = torch.optim.AdamW(model.parameters())
    for step in range(2):
        stepping.zero_grad()
        _backward(model, step)
        stepping.step()
    params = list(model.parameters())
    leaves = [param_state_of(p).memory for p in params]
    grads = [p.grad for p in params]
    state = _state_of(stepping)
    for param in params:
        for value in stepping.state[param].values():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert (
                    value.shape == param.shape and isinstance(value, DTensor) == param_state_of(param).has_sharded_state
                )
    memory = sl.get_plan(model).memory()
    on_host = state if what == "state" else [*state, *params, *grads]
    # Uneven pieces: this rank may have less than the largest.
    held = sum(local_of(t).nbytes for t in on_host)
    assert held <= memory.host and (dist.get_rank() or held == memory.host)
    # The host's memory, that of the device, and where copies land are three.
    staging = [t for p in params for t in param_state_of(p).mutable.staging.values()]
    on_device = [*leaves, *([*params, *grads] if what == "state" else [])]
    groups = [_storages(on_host), _storages(on_device), _storages(staging)]
    for i, one in enumerate(groups):
        assert all(one.keys().isdisjoint(other) for other in groups[i + 1 :])
    assert bool(staging) == (what == "state")


@pytest.mark.covering
@pytest.mark.parametrize("stage", ["replicate", "zero(2)", "zero(3)"])
@pytest.mark.parametrize("recipe", ["", "bf16"])
def test_what_a_plan_has_on_the_host_lies_there(ranks, stage, recipe):
    transforms = [STAGES[stage], *([BF16] if recipe else [])]
    ranks(2).run(_elsewhere, _lies_apart, "state", *transforms)
    if stage == "zero(3)":
        ranks(2).run(_elsewhere, _lies_apart, "all", *transforms)


def _nothing_moves_on_a_cpu() -> None:
    params, grads = (sl.zero(1), sl.offload("params")), (sl.zero(1), sl.offload("grads"))
    for transforms in ((sl.offload("all"),), (*ALL, BF16), params, grads):
        with mock.patch.object(offload.Downloads, "begin") as begin, mock.patch.object(offload, "on_host") as on_host:
            model = _model(*transforms)
            stepping = torch.optim.AdamW(model.parameters())
            _backward(model)
            stepping.step()
            assert not begin.called and not on_host.called
            assert all(not param_state_of(p).offloaded for p in model.parameters())


def test_on_a_cpu_nothing_is_copied(ranks):
    ranks(2).run(_nothing_moves_on_a_cpu)


def _every_copy_has_begun_before_the_first_is_waited_for() -> list[str]:
    said: list[str] = []
    begin, wait = offload.Downloads.begin, offload.Downloads.wait
    with (
        mock.patch.object(offload.Downloads, "begin", lambda *a: (said.append("begin"), begin(*a))[1]),
        mock.patch.object(offload.Downloads, "wait", lambda *a: (said.append("wait"), wait(*a))[1]),
        mock.patch.object(_torch, "step_without_hooks", lambda o: said.append(f"step {len(o.param_groups)}")),
    ):
        model = _model(sl.zero(2), sl.offload("state"))
        stepping = torch.optim.AdamW(model.parameters())
        _backward(model)
        said.clear()
        stepping.step()
    assert said.count("begin") == 2 * len(list(model.parameters()))
    return [word for word in said if word != "begin"], said[: said.count("begin")]


def test_pieces_step_while_others_are_on_the_way(ranks):
    for after, before in ranks(2).run(_elsewhere, _every_copy_has_begun_before_the_first_is_waited_for):
        assert set(before) == {"begin"}
        assert len(after) > 6 and after == ["wait", "step 1"] * (len(after) // 2)


# --- users ------------------------------------------------------------------------------------------------------------


def _written_to_between_steps(*transforms: Any) -> float:
    model = _model(*transforms)
    stepping = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for _ in range(2):
        _backward(model)
        stepping.step()
        with torch.no_grad():
            model.head.weight.fill_(3.0)
    stepping.step()
    return local_of(model.head.weight).float().mean().item()


@pytest.mark.covering
@pytest.mark.parametrize("recipe", [sl.replicate(), BF16], ids=repr)
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_to_a_parameter_between_steps_counts(ranks, stage, recipe):
    transforms = (STAGES[stage], recipe, sl.offload("state"))
    assert ranks(2).run(_elsewhere, _written_to_between_steps, *transforms) == [3.0, 3.0]


def _continued(folder: str, first: tuple[Any, ...], second: tuple[Any, ...], by: str) -> list[torch.Tensor]:
    """Two steps, everything saved and loaded into a new model, two more steps."""
    model = _model(*first)
    stepping = sl.OptimizerWrapper(torch.optim.AdamW, model, lr=1e-2)
    for step in range(4):
        if step == 2 and by:
            other = _model(*second)
            following = sl.OptimizerWrapper(torch.optim.AdamW, other, lr=1e-2)
            if by == "save":
                sl.save(folder, model, stepping)
                sl.load(folder, other, stepping := following)
            else:
                other.load_state_dict(sl.full_state_dict(model))
                following.load_state_dict(stepping.state_dict())
                stepping = following
            model = other
        stepping.zero_grad()
        _backward(model, step)
        stepping.step()
    return [p.cpu() for p in sl.full_state_dict(model).values()]


@pytest.mark.parametrize("by", ["save", "state_dict"])
@pytest.mark.parametrize("recipe", [sl.replicate(), BF16], ids=repr)
def test_checkpoints_go_from_one_memory_to_the_other(ranks, tmp_path: Path, recipe, by):
    away, here = (sl.zero(2), recipe, sl.offload("state")), (sl.zero(2), recipe)
    every = (sl.zero(3), recipe, sl.offload("all"))
    pairs = [(away, here), (here, away), *([(every, here), (away, every)] if by == "save" else [(every, every)])]
    wanted = ranks(2).run(_continued, "", here, here, "")
    if by == "state_dict" and recipe is BF16:
        pairs = []  # a state dict of a model has no bits that rounding took away
    for index, (first, second) in enumerate(pairs):
        found = ranks(2).run(_elsewhere, _continued, str(tmp_path / f"{index}"), first, second, by)
        for one, other in zip(found, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _refused(*transforms: Any, mesh: str = "dp=2") -> str:
    with pytest.raises(PlanError) as raised:
        _model(*transforms, mesh=mesh)
    return str(raised.value)


def test_what_torch_would_have_elsewhere_is_refused(ranks):
    run = functools.partial(ranks(2).run, _elsewhere, _refused)
    first = next(iter(dict(GPT().named_parameters())))
    assert run(sl.zero(2), sl.offload("grads"))[0] == (
        f'The plan keeps the gradient of "{first}" in host memory and the parameter on cpu: torch keeps a gradient '
        'where its parameter is. Use offload("state"), whose gradients are copied to the host for the step, or, with '
        'zero(3) or fsdp(), offload("all").'
    )
    assert run(sl.zero(2), sl.offload("all"))[0] == (
        f'The plan stores "{first}" in host memory, unsharded, and computes with it on cpu: no unshard would copy it '
        'there. Shard it with zero(3) or fsdp() over more than one rank, use offload("state"), or leave it out with '
        "only=."
    )
    assert run(sl.zero(3), sl.offload("params"))[0] == (
        f'The plan stores "{first}" in host memory and its gradient on cpu: torch keeps a gradient where its '
        'parameter is, and steps there. Move all three with offload("all"), or offload("state").'
    )

    def computes_there(plan: sl.Plan) -> sl.Plan:
        return plan.map_rows(lambda row: row.replace(compute=sl.Layout(row.compute.dims, memory="host")))

    assert run(computes_there)[0].startswith(f'The plan computes with "{first}" in host memory')


def _unknown_optimizer() -> None:
    class Unknown(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            raise AssertionError

    model = _model(sl.offload("state"))
    _backward(model)
    with pytest.raises(ShardingError, match="or whose state is on the host"):
        Unknown(model.parameters(), {}).step()


def test_an_optimizer_that_nothing_is_known_of_is_refused(ranks):
    ranks(2).run(_elsewhere, _unknown_optimizer)


def _step_that_fails() -> None:
    model = _model(sl.zero(1), sl.offload("state"))
    stepping = torch.optim.AdamW(model.parameters())
    state, groups, params = stepping.state, stepping.param_groups, list(stepping.param_groups[0]["params"])
    with sl.no_sync(model):
        _backward(model)
    with pytest.raises(ShardingError, match="no_sync"):
        stepping.step()
    assert stepping.param_groups is groups and stepping.state is state
    assert all(a is b for a, b in zip(stepping.param_groups[0]["params"], params, strict=True))


def test_a_step_that_is_refused_leaves_the_optimizer_as_it_was(ranks):
    ranks(2).run(_elsewhere, _step_that_fails)


# --- devices ----------------------------------------------------------------------------------------------------------


AWAY = "lazy"  # a device of which a CPU's build of torch knows enough for fake tensors
# Its module, as torch.cuda: DTensor asks how many of the device a host has, to tell what collectives cost.
AWAY_MODULE = types.SimpleNamespace(device_count=lambda: 2)


class _NothingOnTheHostIsSent(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            sent = [
                t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()
            ]
            assert all(t.device.type == AWAY for t in sent), func
        return func(*args, **(kwargs or {}))


def _stepped_on(stepping: torch.optim.Optimizer) -> set[str]:
    return {p.device.type for group in stepping.param_groups for p in group["params"]}


def _sent(sends: Any, receives: Any, group: dist.ProcessGroup) -> mock.Mock:
    assert all(tensor.device.type == AWAY for tensor, _ in (*sends, *receives))
    return mock.Mock()


def _unscale(grads: list[Any]) -> None:
    """Divide gradients as `torch.amp.GradScaler` does, on their device. A mode does not see what DTensor's ops call."""
    one = torch.ones((), device=grads[0].device)
    unscale(UNSCALE, (grads, torch.zeros_like(one), one), {})


ONE_LAYER = ModelFactory(Transformer, (("vocab", 7), ("heads", 2), ("head", 4), ("tied", True), ("bias", False)))


def _devices(
    transforms: tuple[Any, ...], make: Callable[[Any], torch.optim.Optimizer], *, large: bool = False
) -> dict[str, set[str]]:
    """Two steps of rank 0 on a device without values, and where what there is between steps lies."""
    model = nn.Embedding(1000, 300) if large else ONE_LAYER()
    plan = sl.plan(model, "dp=2", {"**": None} if large else rules_for(model), transforms=transforms)
    device = torch.device(AWAY, 0)
    with (
        mock.patch.object(torch, AWAY, AWAY_MODULE, create=True),
        mock.patch.object(rank_plan, "device_here", lambda _mesh: device),
        mock.patch.object(units._Sentinel, "of", lambda _: types.SimpleNamespace()),  # a sentinel would need values
        mock.patch.object(units._Unit, "use_sentinels", lambda unit: None),
        mock.patch.object(transport, "exchange", _sent),
        mock.patch.object(full_step, "_owners", lambda held, _ranks: [0] * len(held)),
        mock.patch.object(full_step.agree, "exchange", lambda mine, _group: [mine]),
        fakes.fake_world(plan, AWAY) as mesh,
    ):
        model = fakes.fake_copy(model, str(device))
        apply.apply_plan(model, plan, mesh, check=False)
        stepping = make(model.parameters())
        steps: set[str] = set()
        put = optimizer._Step.set_leaves
        putting = mock.patch.object(
            optimizer._Step,
            "set_leaves",
            lambda step, *args: (put(step, *args), steps.update(_stepped_on(step.stand_in))),
        )
        with putting, _NothingOnTheHostIsSent():
            for _ in range(2):
                fakes.run_step(model, (torch.zeros(4, 5, dtype=torch.int64, device=device),), {})
                _unscale([p.grad for p in model.parameters()])
                sl.clip_grad_norm_(model, 1.0)
                stepping.step()
        assert model.to(device) is model  # there already, wherever what is on the host is kept
        params = [p for group in stepping.param_groups for p in group["params"]]
        return {
            "params": {p.device.type for p in params},
            "leaves": {param_state_of(p).memory.device.type for p in params},
            "grads": {p.grad.device.type for p in params},
            "state": {t.device.type for t in _state_of(stepping)},
            "steps": steps,
        }


CASES = [
    (_adamw, "replicate"),
    (_adamw, "zero(2)"),
    (_lamb, "zero(1)"),
    (_muon, "zero(3)"),
    pytest.param(_adamw, "zero(3)", marks=pytest.mark.deep),
]


@pytest.mark.parametrize("make, stage", CASES, ids=lambda case: getattr(case, "__name__", case))
def test_devices_do_not_mix(make, stage):
    def lie(params: str, state: str) -> dict[str, set[str]]:
        return {
            "params": {params},
            "leaves": {AWAY},
            "grads": {params},
            "state": set(state.split()),
            "steps": set(state.split()),
        }

    assert _devices((STAGES[stage], sl.offload("state", fraction=0.3)), make) == lie(AWAY, "cpu " + AWAY)
    if stage == "zero(3)":
        assert _devices((STAGES[stage], sl.offload("all")), make) == lie("cpu", "cpu")


def test_what_ranks_lack_is_told_from_the_device_where_no_bucket_has_room_for_it():
    assert set.union(*_devices((sl.zero(2),), _adamw, large=True).values()) == {AWAY}


# --- within a budget --------------------------------------------------------------------------------------------------


def _device_bytes(
    plan: sl.Plan, params: dict[str, nn.Parameter], state: Any, before: set[int], rooms: list[Any]
) -> int:
    """Bytes that are alive, but for what the plan has in host memory and what copies land in there."""
    host = [*rooms]
    for name, param in params.items():
        there = {phase for phase, layout in plan[name].layouts.items() if layout.memory == "host"}
        own = state.get(param, {}).values() if "state" in there else ()
        host += [t for t in own if isinstance(t, torch.Tensor)]
        host += [param] if "stored" in there else []
        host += [param.grad] if "grad" in there and param.grad is not None else []
        held = param_state_of(param)
        assert held is not None
        host += held.mutable.staging.values()
    away = {(local_of(t) if isinstance(t, DTensor) else t).untyped_storage().data_ptr() for t in host}
    gc.collect()
    every = [t.detach() for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in every if not t.is_meta}
    return sum(size for address, size in memory.items() if address and address not in away | before)


def _trained_within(transform: Any, budget: int) -> None:
    gc.collect()
    before = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and not t.is_meta}
    made = Transformer(vocab=64, heads=4, head=48, layers=4, bias=True)
    rooms: list[Any] = []
    room = offload._host_buffer

    def remembered(*args: Any) -> torch.Tensor:
        rooms.append(room(*args))
        return rooms[-1]

    with elsewhere(PIECE_BYTES=1 << 20), mock.patch.object(offload, "_host_buffer", remembered):
        model = sl.shard_model(made, "dp=2", {"**": None}, transforms=(transform, sl.fit_memory(budget)), compile=None)
        optimizer = torch.optim.AdamW(model.parameters())
        params, plan, peak = dict(model.named_parameters()), sl.get_plan(model), 0

        def look(*_: Any) -> None:
            nonlocal peak
            peak = max(peak, _device_bytes(plan, params, optimizer.state, before, rooms))

        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(look)
        for _ in range(2):
            loss = model(torch.randint(64, (1, 4))).square().mean()
            loss.backward()
            look()
            optimizer.step()
            look()
            optimizer.zero_grad()
    assert peak <= budget + (128 << 10)  # activations of four tokens, and counters
    assert peak >= budget / 2  # what is measured is most of what there is


@pytest.mark.parametrize(("transform", "share"), [(sl.zero(2), 0.85), (sl.zero(3), 0.6)], ids=["stage 2", "stage 3"])
def test_a_model_trains_within_a_budget_that_it_exceeds(ranks, transform, share):
    plan = sl.plan(Transformer(vocab=64, heads=4, head=48, layers=4, bias=True), "dp=2", {"**": None}) | transform
    memory = plan.memory()
    ranks(2).run(_trained_within, transform, int(share * (memory.device + memory.buckets)))
