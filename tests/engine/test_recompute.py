"""Modules that compute again in backward: the same numbers, under every transform, and less memory between."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.engine.feature.recompute import modules_to_recompute
from shardlib.errors import PlanError
from shardlib.testing import assert_equivalent
from shardlib.testing.models import Numbers, Tokens, Transformer, rules_for
from shardlib.testing.strategies import ModelFactory
from shardlib.transforms import Transform, fsdp, replicate, zero

SIZES = (("vocab", 7), ("heads", 2), ("head", 4), ("layers", 3), ("tied", True), ("bias", False))
GPT = ModelFactory(Transformer, SIZES)
DROPPING = ModelFactory(Transformer, (*SIZES, ("dropout", 0.3)))


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("transform", [replicate(), zero(1), zero(2), zero(3), fsdp()], ids=repr)
def test_training_is_that_of_one_device(transform: Transform, mesh: str):
    """Dropout by element: what is computed again draws the masks of forward."""
    given: dict[str, Any] = {"mesh": mesh, "rules": rules_for(GPT()), "steps": 2}
    assert_equivalent(DROPPING, Tokens(8, 5, 7), transforms=(sl.checkpoint_activations(), transform), **given)


@pytest.mark.parametrize(
    "pattern", ["blocks.*.mlp", ("blocks.0", "blocks.*.attn"), ("blocks.1", "blocks.1.mlp.up"), "head"]
)
def test_any_modules_may_be_named(pattern: Any):
    given: dict[str, Any] = {"mesh": "dp=2,tp=2", "rules": rules_for(GPT()), "steps": 2}
    transforms = (zero(3), sl.checkpoint_activations(pattern))
    assert_equivalent(GPT, Tokens(8, 5, 7), transforms=transforms, **given)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("mesh", "transform"),
    [("dp=2", zero(3)), *(pytest.param("dp=2,tp=2", each, marks=pytest.mark.deep) for each in (replicate(), zero(3)))],
    ids=str,
)
def test_blocks_may_be_compiled_besides(mesh: str, transform: Transform):
    """They draw again what forward drew, of parameters that are stored in parts."""
    rules = rules_for(GPT()) if "tp" in mesh else {"**": None}
    given: dict[str, Any] = {"mesh": mesh, "rules": rules, "steps": 2, "compile": "auto"}
    assert_equivalent(DROPPING, Tokens(8, 5, 7), transforms=(sl.checkpoint_activations(), transform), **given)


class Block(nn.Module):
    """Takes what is no tensor, by position and by name, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, label: str, *, scale: float, mask: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.dropout(torch.relu(self.up(x)))).exp()
        return {"x": x + scale * mask * self.down(hidden), "label": label}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        label = "first"
        for block in self.blocks:
            out = block(x, label, scale=0.5, mask=torch.ones(16))
            x, label = out["x"], out["label"]
        return x


def _saved(transforms: tuple[Any, ...], mesh: str) -> tuple[int, list[str], list[torch.Tensor]]:
    """Bytes that forward leaves for backward beside parameters, names, and gradients."""
    torch.manual_seed(0)
    rules = {"up": "colwise", "down": "rowwise"} if "tp" in mesh else {"**": "replicate"}
    model = sl.shard_model(Stack(), mesh, rules, transforms=transforms, compile=None)
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(torch.ones(32, 16, requires_grad=True)).square().mean()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return sum(held.values()), [*model.state_dict()], grads


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_activations_are_not_kept(ranks, mesh: str):
    """Of each block its input is kept, [32, 16] floats, and the last output. Masks of `rng="fast"` are drawn again."""
    plain = ranks(2).run(_saved, (), mesh)
    again = ranks(2).run(_saved, (sl.checkpoint_activations(),), mesh)
    for (much, names, wanted), (little, same_names, found) in zip(plain, again, strict=True):
        assert names == same_names
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert little <= (4 + 1) * 32 * 16 * 4
        assert much > 4 * little


def test_a_pattern_without_a_module_is_refused(ranks):
    with pytest.raises(PlanError) as raised:
        sl.shard_model(Stack(), "dp=1", {"**": None}, transforms=(sl.checkpoint_activations("blocks.*.mpl"),))
    assert str(raised.value).startswith('checkpoint_activations("blocks.*.mpl"): the pattern matches none of the 17')


class Link(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.following = nn.Linear(6, 6), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Chained(nn.Module):
    """Blocks in a list, each of which also is an attribute of the one before: its first name is of that attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Link() for _ in range(3))
        for block, following in pairwise(self.blocks):
            block.following = following

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.covering
@pytest.mark.parametrize("transform", [replicate(), zero(2), zero(3)], ids=repr)
@pytest.mark.parametrize("pattern", ["units", "blocks.2", "^blocks.0.following.following"])
def test_a_block_may_have_several_names(pattern: str, transform: Transform):
    given: dict[str, Any] = {"mesh": "dp=2", "rules": {"**": None}, "steps": 2}
    transforms = (sl.checkpoint_activations(pattern), transform)
    assert_equivalent(ModelFactory(Chained), Numbers((8, 6)), transforms=transforms, **given)


def test_a_block_of_several_names_is_recomputed_once():
    patterns = ("blocks.*", "following")
    assert modules_to_recompute(Chained(), patterns) == (
        "blocks.0",
        "blocks.0.following",
        "blocks.0.following.following",
    )


class Leaky(nn.Module):
    """The last that its backward needs is noise that is saved before it is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(6, 8), nn.Linear(8, 6), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.down(self.up(x).relu()))


def _leaky() -> nn.Module:
    return nn.Sequential(Leaky(), Leaky(), nn.Linear(6, 3))


@pytest.mark.parametrize("mesh", ["tp=2", "dp=1"])
def test_noise_that_an_op_writes_after_it_is_saved_is_drawn_again(mesh: str):
    rules = {"up": "colwise", "down": "rowwise", "2": "replicate"} if "tp" in mesh else {"**": None}
    transforms = (sl.checkpoint_activations(("0", "1")), zero(3))
    assert_equivalent(_leaky, Numbers((4, 6)), mesh=mesh, rules=rules, transforms=transforms, rng="fast")


class Counting(nn.Module):
    """Statistics of batches, a counter and a mean, of which forward reads the mean and assigns the counter anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        if self.training:
            with torch.no_grad():
                self.count = self.count + 1
                self.mean.add_(0.25)
        return self.norm(h) * (1 + self.mean)


def _counting() -> nn.Module:
    return nn.Sequential(Counting(), Counting(), nn.Linear(6, 3))


@pytest.mark.parametrize("pattern", [("0", "1"), "*"])
@pytest.mark.parametrize("transform", [replicate(), zero(3)], ids=repr)
def test_buffers_change_once(pattern: Any, transform: Transform):
    """Buffers are compared after training. "*" recomputes modules inside of modules too."""
    transforms = (sl.checkpoint_activations(pattern), transform)
    assert_equivalent(_counting, Numbers((8, 6)), mesh="dp=2", rules={"**": None}, transforms=transforms, steps=3)


def _evaluated_first() -> list[float]:
    """Recomputed first in evaluation, as a loss of features is, and then in training."""
    model = sl.shard_model(_counting(), "dp=2", {"**": None}, transforms=sl.checkpoint_activations("*"), compile=None)
    for training in (False, True, True):
        model.train(training)
        model(torch.ones(3, 6)).sum().backward()
    return [float(block.norm.num_batches_tracked) for block in list(model)[:2]]


def test_buffers_change_once_also_after_a_forward_that_changes_none(ranks):
    assert ranks(2).run(_evaluated_first) == [[2.0, 2.0]] * 2


class Encoded(nn.Module):
    """A block as of torchvision's `VisionTransformer`: attention reads its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        h = x + self.attention(h, h, h, need_weights=False)[0]
        return h + self.mlp(h)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.positions = nn.Linear(6, 8), nn.Parameter(0.02 * torch.randn(1, 5, 8))
        self.layers = nn.Sequential(OrderedDict((f"layer_{index}", Encoded()) for index in range(3)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.up(x) + self.positions)[:, 0])


@pytest.mark.covering
@pytest.mark.parametrize("mesh", ["dp=2", "dp_replicate=2,dp_shard=2"])
@pytest.mark.parametrize("pattern", ["layers.*", "*"])
@pytest.mark.parametrize("transform", [zero(2), zero(3), fsdp(), fsdp(reshard_after_forward=False)], ids=repr)
def test_a_block_may_read_parameters_of_a_module_that_it_does_not_call(transform: Transform, pattern: str, mesh: str):
    """The modules of "*" are in each other: a query that is the key is the key in the second call too."""
    given: dict[str, Any] = {"mesh": mesh, "rules": {"**": None}, "steps": 2}
    transforms = (transform, sl.checkpoint_activations(pattern))
    assert_equivalent(ModelFactory(Encoder), Numbers((4, 5, 6)), transforms=transforms, **given)


class Reading(nn.Module):
    """Checkpoints a function that reads weights whose modules run in it, before it and after it.

    Reentrant checkpointing gives a weight a gradient of its own: only of the module that runs inside alone.
    """

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self._inner, self.first(x), use_reentrant=self.use_reentrant))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.middle,) if self.use_reentrant else (self.middle, self.first, self.last):
            x = torch.tanh(F.linear(x, module.weight)) + self.middle(x)
        return x


@pytest.mark.covering
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("transform", [zero(2), zero(3), fsdp(reshard_after_forward=False)], ids=repr)
def test_a_function_may_read_parameters_of_modules(transform: Transform, use_reentrant: bool):
    """No parameter is outside of units: those that run are all that the function needs."""
    model = ModelFactory(Reading, (("use_reentrant", use_reentrant),))
    assert_equivalent(model, Numbers((8, 6)), mesh="dp=2", rules={"**": None}, transforms=transform, steps=2)
