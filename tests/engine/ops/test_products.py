"""The table of linear layers: its claims of outputs and gradients, by brute force; and aten.mm reads it too."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Placement, Replicate, Shard

from shardlib.engine._torch import _StridedShard
from shardlib.engine.ops._choose import choose
from shardlib.engine.ops._products import LinearPlan, plan_linear, products
from shardlib.engine.ops._rows import Call, Meta, rule_of
from shardlib.testing._prove import cut

R, S, RANKS = Replicate(), Shard, 2
X, WEIGHT = (R, S(0), S(1), S(2), _StridedShard(2, split_factor=2)), (R, S(0), S(1), _StridedShard(0, split_factor=2))
BORDERS = (None, R, S(0), S(1), S(2))
SHAPE, WEIGHT_SHAPE = (2, 4, 8), (12, 8)


def _plan(x: Placement, weight: Placement, border: Placement | None) -> LinearPlan | None:
    wanted = None if border is None else (border,)
    return plan_linear((x,), (weight,), SHAPE, WEIGHT_SHAPE, (RANKS,), wanted)


def _agrees(whole: torch.Tensor, pieces: list[torch.Tensor], placement: Placement) -> bool:
    """Whether ranks hold a tensor as a placement says."""
    if placement.is_partial():
        return torch.allclose(sum(pieces, torch.zeros_like(whole)), whole)
    wanted = cut(whole, placement, RANKS)
    return all(a.shape == b.shape and torch.allclose(a, b) for a, b in zip(pieces, wanted, strict=True))


@pytest.mark.parametrize(("x", "weight", "border"), [*itertools.product(X, WEIGHT, BORDERS)], ids=str)
def test_every_line_is_true(x: Placement, weight: Placement, border: Placement | None):
    plan = _plan(x, weight, border)
    if plan is None:
        assert not products(x, weight, 2)
        return
    torch.manual_seed(0)
    whole_x, whole_weight, bias, grad = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in (SHAPE, WEIGHT_SHAPE, WEIGHT_SHAPE[:1], (*SHAPE[:-1], WEIGHT_SHAPE[0]))
    )
    product = F.linear(whole_x, whole_weight)
    wanted = torch.autograd.grad(product + bias, (whole_x, whole_weight, bias), grad)
    given = [
        cut(tensor.detach(), place, RANKS)
        for tensor, (place,) in ((whole_x, plan.x), (whole_weight, plan.weight), (grad, plan.grad_y))
    ]
    assert _agrees(product, [F.linear(a, b) for a, b, _ in zip(*given, strict=True)], plan.product[0])
    rows = [(a.flatten(0, -2), b, g.flatten(0, -2)) for a, b, g in zip(*given, strict=True)]
    assert _agrees(
        wanted[0], [(g @ b).view(a.shape) for (_, b, g), a in zip(rows, given[0], strict=True)], plan.grad_x[0][0]
    )
    assert _agrees(wanted[1], [g.t() @ a for a, _, g in rows], plan.grad_weight[0][0])
    assert _agrees(wanted[2], [g.sum(0) for _, _, g in rows], plan.grad_bias[0])


@pytest.mark.parametrize(("x", "weight", "border"), [*itertools.product(X, WEIGHT, BORDERS)], ids=str)
def test_what_is_gathered_is_scattered_again(x: Placement, weight: Placement, border: Placement | None):
    if (plan := _plan(x, weight, border)) is None:
        return
    for came, (used,), (computed, handed_on) in ((x, plan.x, plan.grad_x), (weight, plan.weight, plan.grad_weight)):
        assert handed_on == (computed if used == came else (came,))
        assert used in (came, R)
    assert plan.y == ((border,) if border in (S(0), S(1)) else (R,)) if plan.product[0].is_partial() else plan.product


@pytest.mark.parametrize(
    ("x", "weight", "border", "used"),
    [
        pytest.param(S(2), S(0), None, (R, S(0)), id="input"),
        pytest.param(S(1), S(1), None, (S(1), R), id="weight"),
        pytest.param(S(1), S(0), None, (R, S(0)), id="input, rather than the weight"),
        pytest.param(S(1), S(0), S(1), (S(1), R), id="weight, as the border wants"),
    ],
)
def test_what_summa_gathers(x: Placement, weight: Placement, border: Placement | None, used: tuple[Placement, ...]):
    plan = _plan(x, weight, border)
    assert plan is not None
    assert (*plan.x, *plan.weight) == used


@pytest.mark.parametrize("shapes", [((8, 16), (16, 4)), ((4, 16), (16, 8))], ids=["long", "wide"])
@pytest.mark.parametrize(("left", "right"), [*itertools.product((S(0), S(1)), repeat=2)], ids=str)
def test_mm_of_split_operands_takes_the_lines_of_a_layer(left: Placement, right: Placement, shapes):
    (m, _), (_, n) = shapes
    metas = tuple(Meta(shape, torch.float64) for shape in (*shapes, (m, n)))
    rule = rule_of(torch.ops.aten.mm.default)
    call = Call(torch.ops.aten.mm.default, {}, ("self", "mat2"), metas[:2], metas[2:])
    chosen = choose(rule, call, ((left,), (right,)), (RANKS,))
    assert chosen is not None
    lines = products(left, S(1 - right.dim), 1)
    taken = [line.x for line in lines if ((line.x,), (line.y,)) == (chosen.inputs[0], chosen.outputs[0])]
    assert len(taken) == 1
    if len(lines) == 2:
        assert taken == [R if m < n else left]


@pytest.mark.parametrize(("left", "right"), [*itertools.product((S(0), S(1)), repeat=2)], ids=str)
def test_addmm_of_split_operands_takes_them_too(left: Placement, right: Placement):
    """The addend of a partial sum is added by one rank, and nothing is gathered for it."""
    op = torch.ops.aten.addmm.default
    metas = tuple(Meta(shape, torch.float64) for shape in ((4,), (8, 16), (16, 4), (8, 4)))
    names, placements = ("self", "mat1", "mat2"), ((R,), (left,), (right,))
    chosen = choose(rule_of(op), Call(op, {}, names, metas[:3], metas[3:]), placements, (RANKS,))
    assert chosen is not None and not chosen.gathered
    lines = products(left, S(1 - right.dim), 1)
    assert ((chosen.inputs[1], chosen.outputs[0])) in [((line.x,), (line.y,)) for line in lines]
