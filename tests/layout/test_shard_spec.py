"""What a rank holds under one layout is divided among ranks exactly as the finer layout says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib import Layout, MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import shard_spec
from shardlib.transforms import spread

MESH = MeshShape("dp=2,tp=2,fsdp=3")


@st.composite
def _cases(draw):
    sizes = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    layout = Layout.replicate(len(sizes))
    if draw(st.booleans()):
        layout = layout.with_axes(draw(st.integers(0, len(sizes) - 1)), ("tp",))
    finer = spread(layout, tuple(sizes), MESH, draw(st.sampled_from([("dp",), ("fsdp",), ("dp", "fsdp")])))
    return tuple(sizes), layout, finer


@given(_cases())
def test_parts_of_what_a_rank_holds_are_what_the_ranks_hold_under_the_finer_layout(case):
    shape, src, dst = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    added = [axis for axis in MESH.names if axis in dst.axes - src.axes]
    for ranks in MESH.groups(added):
        place = MESH.coordinate(ranks[0])
        local = src.take(whole, MESH, place).contiguous()
        division = shard_spec(src, dst, shape, MESH, place)
        if division is None:
            assert all(torch.equal(dst.take(whole, MESH, MESH.coordinate(r)), local) for r in ranks)
            continue
        assert division.shape == tuple(local.shape)
        back = torch.full_like(local, -1)
        for index, rank in enumerate(ranks):
            part = division.take(local, index)
            assert torch.equal(part, dst.take(whole, MESH, MESH.coordinate(rank)))
            assert tuple(part.shape) == division.shard_shape(index) and part.numel() == division.numels[index]
            division.put(back, index, part)
        assert torch.equal(back, local)
        if division.in_runs:
            runs = [local.view(-1)[s : s + n] for s, n in zip(division.starts, division.numels, strict=True)]
            parts = [division.take(local, index).reshape(-1) for index in range(len(ranks))]
            assert all(map(torch.equal, runs, parts))


def test_a_fused_dim_is_divided_inside_of_each_factor():
    src, dst = (Layout.parse(f"(qkv=3 heads=4@{axes} head=2)") for axes in ("tp", "(tp,dp)"))
    division = shard_spec(src, dst, (24,), MESH, MESH.coordinate(0))
    assert division is not None and not division.in_runs and division.even
    assert division.parts == (
        (slice(0, 2), slice(4, 6), slice(8, 10)),
        (slice(2, 4), slice(6, 8), slice(10, 12)),
    )
    assert (division.dim, division.shard_shape(1), division.numels) == (0, (6,), (6, 6))
    local, back = torch.arange(12), torch.zeros(12, dtype=torch.int64)
    for rank in (0, 1):
        assert division.take(local, rank).tolist() == [n for n in range(12) if n // 2 % 2 == rank]
        division.put(back, rank, division.take(local, rank))
    assert torch.equal(back, local)


def test_uneven_parts_of_the_first_dim_are_runs_of_memory_and_others_are_none():
    rows = shard_spec(Layout.parse("a b"), Layout.parse("a@fsdp b"), (7, 2), MESH, MESH.coordinate(0))
    assert rows is not None and rows.in_runs and not rows.even
    assert (rows.numels, rows.starts) == ((6, 6, 2), (0, 6, 12))
    columns = shard_spec(Layout.parse("a b"), Layout.parse("a b@fsdp"), (2, 6), MESH, MESH.coordinate(0))
    assert columns is not None and not columns.in_runs and columns.even
    flat = shard_spec(Layout.parse("a b"), Layout.parse("a b@fsdp"), (1, 6), MESH, MESH.coordinate(0))
    assert flat is not None and flat.in_runs
    few = shard_spec(Layout.parse("a"), Layout.parse("a@fsdp"), (2,), MESH, MESH.coordinate(0))
    assert few is not None and few.numels == (1, 1, 0) and few.parts[2] == (slice(2, 2),)
    assert shard_spec(Layout.parse("a"), Layout.parse("a@cp"), (4,), "dp=2,cp=1", {"dp": 0, "cp": 0}) is None


def test_axes_that_are_not_innermost_are_refused():
    with pytest.raises(LayoutError, match="innermost"):
        shard_spec(Layout.parse("a@tp"), Layout.parse("a@(dp,tp)"), (8,), MESH, MESH.coordinate(3))


def test_axes_that_split_two_dims_are_refused():
    with pytest.raises(LayoutError, match="2 dims"):
        shard_spec(Layout.parse("a b"), Layout.parse("a@dp b@fsdp"), (6, 6), MESH, MESH.coordinate(0))
