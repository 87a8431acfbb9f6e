"""The norm of all gradients is that of one device, whatever mixture they are, and the same bits on every rank."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import shardlib as sl
from shardlib.engine.data.params import local_of
from shardlib.engine.sharded import param_state_of
from shardlib.errors import ShardingError
from shardlib.testing import strategies
from shardlib.testing.equivalence import assert_equivalent
from shardlib.testing.equivalence.measure import distance, scale_of, size
from shardlib.testing.models import MLP, Transformer, batch_for, rules_for
from shardlib.transforms import Transform, fsdp, replicate, zero

TYPES = (1, 2, 0.5, 3.5, math.inf)
TRANSFORMS = (replicate(), zero(1), zero(2), zero(3), fsdp(), zero(1, only=["**.weight"]), zero(3, only=["blocks.*"]))
SHAPES = ("dp=2", "dp=2,tp=2", "dp=4")
# Keys have no bias, whose gradient is zero in exact arithmetic: a norm with p=0.5 makes much of such noise.
GPT = functools.partial(Transformer, vocab=15, heads=4, layers=2, bias=False)
Bits = tuple[str, ...]  # numbers written out, so that equal ones are the same bits


def _rows(batch: torch.Tensor, mesh: Any) -> torch.Tensor:
    names = mesh.mesh_dim_names
    count, index = (mesh["dp"].size(), mesh["dp"].get_local_rank()) if "dp" in names else (1, 0)
    return batch.chunk(count)[index]


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return distance(found, wanted, scale_of(size(wanted), 1.0))


def _trained(shape: str, transform: Transform, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """A model and its sharded copy, each after one backward pass of one batch; a parameter is frozen, one unused."""
    torch.manual_seed(0)
    reference = GPT(**{"tied": True, **changes}).double()
    reference.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    reference.get_parameter("blocks.0.mlp.up.weight").requires_grad_(False)
    known = rules_for(reference)
    rules = sl.Rules({**known.rules, "unused": None}, sizes=known.sizes)
    mesh = sl.mesh(shape)
    sharded = sl.shard_model(copy.deepcopy(reference), mesh, rules, transforms=(transform,), compile=None)
    batch = batch_for(reference)(0)
    reference(batch).square().mean().backward()
    sharded(_rows(batch, mesh)).square().mean().backward()
    return reference, sharded


def _whole(param: torch.Tensor) -> torch.Tensor:
    held = param_state_of(param)
    assert held is not None
    assert param.grad is not None
    return held.full_tensor(local_of(param.grad))


def _norms(shape: str, transform: Transform) -> tuple[float, Bits]:
    """How far norms and clipped gradients are from torch's on one device; the norms themselves."""
    reference, sharded = _trained(shape, transform, tied=shape == "dp=2")
    before, shown = [p.grad.clone() for p in reference.parameters() if p.grad is not None], []
    off = 0.0
    for p in TYPES:
        for mine, kept in zip((q for q in reference.parameters() if q.grad is not None), before, strict=True):
            mine.grad = kept.clone()
        norm = sl.booster.get_grad_norm(sharded, p)
        assert norm.ndim == 0
        assert type(norm) is torch.Tensor
        assert norm.dtype == torch.float64
        wanted = nn.utils.get_total_norm([q.grad for q in reference.parameters() if q.grad is not None], p)
        off = max(off, _off(norm, wanted))
        shown.append(norm.item().hex())
    limit = norm.item() / 3  # of the largest element
    assert sl.clip_grad_norm_(sharded, limit, math.inf).item().hex() == shown[-1]
    nn.utils.clip_grad_norm_(reference.parameters(), limit, math.inf)
    for mine, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None and theirs.grad is not None:
            off = max(off, _off(_whole(mine), theirs.grad))
    return off, tuple(shown)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("shape", "transform"),
    [*((shape, made) for shape in SHAPES for made in TRANSFORMS), ("tp=2", replicate())],
    ids=str,
)
def test_norms_are_those_of_one_device(ranks, shape: str, transform: Transform):
    """float64: sums in another order differ by some 1e-15."""
    found = ranks(2 if shape in ("dp=2", "tp=2") else 4).run(_norms, shape, transform)
    assert max(off for off, _ in found) <= 1e-12
    assert len({bits for _, bits in found}) == 1


def _clip(p: float, model: nn.Module) -> torch.Tensor:
    """Ours on the sharded run, torch's on one device: both are then compared."""
    if any(param_state_of(q) is not None for q in model.parameters()):
        return sl.clip_grad_norm_(model, 0.05, p)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05, p)


_STAGES = st.sampled_from([replicate(), zero(1), zero(2), zero(3), fsdp()])
_MESHES = strategies.mesh_shapes(4, model_axes=("tp", "sp"))


@settings(max_examples=max(2, settings.default.max_examples // 10))
@given(
    case=strategies.cases(strategies.transformers(), meshes=_MESHES),
    stage=_STAGES,
    p=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
def test_training_with_clipped_gradients_is_that_of_one_device(case: Any, stage: Transform, p: float):
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    given = {**case, "transforms": (stage,), "clip": functools.partial(_clip, p)}
    assert_equivalent(**given, steps=2, optimizer=sgd)


def _values(shape: str, transform: Transform) -> float:
    reference, sharded = _trained(shape, transform)
    limit = sl.booster.get_grad_norm(sharded, math.inf).item() / 4
    sl.booster.clip_grad_value_(sharded, limit)
    nn.utils.clip_grad_value_(reference.parameters(), limit)
    pairs = zip(sharded.parameters(), reference.parameters(), strict=True)
    return max(_off(_whole(a), b.grad) for a, b in pairs if b.grad is not None)


@pytest.mark.parametrize("transform", [replicate(), zero(1), zero(3)], ids=repr)
def test_elements_are_clamped_where_they_lie(ranks, transform: Transform):
    assert max(ranks(4).run(_values, "dp=2,tp=2", transform)) <= 1e-12


def _of_several_dtypes() -> tuple[float, torch.dtype, Bits]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(6, 4).bfloat16(), nn.Linear(6, 4)

    torch.manual_seed(0)
    single = Mixed()
    sharded = sl.shard_model(copy.deepcopy(single), "dp=2", {"**": None}, transforms=(zero(2),))
    for model in (single, sharded):
        (model.low.weight.float().square().sum() + model.high.weight.square().sum()).backward()
    wide = torch.cat([p.grad.double().flatten() for p in single.parameters() if p.grad is not None])
    norm = sl.booster.get_grad_norm(sharded)
    return abs(norm.item() / wide.norm().item() - 1), norm.dtype, (norm.item().hex(),)


def _broken() -> list[tuple[float, float, float, bool, str]]:
    """One rank's part has an element that is not finite."""
    _, sharded = _trained("dp=4", zero(2))
    grads = [q.grad for q in sharded.parameters() if q.grad is not None]
    found = []
    for value, p in itertools.product((math.nan, math.inf, -math.inf), (2.0, math.inf)):
        if torch.distributed.get_rank() == 3:
            grads[2].to_local().view(-1)[0] = value
        norm = sl.booster.get_grad_norm(sharded, p).item()
        with pytest.raises(ShardingError) as raised:
            sl.clip_grad_norm_(sharded, 1.0, p, error_if_nonfinite=True)
        found.append((value, p, norm, torch.isfinite(grads[0].to_local()).all().item(), str(raised.value)))
    return found


def test_what_is_not_finite_on_one_rank_is_not_on_all(ranks):
    for value, p, norm, rest_is_finite, said in itertools.chain(*ranks(4).run(_broken)):
        assert math.isnan(norm) if math.isnan(value) else norm == math.inf
        assert rest_is_finite
        assert said.startswith(f"The norm of order {p:g} of all gradients is {norm}, on all ranks.")


def _partial() -> tuple[float, float]:
    mesh = sl.mesh("tp=2")
    param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    mine = torch.full((4,), 1.0 + torch.distributed.get_rank())
    param.grad = DTensor.from_local(mine, mesh, [Partial("sum")])
    norm = sl.booster.get_grad_norm(param).item()
    sl.booster.clip_grad_value_([param, param], 2.0)
    return norm, param.grad.full_tensor()[0].item()


def test_partial_sums_are_summed_first(ranks):
    assert ranks(2).run(_partial) == [(6.0, 2.0)] * 2


def _unreduced() -> str:
    torch.manual_seed(0)
    model = sl.shard_model(MLP(), "dp=2", {"**": None}, transforms=(zero(1),))
    with sl.no_sync(model):
        model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(ShardingError) as raised:
        sl.clip_grad_norm_(model, 1.0)
    return str(raised.value)


def test_a_gradient_of_some_examples_is_refused(ranks):
    for said in ranks(2).run(_unreduced):
        assert said.startswith('"scale" has a gradient of this rank\'s examples alone')


def test_gradients_of_several_dtypes_are_summed_in_float32_at_least(ranks):
    found = ranks(2).run(_of_several_dtypes)
    assert all(off <= 2**-22 and dtype == torch.float32 for off, dtype, _ in found)
    assert len({bits for *_, bits in found}) == 1


def _plain_model() -> nn.Module:
    torch.manual_seed(0)
    model = MLP().double()
    model(batch_for(model)(0)).square().mean().backward()
    return model


@pytest.mark.parametrize("p", TYPES)
def test_a_model_that_is_not_sharded(p: float):
    model, twin = _plain_model(), _plain_model()
    ours, theirs = sl.clip_grad_norm_(model, 0.1, p), nn.utils.clip_grad_norm_(twin.parameters(), 0.1, p)
    assert _off(ours, theirs) <= 1e-15 * 4
    for mine, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert _off(mine.grad, wanted.grad) <= 1e-15 * 4


def test_nothing_to_clip():
    assert sl.clip_grad_norm_(nn.Linear(2, 2), 1.0).item() == 0.0
    assert sl.clip_grad_norm_([], 1.0).item() == 0.0
    sl.booster.clip_grad_value_(nn.Linear(2, 2), 1.0)


def test_each_parameter_counts_once():
    model = _plain_model()
    assert sl.booster.get_grad_norm([*model.parameters(), *model.parameters()]) == sl.booster.get_grad_norm(model)


def test_no_limit_changes_nothing():
    model = _plain_model()
    next(model.parameters()).grad[0] = math.inf
    before = [p.grad.clone() for p in model.parameters()]
    assert sl.clip_grad_norm_(model, math.inf).item() == math.inf
    assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))


REFUSED: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda m: sl.clip_grad_norm_(m, -1.0), "max_norm=-1.0 was given; give a number that is not negative"),
    (lambda m: sl.clip_grad_norm_(m, math.nan), "max_norm=nan was given"),
    (lambda m: sl.clip_grad_norm_(m, None), "max_norm=None was given; give a number"),
    (lambda m: sl.clip_grad_norm_(m, 1.0, "two"), "norm_type='two' was given; give a positive number"),
    (
        lambda m: sl.clip_grad_norm_("x", 1.0),
        "The gradients of str 'x' were asked for; give a model, or its parameters.",
    ),
    (lambda m: sl.clip_grad_norm_(None, 1.0), "The gradients of NoneType None were asked for"),
    (lambda m: sl.booster.clip_grad_value_([*m.parameters(), 3], 1.0), "The gradients of int 3 were asked for"),
    (lambda m: sl.clip_grad_norm_(m, 1.0, 0), "norm_type=0 was given; give a positive number, such as 2.0, or inf."),
    (lambda m: sl.clip_grad_norm_(m, 1.0, -math.inf), "norm_type=-inf was given"),
    (lambda m: sl.booster.get_grad_norm(m, math.nan), "norm_type=nan was given"),
    (lambda m: sl.booster.clip_grad_value_(m, -0.5), "clip_value=-0.5 was given"),
    (lambda m: sl.booster.clip_grad_value_(m, math.nan), "clip_value=nan was given"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said.split(" was")[0] for _, said in REFUSED])
def test_arguments_that_make_no_sense_are_refused(call: Callable[[nn.Module], Any], said: str):
    with pytest.raises(ShardingError) as raised:
        call(_plain_model())
    assert str(raised.value).startswith(said)
