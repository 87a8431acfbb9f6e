"""Which dim data axes split: laws over drawn layouts, and each step of the choice."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from shardlib._mesh_shape import MeshShape
from shardlib.layout import Dim, Layout
from shardlib.testing import strategies
from shardlib.transforms import spread

AXES = (("tp", [1, 2]), ("dp", [2, 3]), ("fsdp", [2]))
Case = tuple[Layout, tuple[int, ...], MeshShape, tuple[str, ...]]


@st.composite
def cases(draw: Any) -> Case:
    """A layout on some axes of a mesh, and the data axes that it may not name."""
    mesh = MeshShape({name: draw(st.sampled_from(sizes)) for name, sizes in draw(st.permutations(AXES))})
    added = draw(st.sampled_from([("dp",), ("dp",), ("dp", "fsdp"), ("fsdp", "dp")]))
    shape = draw(strategies.shapes(mesh))
    held = [axis for axis in mesh if axis not in added]
    layout = draw(strategies.layouts(shape, mesh, axes=held)).resolve(shape, mesh)
    return layout, shape, mesh, added


def _numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def _pieces(layout: Layout, shape: tuple[int, ...], mesh: MeshShape) -> list[torch.Tensor]:
    return [layout.take(_numbers(shape), mesh, mesh.coordinate(rank)) for rank in range(mesh.world_size)]


@given(cases())
def test_a_piece_lies_inside_the_piece_that_its_rank_held(case: Case):
    layout, shape, mesh, axes = case
    parted = spread(layout, shape, mesh, axes)
    event("split" if parted != layout else "left whole")
    for before, after in zip(_pieces(layout, shape, mesh), _pieces(parted, shape, mesh), strict=True):
        assert set(after.flatten().tolist()) <= set(before.flatten().tolist())


@given(cases())
def test_pieces_joined_are_the_whole(case: Case):
    layout, shape, mesh, axes = case
    parted = spread(layout, shape, mesh, axes)
    assert torch.equal(parted.put(_pieces(parted, shape, mesh), shape, mesh), _numbers(shape))


@given(cases())
def test_pieces_of_ranks_that_held_the_same_are_apart(case: Case):
    layout, shape, mesh, axes = case
    parted = spread(layout, shape, mesh, axes)
    assume(parted != layout)
    for group in mesh.groups(axes):
        found = [number for rank in group for number in _pieces(parted, shape, mesh)[rank].flatten().tolist()]
        assert len(found) == len(set(found))


@given(cases())
def test_all_of_the_axes_stand_innermost_on_one_dim_or_none_does(case: Case):
    layout, shape, mesh, axes = case
    parted = spread(layout, shape, mesh, axes)
    assert parted.with_axes_dropped(axes) == layout
    gained = [(new.axes, old.axes) for new, old in _factors(parted, layout) if new.axes != old.axes]
    assert gained in ([], [((*gained[0][1], *axes), gained[0][1])] if gained else [])


def _factors(new: Layout, old: Layout) -> list[tuple[Any, Any]]:
    dims = [(a, b) for a, b in zip(new.dims, old.dims, strict=True) if isinstance(a, Dim) and isinstance(b, Dim)]
    return [pair for a, b in dims for pair in zip(a.factors, b.factors, strict=True)]


@given(cases())
def test_pieces_are_even_wherever_they_can_be_but_for_a_little_of_the_first_dim(case: Case):
    layout, shape, mesh, axes = case
    assume(axes and 0 not in shape and not layout.uneven_dims(shape, mesh))
    parted = spread(layout, shape, mesh, axes)
    if not any(_even_at(layout, shape, mesh, axes, dim) for dim in range(len(shape))):
        return
    event("an even choice exists")
    first = next((dim for dim in range(len(shape)) if any(a in mesh.data_axes for a in layout.axes_of(dim))), 0)
    uneven = parted.uneven_dims(shape, mesh)
    assert parted != layout
    assert uneven in ((), (first,))
    if uneven:
        pieces = math.prod(mesh[axis] for axis in axes)
        held = layout.local_shape(shape, mesh, dict.fromkeys(mesh.names, 0))[first]
        assert 1 - Fraction(held, pieces * -(-held // pieces)) < Fraction(1, 16)


def _even_at(layout: Layout, shape: tuple[int, ...], mesh: MeshShape, axes: tuple[str, ...], dim: int) -> bool:
    """Whether the axes divide a dim: a plain one as it is; one factor of a fused one that nothing splits yet, for one
    axis."""
    entry = layout.dims[dim]
    assert isinstance(entry, Dim)
    pieces = math.prod(mesh[axis] for axis in axes)
    if not entry.fused:
        return shape[dim] % (math.prod(mesh[axis] for axis in entry.axes) * pieces) == 0
    free = all(mesh[axis] == 1 for axis in entry.axes) and sum(mesh[axis] > 1 for axis in axes) == 1
    return free and any((factor.size or 0) % pieces == 0 for factor in entry.factors)


@given(cases())
def test_nothing_but_axes_that_split_changes(case: Case):
    layout, shape, mesh, axes = case
    kept = Layout(layout.dims, layout.partials, torch.bfloat16, "host")
    parted = spread(kept, shape, mesh, axes)
    assert (parted.dtype, parted.memory) == (torch.bfloat16, "host")


@pytest.mark.parametrize(
    ("text", "shape", "expected"),
    [
        ("vocab@tp embed", (512, 64), "vocab@(tp,dp) embed"),  # dim 0, even
        ("vocab embed", (1021, 64), "vocab@dp embed"),  # dim 0, less than 1/16 wasted
        ("few embed", (7, 64), "few embed@dp"),  # dim 1, even
        ("few embed", (5, 15), "few embed@dp"),  # none even, the largest
        ("few embed", (15, 5), "few@dp embed"),
        ("few less", (3, 2), "few less"),  # none has four
        ("few", (3,), "few"),
        ("", (), ""),
        ("none embed", (0, 8), "none embed"),
        ("(qkv heads@tp head) embed", (96, 64), "(qkv heads@tp head) embed@dp"),  # plain before fused
        ("(qkv heads@tp head)", (96,), "(qkv heads@tp head)"),  # a fused dim takes one axis
        ("(qkv heads head)", (96,), "(qkv heads head@dp)"),  # the last factor that divides
        ("(qkv heads head)", (24,), "(qkv heads@dp head)"),
        ("in@dp_shard out", (64, 64), "in@(dp_shard,dp) out"),
        ("in out@dp_shard", (64, 64), "in out@(dp_shard,dp)"),  # data axes gather on one dim
    ],
)
def test_each_step_of_the_choice(text: str, shape: tuple[int, ...], expected: str):
    sizes = {"qkv": 3, "heads": 8 if shape != (24,) else 4}
    layout = Layout.parse(text, sizes=sizes)
    assert str(spread(layout, shape, "dp=4,tp=2,dp_shard=2", ["dp"])) == expected
