"""Operands of ops: local tensors lie in memory in the order of the whole tensor's dims; what is decided is bounded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, distribute_tensor

import shardlib as sl
from shardlib.engine import ops
from shardlib.engine._torch import local_of, spec, wrap
from shardlib.engine.ops import _dispatch
from shardlib.engine.ops._operands import in_order
from shardlib.testing.simulate import cut


def _lying(shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """A new tensor whose dims follow each other in memory in this order."""
    back = sorted(range(len(order)), key=list(order).__getitem__)
    return torch.arange(torch.Size(shape).numel()).view([shape[dim] for dim in order]).permute(back)


@given(st.data())
def test_a_part_lies_as_the_whole_does(data: st.DataObject):
    """With the strides of a new tensor, of dims with one element or none too."""
    shape = data.draw(st.lists(st.integers(2, 3), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    stored = data.draw(st.permutations(range(len(shape))))
    cuts = [slice(data.draw(st.integers(0, size)), data.draw(st.integers(0, size))) for size in shape]
    whole, part = _lying(shape, order), _lying(shape, stored)[tuple(cuts)]
    found = in_order(part, whole.stride())
    assert torch.equal(found, part) and found.stride() == _lying(part.shape, order).stride()
    assert in_order(found, whole.stride()) is found


def test_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch):
    """A run whose batches all have other shapes keeps no more of them than that."""
    monkeypatch.setattr(_dispatch, "_MOST", 3)
    mesh = sl.mesh("tp=1")
    ops.enable(mesh)
    for size in range(1, 9):
        rows = distribute_tensor(torch.ones(size, 2), mesh, [Replicate()])
        assert (rows + rows).full_tensor().equal(torch.full((size, 2), 2.0))
        assert 0 < len(_dispatch._DECISIONS) <= 3


_DATA_INSIDE, _FUSED = "rows@(tp,dp) _", "(qkv rows@(tp,dp)) _"


def _two_axes_of_one_dim(size: int, text: str) -> list[str]:
    """Return what differs from the full tensor in a DTensor that two axes split along one dim."""
    mesh, layout = sl.mesh("dp=2,tp=2"), sl.Layout.parse(text, sizes={"qkv": 3} if "qkv" in text else None)
    ops.enable(mesh)
    full = torch.arange(2.0 * size).view(size, 2)
    local = cut(full, layout, "dp=2,tp=2")[torch.distributed.get_rank()]

    def new() -> torch.Tensor:
        placements = tuple(layout.placements("dp=2,tp=2"))
        return wrap(local.clone(), spec(mesh, placements, full.shape, full.dtype))

    wrong, x = [], new()
    with ops.record() as gathered:
        doubled = x * 2 + x
    if gathered or not local_of(doubled).equal(local * 3):
        wrong.append(f"x * 2 + x: {gathered}")
    if not x.full_tensor().equal(full):
        wrong.append("full_tensor()")
    if not x.redistribute(placements=[Replicate()] * 2).redistribute(placements=x.placements).to_local().equal(local):
        wrong.append("there and back")
    for a in range(size):
        for b in range(a + 1, size + 1):
            if not x[a:b].full_tensor().equal(full[a:b]):
                wrong.append(f"x[{a}:{b}]")
    for write in (lambda y: y[1:4].zero_(), lambda y: y[-1].mul_(3), lambda y: y.view(-1)[:4].add_(1)):
        ours, theirs = new(), full.clone()
        write(ours)
        write(theirs)
        if not ours.full_tensor().equal(theirs):
            wrong.append(f"write {write.__code__.co_consts}")
    return wrong


@pytest.mark.parametrize(
    ("size", "text"),
    [*itertools.product((5, 7, 8, 10), (_DATA_INSIDE, "rows@(dp,tp) _")), (12, _FUSED)],
)
def test_two_axes_may_split_one_dim_unevenly(ranks: Callable, size: int, text: str):
    """As data axes split the rows that a model axis has left. A slice counts global rows on each axis."""
    assert ranks(4).run(_two_axes_of_one_dim, size, text) == [[]] * 4
