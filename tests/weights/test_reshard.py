"""A mesh that changes while a model trains: the numbers stay those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardlib as sl
from shardlib.errors import ShardlibError
from shardlib.testing import shared_pool
from shardlib.weights import reshard
from tests.weights.language import RULES, Block, Model, adam, ids, loss, mine, seeded, sgd, train

LIMIT = 1e-12


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    every = list(model.parameters())
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in every if p.ndim < 2], "lr": 1e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


@pytest.mark.parametrize(
    ("meshes", "transforms", "make"),
    [
        (["dp=4", "dp=2,tp=2", "tp=4", "dp=4"], [], adam),
        (["dp=2,tp=2", "tp=2,dp=2", "dp=4"], [sl.zero(3)], adam),
        (["dp=4", "tp=2,dp=2"], [sl.zero(1)], sgd),
        (["tp=4", "dp=2,tp=2"], [sl.zero(2)], adam),
        (["pp=2,dp=2", "dp=4", "pp=2,tp=2", "tp=4"], [], adam),
        (["dp=4", "pp=2,dp=2"], [sl.zero(1)], sgd),
        (["dp=4", "tp=2,dp=2", "pp=2,dp=2"], [sl.zero(1)], _two_groups),
    ],
)
def test_training_goes_on_as_on_one_device(meshes: list[str], transforms: Any, make: Any):
    for off in shared_pool(4).run(train, meshes, transforms, make):
        assert len(off) == len(meshes) and max(off) < LIMIT, off


def _dropped(meshes: list[str]) -> float:
    """Train with dropout by global elements; return the largest difference from one device."""
    Block.dropout = 0.5
    torch.manual_seed(0)
    single = Model().double()
    model = sl.shard_model(copy.deepcopy(single), meshes[0], RULES, rng="exact")
    optimizer, alone = sgd(model), sgd(single)
    for step, mesh in enumerate(meshes):
        if step:
            reshard(model, mesh, optimizer)
        before = torch.get_rng_state()
        loss(model, mine(ids(step), model)).backward()
        torch.set_rng_state(before)
        with sl.exact_random():
            loss(single, ids(step)).backward()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    Block.dropout = 0.0
    full = sl.full_state_dict(model)
    return max(float((full[name] - value).abs().max()) for name, value in single.state_dict().items())


def test_masks_are_those_of_one_device_throughout():
    for off in shared_pool(4).run(_dropped, ["dp=4", "dp=2,tp=2", "tp=4"]):
        assert off < LIMIT


def _wide(meshes: list[str]) -> bool:
    """Return whether the copies in float32 that the optimizer steps on are the same after a change of mesh."""
    torch.manual_seed(0)
    model = sl.shard_model(Model(), meshes[0], RULES, transforms=[sl.zero(2), sl.precision("bf16")])
    optimizer = adam(model)
    loss(model, mine(ids(0), model)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = _masters(model, optimizer)
    reshard(model, meshes[1], optimizer)
    after = _masters(model, optimizer)
    low = sl.full_state_dict(model)
    assert before.keys() == after.keys() and len(before) > 10
    assert any(not torch.equal(value, low[name].float()) for name, value in after.items())
    return all(torch.equal(value, after[name]) for name, value in before.items())


def _factored(meshes: list[str]) -> bool:
    """Return whether Adafactor's rows, columns and vectors are the same on another mesh, where it goes on."""
    torch.manual_seed(0)
    model = sl.shard_model(Model(), meshes[0], RULES, transforms=[sl.zero(1)])
    optimizer = torch.optim.Adafactor(model.parameters())
    kept = list[dict[str, torch.Tensor]]()
    for step, mesh in enumerate(meshes):
        if step:
            reshard(model, mesh, optimizer)
            kept.append(_state(model, optimizer))
        loss(model, mine(ids(step), model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(_state(model, optimizer))
    assert len(kept[0]) > 20 and kept[0].keys() == kept[1].keys()
    return all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}: {key}": value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }


def test_factored_state_moves_too():
    assert all(shared_pool(4).run(_factored, ["dp=4", "dp=2,tp=2"]))


def _masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        if (master := optimizer.state[param].get("master_parameter")) is not None:
            found[name] = master.full_tensor() if isinstance(master, DTensor) else master.clone()
    return found


def test_wide_copies_keep_their_digits():
    assert all(shared_pool(4).run(_wide, ["dp=4", "dp=2,tp=2"]))


def test_tensors_larger_than_a_bucket():
    for off in shared_pool(4).run(train, ["dp=2,tp=2", "tp=4"], [sl.zero(3)], bucket_mb=1 / 64, width=128):
        assert max(off) < LIMIT, off


class _Counting(torch.optim.SGD):
    """Keeps numbers, and no tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["steps"] = self.state[param].get("steps", 0) + 1


def _counted(mesh: str) -> bool:
    model = sl.shard_model(seeded(), "dp=2", RULES)
    sl.register_optimizer(_Counting, needs="shard")
    optimizer = _Counting(model.parameters(), lr=0.1)
    loss(model, mine(ids(0), model)).backward()
    optimizer.step()
    optimizer.zero_grad()
    reshard(model, mesh, optimizer)
    return all(optimizer.state[param] == {"steps": 1} for param in model.parameters())


def test_state_that_is_no_tensor_stays():
    assert all(shared_pool(2).run(_counted, "tp=2"))


def _bucketed(mesh: str) -> float:
    model = sl.shard_model(seeded(), "dp=2", RULES, bucket_mb=3)
    return sl.get_plan(reshard(model, mesh)).step.bucket_mb


def test_the_size_of_buckets_stays():
    assert shared_pool(2).run(_bucketed, "tp=2") == [3, 3]


def _forgotten(mesh: str) -> str:
    torch.manual_seed(0)
    model = sl.shard_model(Model(), "dp=2", RULES)
    optimizer = sgd(model)
    reshard(model, mesh)
    loss(model, mine(ids(0), model)).backward()
    with pytest.raises(ShardlibError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_that_was_not_given_is_refused():
    for told in shared_pool(2).run(_forgotten, "tp=2"):
        assert "embed.weight" in told, told


def _refused(kind: str) -> str:
    """Return what is said; the model goes on as it was."""
    torch.manual_seed(0)
    model: Any = sl.shard_model(Model(), "dp=2", RULES)
    optimizer: Any = adam(model)
    given, mesh, options = model, "tp=2", dict[str, Any]()
    rows = ids(0)[:2]
    before = model(rows)
    if kind == "plain":
        given = Model()
    if kind == "gradients":
        model(rows).sum().backward()
    if kind == "optimizer":
        optimizer = "adam"
    if kind == "mesh":
        mesh = "tp=3"
    if kind == "node":
        options["node"] = 0
    if kind == "ranks":
        options["bucket_mb"] = 1.0 + dist.get_rank()
    with pytest.raises(ShardlibError) as caught:
        reshard(given, mesh, optimizer, **options)
    assert torch.equal(model(rows), before) and str(sl.get_plan(model).mesh) == "dp=2"
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("plain", "that is not sharded. Shard it first"),
        ("gradients", "parameters have gradients, such as"),
        ("optimizer", "reshard(optimizer=...) was given a str"),
        ("mesh", "3"),
        ("ranks", "ranks gave different values of bucket_mb"),
        ("node", "node=0 was given"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_goes_on(kind: str, said: str):
    for told in shared_pool(2).run(_refused, kind):
        assert said in told


def _one_cannot_read_the_mesh(mesh: str) -> str:
    model = sl.shard_model(Model(), "tp=2", RULES)
    with pytest.raises(ShardlibError) as caught:
        reshard(model, mesh if dist.get_rank() else "dp=2", timeout=20)
    assert str(sl.get_plan(model).mesh) == "tp=2"
    reshard(model, "dp=2")
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("mesh", "said"), [("tp=3", "MeshError"), ("what", "MeshError"), ("tp=2", "ranks ask for different meshes")]
)
def test_a_mesh_that_one_rank_alone_gives_is_refused_on_all(mesh: str, said: str):
    for told in shared_pool(2).run(_one_cannot_read_the_mesh, mesh):
        assert said in told
