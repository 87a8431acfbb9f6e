"""Operands of ops: local tensors lie in memory in the order of the whole tensor's dims; what is decided is bounded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, distribute_tensor

import shardlib as sl
from shardlib.engine import ops
from shardlib.engine.ops import _dispatch
from shardlib.engine.ops._operands import in_order


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
    monkeypatch.setattr(_dispatch, "_MOST_DECISIONS", 3)
    mesh = sl.mesh("tp=1")
    ops.enable(mesh)
    for size in range(1, 9):
        rows = distribute_tensor(torch.ones(size, 2), mesh, [Replicate()])
        assert (rows + rows).full_tensor().equal(torch.full((size, 2), 2.0))
        assert 0 < len(_dispatch._DECISIONS) <= 3
