"""Simulate on one process that the steps of `transition` lead from one layout to the other, for the bytes it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Collective, Layout
from shardlib.testing import simulate
from shardlib.testing.simulate import carry_out, cut, whole

AXES = ("tp", "dp", "cp")
OPS = ("sum", "avg", "max", "min")


def numbered(size: tuple[int, ...]) -> torch.Tensor:
    """Whole numbers, so that sums of unlike parts are exact."""
    return torch.arange(1.0, 1 + math.prod(size), dtype=torch.float64).reshape(size)


@st.composite
def pairs(draw: st.DrawFn, partial: bool = True) -> tuple[MeshShape, tuple[int, ...], Layout, Layout]:
    """A mesh, a tensor, two layouts of it: plain and uneven dims, axes in any order, partial axes of any kind.

    They shrink towards one axis of one rank that splits nothing.
    """
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 3))]
    mesh = MeshShape({name: draw(st.integers(1, 3)) for name in names})
    size = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)))
    return mesh, size, draw(layouts(mesh, len(size), partial)), draw(layouts(mesh, len(size), partial))


@st.composite
def layouts(draw: st.DrawFn, mesh: MeshShape, ndim: int, partial: bool) -> Layout:
    held: list[list[str]] = [[] for _ in range(ndim)]
    partials, ops = [], draw(st.sampled_from((("sum", "avg"), ("max",), ("min",))))
    for axis in draw(st.permutations(mesh.names)):
        at = draw(st.integers(-1 if partial else 0, ndim))
        if at > 0:
            held[at - 1].append(axis)
        elif at < 0:
            partials.append(f"{draw(st.sampled_from(ops))}@{axis}")
    dims = [f"d{i}@({','.join(axes)})" if axes else f"d{i}" for i, axes in enumerate(held)]
    return Layout.parse(" ".join(dims) + "".join(f" + {p}" for p in partials))


@given(pairs())
def test_whole_undoes_cut(drawn):
    mesh, size, layout, _ = drawn
    assert torch.equal(whole(cut(numbered(size), layout, mesh), layout, size, mesh), numbered(size))


@given(pairs())
def test_what_transition_lists_leads_from_one_layout_to_the_other(drawn):
    """`carry_out` also compares the bytes of every step with the price."""
    mesh, size, src, dst = drawn
    moved = carry_out(cut(numbered(size), src, mesh), src, dst, size, mesh)
    assert torch.equal(whole(moved, dst, size, mesh), numbered(size))


@pytest.mark.parametrize(
    ("src", "dst", "mesh"),
    [
        ("(3 a=4@tp) b", "a@tp b", "tp=2"),
        ("(3 a=4@tp) b", "(3 a=4@(tp,dp)) b", "dp=2,tp=2"),
        ("(3 a=4@tp) b + sum@dp", "(3 a=4@(tp,dp)) b", "dp=2,tp=2"),
        ("a@(tp,dp) b", "a@(dp,tp) b", "dp=2,tp=3"),
        ("a b + sum@(dp,tp)", "a@tp b", "dp=2,tp=2"),
    ],
)
def test_fused_dims_and_orders_of_axes(src: str, dst: str, mesh: str):
    here, there = Layout.parse(src), Layout.parse(dst)
    moved = carry_out(cut(numbered((12, 4)), here, mesh), here, there, (12, 4), mesh)
    assert torch.equal(whole(moved, there, (12, 4), mesh), numbered((12, 4)))


@pytest.mark.parametrize("op", OPS)
def test_partial_shards_are_unlike(op: str):
    shards = cut(numbered((4,)), Layout.parse(f"a + {op}@tp"), "tp=3")
    assert len({tuple(shard.tolist()) for shard in shards}) == 3


def test_replicas_that_disagree_are_found():
    shards = cut(numbered((4,)), Layout.parse("a@tp"), "dp=2,tp=2")
    shards[2] = shards[2] + 1
    with pytest.raises(LayoutError, match="rank 0 holds other values than a rank that holds the same elements"):
        whole(shards, Layout.parse("a@tp"), (4,), "dp=2,tp=2")


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ([], "rank 0 does not get all that it needs"),
        ([Collective("all_gather", ("tp",), 15)], r"all_gather\(tp\): 15 bytes sends 16 bytes a rank"),
        ([Collective("all_gather", ("dp",), 0)], "rank 0 does not get all that it needs"),
    ],
)
def test_collectives_that_do_not_lead_there_are_found(monkeypatch: pytest.MonkeyPatch, listed: list, problem: str):
    src, dst = Layout.parse("a@tp"), Layout.parse("a")
    monkeypatch.setattr(simulate, "transition", lambda *_: tuple(listed))
    with pytest.raises(LayoutError, match=problem):
        carry_out(cut(numbered((4,)), src, "dp=2,tp=2"), src, dst, (4,), "dp=2,tp=2")


def test_an_unknown_reduction_is_named():
    with pytest.raises(LayoutError, match='"product" cannot be simulated; known are sum, avg, max, min'):
        cut(numbered((2,)), Layout.parse("a + product@tp"), "tp=2")


def test_a_mixture_without_an_order_is_refused():
    with pytest.raises(LayoutError, match="mixes max and sum, whose order changes the value"):
        cut(numbered((2,)), Layout.parse("a + sum@tp + max@dp"), "dp=2,tp=2")
