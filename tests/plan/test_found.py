"""Plans of models that torch sharded: every rank holds what its row says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardlib as sl
from shardlib._mesh import mesh
from shardlib.errors import MeshError, PlanError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)


class Model(nn.Module):
    """Tied, of repeated blocks, with rows that four ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 8), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))


def sharded(by: DeviceMesh, *, data: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        parallelize_module(block, by["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (*model.blocks, model) if data else ():
        fully_shard(module, mesh=by["dp"])
    return model


def seen(data: bool) -> tuple[str, list[str]]:
    """The plan as text, and what a rank's shard has otherwise than its row."""
    by = mesh("dp=2,tp=2")
    model = sharded(by, data=data)
    torch.manual_seed(0)
    whole = dict(Model().named_parameters())
    plan = sl.Plan.of(model, "dp=2,tp=2")
    at = plan.mesh.coordinate(torch.distributed.get_rank())
    wrong = []
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        if not torch.equal(local, plan[name].stored.take(whole[name].detach(), plan.mesh, at)):
            wrong.append(name)
    return str(plan), wrong


def test_a_rank_holds_what_the_plan_of_dtensors_says(ranks):
    for data in (False, True):
        for text, wrong in ranks(4).run(seen, data):
            assert not wrong
            assert "blocks.{0-1}.up.weight x2" in text
            assert ("out@(tp,dp) in          out@tp in" in text) == data
            assert "embed.weight" in text and ("vocab@dp embed" in text) == data and "no DTensor" in text


def differences() -> tuple[str, str, str, str]:
    by = mesh("dp=2,tp=2")
    rules = sl.Rules({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, unmatched="replicate")
    ours = sl.plan(Model(), by, rules)
    found = sl.Plan.of(sharded(by, data=False), by)
    unnamed = nn.Linear(8, 8)
    fully_shard(unnamed)
    told = []
    for call in (lambda: sl.Plan.of(unnamed), lambda: sl.Plan.of(nn.Linear(8, 8))):
        with pytest.raises(MeshError) as raised:
            call()
        told.append(str(raised.value))
    return found.diff(ours), str(sl.Plan.of(unnamed, "fsdp=4")["weight"].stored), *told  # type: ignore[return-value]


def test_it_is_compared_with_a_plan_by_rules_and_names_axes_that_have_none(ranks):
    for diff, stored, unnamed, plain in ranks(4).run(differences):
        assert not [line for line in diff.splitlines() if "@" in line], diff
        assert stored == "out@fsdp in"
        assert "(4,) ranks whose axes have no names" in unnamed and 'Plan.of(model, "dp=4")' in unnamed
        assert "no DTensors" in plain and 'Plan.of(model, "dp=8")' in plain


def test_what_is_no_model_is_refused():
    with pytest.raises(PlanError, match="A model was given as dict"):
        sl.Plan.of({})  # type: ignore[arg-type]
