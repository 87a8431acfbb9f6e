"""The models run, hide no mistake behind equal numbers, and train the same sharded by the rules that are for them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardlib.errors import InputError
from shardlib.testing.equivalence import assert_equivalent
from shardlib.testing.models import MLP, ConvNet, Numbers, Transformer, batch_for, perturb, rules_for


@dataclass(frozen=True)
class Make:
    """A model by its class and arguments; it travels to ranks."""

    cls: type[nn.Module]
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self) -> nn.Module:
        return self.cls(**dict(self.arguments))


def make(cls: type[nn.Module], **arguments: Any) -> Make:
    return Make(cls, tuple(arguments.items()))


MODELS = {
    "transformer": make(Transformer),
    "odd vocabulary, two layers, tied": make(Transformer, vocab=9, layers=2, tied=True),
    "three heads": make(Transformer, heads=3, bias=False),
    "grouped queries": make(Transformer, heads=4, kv_heads=2),
    "one key head": make(Transformer, heads=4, kv_heads=1, position="rotary", norm="rms"),
    "three layers for qkv": make(Transformer, fused=False, norm="rms", bias=False, position="rotary"),
    "mlp": make(MLP),
    "mlp with everything": make(MLP, ins=5, width=7, shared="module", buffers=True, unused=True, bias=False),
    "mlp with a shared weight": make(MLP, shared="weight", buffers=True),
    "batch norm": make(ConvNet, channels=5),
    "group norm": make(ConvNet, norm="group"),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_values_of_its_own_and_gets_a_gradient_of_its_own(name: str):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    model(batch_for(model)(0)).square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.unique().numel() == parameter.numel(), parameter_name
        if not parameter_name.startswith("unused"):
            assert parameter.grad is not None, parameter_name


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_the_same_by_the_rules_that_are_for_it(name: str, mesh: str):
    model = MODELS[name]()
    assert_equivalent(MODELS[name], batch_for(model), mesh, rules_for(model), steps=2)


@pytest.mark.parametrize("name", ["transformer", "grouped queries"])
def test_the_residual_stream_may_be_split_over_the_sequence(name: str):
    model = MODELS[name]()
    assert_equivalent(MODELS[name], batch_for(model), "tp=2", rules_for(model, sequence=True), steps=2)


def test_dropout_is_that_of_one_device_without_data_axes():
    factory = make(Transformer, heads=4, kv_heads=2, dropout=0.3)
    model = factory()
    assert_equivalent(factory, batch_for(model), "tp=2", rules_for(model), steps=2, rng="fast")


@pytest.mark.parametrize("name", MODELS)
def test_the_rules_split_what_can_be_split_and_are_valid_on_every_mesh(name: str):
    model = MODELS[name]()
    for mesh in ("tp=2", "tp=3", "dp=2", "dp=2,tp=4"):
        split = [t for t in rules_for(model).resolve(model, mesh).tensors.values() if "tp" in t.layout.axes]
        assert bool(split) is ("tp" in mesh)


def test_fewer_key_heads_than_ranks_stay_whole():
    layouts = rules_for(model := make(Transformer, heads=4, kv_heads=1)()).resolve(model, "tp=2").tensors
    assert not layouts["blocks.0.attn.k.weight"].layout.axes
    assert layouts["blocks.0.attn.q.weight"].layout.axes == {"tp"}


def test_numbers_are_of_distinct_magnitudes_and_both_signs():
    x = Numbers((8, 3, 6, 6))(3)
    assert x.dtype is torch.float64
    assert x.abs().unique().numel() == x.numel()
    assert x.abs().min() >= 1 and x.abs().max() < 2
    assert 0.3 < (x > 0).double().mean() < 0.7
    assert torch.equal(x, Numbers((8, 3, 6, 6))(3)) and not torch.equal(x, Numbers((8, 3, 6, 6))(4))


@pytest.mark.parametrize("name", MODELS)
def test_batches_travel_and_leave_the_generator_of_the_model_alone(name: str):
    batch = pickle.loads(pickle.dumps(batch_for(MODELS[name](), rows=6)))
    before = torch.get_rng_state()
    assert len(batch(0)) == 6
    assert torch.equal(before, torch.get_rng_state())


def test_noise_moves_a_tied_parameter_once_and_keeps_variances_positive():
    model = nn.Module()
    model.first = nn.Linear(3, 3)
    model.second = nn.Linear(3, 3)
    model.second.weight = model.first.weight
    model.norm = nn.BatchNorm1d(50)
    before = model.first.weight.detach().clone()
    assert perturb(model, seed=1) is model
    first = 0.3 * torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(model.first.weight.detach(), before + first.float())
    assert model.norm.running_mean.unique().numel() == 50
    assert (model.norm.running_var >= 1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Transformer(heads=0), "Transformer(heads=0): give an integer from 1 up."),
        (
            lambda: Transformer(heads=4, kv_heads=3),
            "Transformer(heads=4, kv_heads=3): give kv_heads that divide heads.",
        ),
        (
            lambda: Transformer(head=3, position="rotary"),
            'Transformer(head=3, position="rotary") rotates pairs of features; give an even head.',
        ),
        (lambda: Transformer(norm="batch"), "Transformer(norm='batch'): give one of 'layer', 'rms'."),
        (lambda: MLP(shared="all"), "MLP(shared='all'): give one of '', 'weight', 'module'."),
        (lambda: ConvNet(norm="layer"), "ConvNet(norm='layer'): give one of 'batch', 'group'."),
        (lambda: batch_for(MLP(), rows=True), "batch_for(rows=True): give an integer from 1 up."),
        (
            lambda: rules_for(MLP(), sequence=True),
            "rules_for(MLP, sequence=True): only a Transformer has a sequence to shard.",
        ),
        (
            lambda: batch_for(nn.Linear(2, 2)),
            "batch_for() was given a Linear; it knows Transformer, MLP and ConvNet of shardlib.testing.models. Write "
            "the rules and batches of a model of your own by hand.",
        ),
    ],
)
def test_what_cannot_be_is_refused(call: Any, message: str):
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value) == message
