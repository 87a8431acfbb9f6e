"""Convolutional nets on a mesh: channels split inside a block, BatchNorm with the statistics of the global batch."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.engine.feature.recording import record_collectives
from shardlib.rules import suggest
from shardlib.testing import assert_equivalent
from tests.families.params import params
from tests.families.resnet import Case, Inverted

TOLERANCE = 1e-10  # of float64; sums in another order differ by some 1e-15
# Gradients behind a BatchNorm are partly zero in exact arithmetic: noise, divided by itself plus eps. The small step
# keeps training from being chaotic: BatchNorm over few values magnifies what differs by rounding.
_ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-5)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(*batch[0])
    return output.logsumexp(-1).mean() + output.square().mean()


TP2, TP4, DP2, BOTH = "tp=2", "tp=4", "dp=2", "dp=2,tp=2"
CASES = [
    Case(TP2, frozen_statistics=True),
    Case(BOTH, "Bottleneck"),
]
MORE = [
    Case(TP2, blocks=(2, 2, 2, 2)),
    Case(TP4, "Bottleneck"),
    Case(DP2),
    Case(BOTH, frozen_statistics=True),
]


@pytest.mark.parametrize("case", params(CASES, deep=MORE))
def test_training_gives_the_numbers_of_one_device(case: Case):
    """Running means, variances and the count of batches among them."""
    given = {"loss": _loss, "optimizer": _ADAMW, "rng": "fast", "steps": 2}
    assert assert_equivalent(case.make_model, case.make_batch, case.mesh, **given).gathered == ()


@pytest.mark.parametrize("mesh", [BOTH, pytest.param(TP4, marks=pytest.mark.deep)])  # two groups, on two and four ranks
def test_suggested_rules_of_depthwise_and_grouped_convolutions_give_the_numbers_of_one_device(mesh: str):
    rules = suggest(Inverted())
    sharded = [name for name, tensor in rules.resolve(Inverted(), BOTH).tensors.items() if tensor.layout.axes]
    assert len([name for name in sharded if name.endswith("weight")]) == 10  # all but the last norm of each block
    given = {"rules": rules, "loss": _loss, "optimizer": _ADAMW, "rng": "fast", "steps": 1}
    assert assert_equivalent(Inverted, Case(mesh).make_batch, mesh, **given).gathered == ()


def _collectives(case: Case) -> list[tuple[str, str, str]]:
    model = sl.shard_model(case.make_model(), case.mesh)
    _loss(model, case.make_batch(0)).backward()
    with record_collectives(model) as log:
        _loss(model, case.make_batch(0)).backward()
    return [(each.kind, each.module, each.phase) for each in log.collectives]


@pytest.mark.parametrize("block", ["BasicBlock", pytest.param("Bottleneck", marks=pytest.mark.deep)])
def test_a_block_costs_two_all_reduces_a_step(ranks, block: str):
    for counted in ranks(2).run(_collectives, Case(TP2, block)):
        assert Counter(counted) == {
            ("all_reduce", f"layer{i}.0.conv{n}", phase): 1 for i in range(1, 5) for n, phase in _SUMMED
        }


_SUMMED = ((2, "forward"), (1, "backward"))  # what the second one adds up; the gradient of what the first one read


# --- inference, checkpoints ----------------------------------------------------------------------------------------


def _pair(case: Case) -> tuple[nn.Module, nn.Module]:
    """After a step, so that statistics are not those that a new model has."""
    torch.manual_seed(0)
    alone = case.make_model().double()
    alone(case.make_batch(0)[0][0].double())
    return alone, sl.shard_model(copy.deepcopy(alone), case.mesh)


def _evaluate(case: Case) -> None:
    alone, sharded = _pair(case)
    images = case.make_batch(1)[0][0].double()
    with torch.no_grad():
        want, got = (model.eval()(images) for model in (alone, sharded))
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert all(torch.equal(t, alone.state_dict()[name]) for name, t in sl.full_state_dict(sharded).items())


@pytest.mark.parametrize("mesh", [TP4, pytest.param(DP2, marks=pytest.mark.deep)])
def test_evaluation_uses_running_statistics_and_leaves_them(ranks, mesh: str):
    ranks(sl.MeshShape(mesh).world_size).run(_evaluate, Case(mesh))


def _save_and_load(case: Case) -> None:
    alone, sharded = _pair(case)
    plain = alone.state_dict()
    assert list(sharded.state_dict()) == list(plain)
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(sharded).items())
    other = sl.shard_model(case.make_model().double(), case.mesh)
    assert other.load_state_dict(plain).missing_keys == []
    assert all(torch.equal(t, plain[name]) for name, t in sl.full_state_dict(other).items())
    assert plain["bn1.num_batches_tracked"] == 1


def test_state_dicts_of_one_device_and_of_a_mesh_are_the_same(ranks):
    ranks(2).run(_save_and_load, Case(TP2))


def test_a_resnet_finds_the_layout_file():
    for block in ("BasicBlock", "Bottleneck"):
        with torch.device("meta"):
            model = Case(TP2, block).make_model()
        assert sl.layouts.for_model(model) == sl.layouts.load("resnet")
        found = sl.layouts.load("resnet").resolve(model, "dp=2,tp=2").tensors
        assert str(found["layer3.0.conv1.weight"].layout) == "channel@tp in _ _"
        assert str(found["layer3.0.bn1.running_var"].layout) == "channel@tp"
        assert str(found["layer3.0.conv2.weight"].layout) == "out in@tp _ _"


# --- BatchNorm in all its forms, in a small plain net ---------------------------------------------------------------


class Net(nn.Module):
    """Channels that no mesh divides, two kinds of BatchNorm, and a linear layer behind the flattened image."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10, **norm), nn.Conv2d(10, 6, 3)
        self.out, self.last = nn.Linear(6 * 3 * 3, 7), nn.BatchNorm1d(7, **norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.norm(self.up(x)).relu())
        x = nn.functional.max_pool2d(x, 2)
        return self.last(self.out(x.flatten(1)))


_CHANNELS = sl.Rules({"up": "colwise", "norm": "channel@tp", "down": "rowwise", "out": "out@tp in", "last": None})


def _images(step: int) -> Any:
    return (torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step)),), {}


_FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "cumulative average": {"momentum": None},
    "without weights": {"affine": False},
    "without running statistics": {"track_running_stats": False},
}


@pytest.mark.covering
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "tp=3"])
def test_batch_norm_is_that_of_the_global_batch(mesh: str, form: str):
    net = functools.partial(Net, **_FORMS[form])
    assert_equivalent(net, _images, mesh, _CHANNELS, loss=_loss, optimizer=_ADAMW, steps=2)


def _each_ranks_own_statistics() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    alone = copy.deepcopy(model)
    model = sl.shard_model(model, DP2, {"**": None}, global_batch_norm=False)
    (images,), _ = _images(0)
    mine = images.double().chunk(2)[torch.distributed.get_rank()]
    for net in (model, alone):
        net(mine)
    return model.norm.running_mean, alone.norm.running_mean


def test_each_data_rank_may_keep_statistics_of_its_own(ranks):
    for got, want in ranks(2).run(_each_ranks_own_statistics):
        assert torch.equal(got, want)
