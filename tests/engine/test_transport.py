"""Both transports bring the same to every rank, and training over either is that of one device."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib._plan.activations import ReplayedPool
from shardlib._plan.parts import Buffer
from shardlib.engine.data.executor.bucket import Bucket
from shardlib.engine.ranks import transport
from shardlib.engine.ranks.transport import CollectiveTransport, PointToPointTransport, Workspace
from shardlib.layout import Layout, shard_spec
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Tokens, Transformer, rules_for
from shardlib.transforms import Transform

BOTH = [CollectiveTransport, PointToPointTransport]


def _counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def _moved(kind: type[transport.Transport], shapes: list[tuple[int, ...]], dim: int) -> list[torch.Tensor]:
    """Tensors gathered of the shards that were summed at their owners, twice each. All hold whole numbers."""
    group = dist.group.WORLD
    assert group is not None
    over = kind(group)
    mesh = sl.MeshShape(f"dp={over.count}")
    whole, shard = Layout.parse("a b"), Layout.parse(["a@dp b", "a b@dp"][dim])
    cuts = [shard_spec(whole, shard, shape, mesh, {"dp": over.index}) for shape in shapes]
    bucket = Bucket(cuts, over, torch.float32, torch.device("cpu"), Workspace())
    given = [_counted(shape) * (over.index + 1) for shape in shapes]
    mine = torch.empty(bucket.shard_numel)
    bucket.sum_into(bucket.reduce(given), mine, 2.0)
    wholes = [torch.empty(shape) for shape in shapes]
    bucket.unpack(bucket.gather([mine], wholes), wholes)
    return wholes


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("shapes", [[(6, 6)], [(4, 5)], [(6, 2), (3, 3)], [(1, 1), (4, 4)]], ids=str)
def test_what_is_summed_and_gathered_is_whole(ranks, kind: Any, dim: int, count: int, shapes: list[tuple[int, ...]]):
    summed = [2 * sum(range(1, count + 1)) * _counted(shape) for shape in shapes]
    for wholes in ranks(count).run(_moved, kind, shapes, dim):
        assert all(map(torch.equal, wholes, summed))


def _held(workspace: Workspace) -> list[int]:
    """Return the elements of each buffer that is free, the smallest first."""
    found: list[torch.Tensor] = []
    while (buffer := workspace.take(0, torch.float32, torch.device("cpu"))).numel():
        found.append(buffer)
    for buffer in found:
        workspace.give(buffer)
    return [buffer.numel() for buffer in found]


def test_a_pool_of_buffers_does_not_grow_from_step_to_step():
    workspace, device = Workspace(), torch.device("cpu")

    def take(*sizes: int) -> list[torch.Tensor]:
        return [workspace.take(size, torch.float32, device) for size in sizes]

    def give(buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            workspace.give(buffer)

    held = []
    for _ in range(20):
        pending = take(*[8] * 18, 32)  # of blocks, and of an embedding
        give(pending[:8])
        give([*pending[8:], *take(96, 48)])  # of many small gradients in one
        give(take(96))  # of updated parameters
        held.append(sum(_held(workspace)))
    assert held[0] == held[-1] <= 18 * 8 + 32 + 96 + 48


def test_a_pool_of_buffers_grows_by_the_least():
    workspace, device = Workspace(), torch.device("cpu")
    for sizes in [(10, 2), (11,), (12,)]:
        taken = [workspace.take(size, torch.float32, device) for size in sizes]
        for buffer in taken:
            workspace.give(buffer)
    assert _held(workspace) == [2, 12]


def test_the_planner_replays_the_pool():
    workspace, replayed, source = Workspace(), ReplayedPool(), random.Random(0)
    taken: list[tuple[torch.Tensor, list[Buffer]]] = []
    for _ in range(300):
        if taken and source.random() < 0.5:
            buffer, other = taken.pop(source.randrange(len(taken)))
            workspace.give(buffer)
            replayed.give(other)
        else:
            dtype, size = source.choice([torch.float32, torch.bfloat16]), source.randrange(1, 100)
            taken.append((workspace.take(size, dtype, torch.device("cpu")), replayed.take([Buffer(dtype, size)])))
        assert [buffer.numel() for buffer, _ in taken] == [one.size for _, (one,) in taken]


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have the environment of the test that calls them."""
    monkeypatch.setenv(transport.VARIABLE, CollectiveTransport.name)


TRAINED: list[tuple[str, tuple[Transform, ...]]] = [
    ("dp=2", (sl.zero(1),)),
    ("dp=2,tp=2", (sl.zero(2), sl.accumulate(2))),
    ("dp=3", (sl.fsdp(),)),
    ("dp=2,fsdp=2", (sl.hsdp(shard="fsdp", replicate="dp"),)),
    ("dp=2,tp=2", (sl.zero(3),)),
]


@pytest.mark.parametrize(("mesh", "transforms"), TRAINED, ids=str)
def test_training_by_collectives_is_that_of_one_device(collectives, mesh: str, transforms: tuple[Transform, ...]):
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return Transformer(vocab=7, heads=2, head=4, layers=2, bias=True)

    assert_equivalent(build, Tokens(12, 4, 7), mesh, rules_for(build()), transforms=transforms, steps=3)


def _kinds(transform: Transform) -> set[str]:
    """Collectives over dp in the second step."""
    model = Transformer(vocab=7, heads=2, head=4, layers=2, bias=True)
    made = sl.shard_model(model, "dp=2", rules_for(model), transforms=(transform,), compile=None)
    optimizer = torch.optim.AdamW(made.parameters())

    def step() -> None:
        made(torch.ones(2, 5, dtype=torch.int64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with sl.engine.record_collectives(made, mesh=sl.mesh("dp=2")) as log:
        step()
    return {one.kind for one in log.collectives if one.axes == ("dp",)}


@pytest.mark.parametrize("transform", [sl.zero(1), sl.zero(2), sl.fsdp()], ids=repr)
def test_the_variable_chooses(ranks, collectives, transform: Transform):
    assert ranks(2).run(_kinds, transform) == [{"reduce_scatter", "all_gather"}] * 2


def _with_another(variable: str) -> str:
    if dist.get_rank() == 1:
        os.environ[variable] = PointToPointTransport.name
    with pytest.raises(sl.errors.PlanError) as caught:
        sl.shard_model(torch.nn.Linear(4, 4), "dp=2", {"**": None})
    return str(caught.value)


def test_ranks_that_were_told_different_transports_are_refused(ranks, collectives):
    for said in ranks(2).run(_with_another, transport.VARIABLE):
        assert 'SHARDLIB_TRANSPORT="collectives"' in said
        assert 'SHARDLIB_TRANSPORT="point-to-point"' in said


def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(transport.VARIABLE, "nccl")
    with pytest.raises(sl.errors.InputError, match='"nccl" names no transport; set "collectives" or "point-to-point"'):
        transport.chosen()
