"""`copy.deepcopy` of a sharded model, with what the contract's small model does not have: see `tests/contract/`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardlib as sl
from shardlib.engine.sharded import record_of
from shardlib.errors import ShardingError
from shardlib.testing.models import Transformer, rules_for
from tests.engine.mixture import EMBED, Mixture


def _loss(out: torch.Tensor, _batch: Any = None) -> torch.Tensor:
    return out.float().square().mean()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    if record_of(model).pipeline is None:
        _loss(model(ids)).backward()
    else:
        sl.pipeline_step(model, ids, _loss)
    optimizer.step()


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in sl.full_state_dict(model).items()}


def _trained_side_by_side(mesh: str, transforms: tuple[Any, ...], model: nn.Module, **given: Any) -> None:
    """Train a model, copy it, train both with new optimizers on the same batches, and compare them bit for bit."""
    sparse = isinstance(model, _Sparse)
    rules = sl.Rules(EXPERTS, unmatched="replicate") if sparse else rules_for(model)
    rules = rules.with_stages("embed, position, blocks.0 | blocks.1, norm, head") if "pp" in mesh else rules
    model.norm.requires_grad_(False)
    sl.shard_model(model, mesh, rules, transforms=transforms, compile=None, **given)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    before, state = _weights(model), torch.get_rng_state()
    other = copy.deepcopy(model)
    assert torch.equal(torch.get_rng_state(), state), "copying draws nothing"
    assert str(sl.get_plan(other)) == str(sl.get_plan(model))
    assert [(n, p.requires_grad, type(p)) for n, p in other.named_parameters()] == [
        (n, p.requires_grad, type(p)) for n, p in model.named_parameters()
    ]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, other)]
    _step(other, optimizers[1], 1)
    assert all(torch.equal(value, before[name]) for name, value in _weights(model).items()), "they share no memory"
    torch.set_rng_state(state)
    _step(model, optimizers[0], 1)
    for seed in (2, 3):
        for one, optimizer in zip((model, other), optimizers, strict=True):
            torch.manual_seed(seed)
            _step(one, optimizer, seed)
    mine, theirs = _weights(model), _weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert not all(torch.equal(value, before[name]) for name, value in mine.items())


class _Checkpointed(Transformer):
    """A transformer that recomputes its blocks by itself."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class _Sparse(nn.Module):
    """A mixture of experts on tokens."""

    def __init__(self, vocab: int, **_sizes: Any) -> None:
        super().__init__()
        self.embed, self.mixture, self.norm = nn.Embedding(vocab, EMBED), Mixture(), nn.LayerNorm(EMBED)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mixture(self.embed(ids)))


EXPERTS = {"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}
SMALL = {"vocab": 7, "heads": 2, "head": 4, "layers": 2}
CASES: dict[str, tuple[str, tuple[Any, ...], type[nn.Module], dict[str, Any], dict[str, Any]]] = {
    "masters": ("dp=2", (sl.precision("bf16"), sl.zero(1)), Transformer, {}, {}),
    "deferred updates": ("dp=2", (sl.zero(1, overlap=True),), Transformer, {"tied": True}, {}),
    "recomputed": ("dp=2", (sl.zero(3), sl.checkpoint_activations("blocks.*")), Transformer, {}, {}),
    "checkpointed by itself": ("dp=2", (sl.zero(3),), _Checkpointed, {}, {}),
    "a table that is not saved": ("tp=2", (), Transformer, {"position": "rotary", "norm": "rms"}, {}),
    "float8": ("tp=2", (sl.precision("fp8", linears="blocks.**"),), Transformer, {}, {}),
    "experts": ("ep=2", (), _Sparse, {}, {}),
    "tied over stages": ("pp=2", (sl.pipeline("1f1b", microbatches=2),), Transformer, {"tied": True}, {}),
    "exact masks": ("dp=2", (), Transformer, {"dropout": 0.1}, {"rng": "exact"}),
    "on the host": ("dp=2", (sl.zero(1), sl.offload("state")), Transformer, {}, {}),
}


def _case(name: str) -> None:
    mesh, transforms, kind, sizes, given = CASES[name]
    torch.manual_seed(0)
    _trained_side_by_side(mesh, transforms, kind(**SMALL, **sizes), **given)


@pytest.mark.parametrize("name", CASES)
def test_a_copy_trains_as_its_original(ranks, name: str):
    ranks(2).run(_case, name)


def _changed(how: str) -> str:
    torch.manual_seed(0)
    model = sl.shard_model(Transformer(**SMALL), "tp=2", rules_for(Transformer(**SMALL)), compile=None)
    if how == "added":
        model.extra = nn.Parameter(torch.zeros(2))
    elif how == "replaced":
        model.norm.weight = nn.Parameter(torch.zeros(8))
    else:
        del model.blocks[1]
    try:
        copy.deepcopy(model)
    except ShardingError as error:
        return str(error)
    return "copied"


@pytest.mark.parametrize(
    ("how", "name"), [("added", "extra"), ("replaced", "norm.weight"), ("removed", "blocks.1.attn.proj.bias")]
)
def test_a_model_whose_parameters_have_changed_is_not_copied(ranks, how: str, name: str):
    for said in ranks(2).run(_changed, how):
        assert said.startswith(f'"{name}" of this sharded Transformer was added, replaced or removed')


def _left_as_it_was() -> None:
    """A copy that fails leaves the model as it was, hooks and wrappers included."""
    torch.manual_seed(0)
    model = sl.shard_model(Transformer(**SMALL), "tp=2", rules_for(Transformer(**SMALL)), compile=None)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    expected = model(ids)
    model.cannot_be_copied = (i for i in range(3))
    for _ in range(2):
        with pytest.raises(TypeError, match="cannot pickle 'generator'"):
            copy.deepcopy(model)
    assert torch.equal(model(ids), expected)
    del model.cannot_be_copied
    assert torch.equal(copy.deepcopy(copy.deepcopy(model))(ids), expected)


def test_a_copy_that_fails_leaves_the_model_as_it_was(ranks):
    ranks(2).run(_left_as_it_was)


def _outputs_of_a_patched_norm() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    own = norm.forward
    norm.forward = lambda x: 2 * own(x)  # type: ignore[method-assign]
    model = sl.shard_model(nn.Sequential(nn.Linear(3, 4), norm), "dp=2", sl.Rules({}, unmatched="replicate"))
    other, x = copy.deepcopy(model), torch.randn(6, 3)
    return model(x).detach(), other(x).detach()


def test_a_forward_that_a_module_was_given_is_in_the_copy(ranks):
    for mine, copied in ranks(2).run(_outputs_of_a_patched_norm):
        assert torch.equal(mine, copied)
