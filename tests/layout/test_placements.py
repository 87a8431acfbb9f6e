"""Layouts and DTensor placements say the same, in both directions, or refuse with a reason."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Layout
from tests.layout.cases import Case, cases, meshes, thorough


def strided(split_factor: int) -> Placement:
    return _StridedShard(0, split_factor=split_factor)


@pytest.mark.parametrize(
    ("text", "mesh", "expected"),
    [
        ("vocab@tp embed", "dp=2,tp=4", (Replicate(), Shard(0))),
        ("batch@dp seq embed@tp", "dp=2,tp=4", (Shard(0), Shard(2))),
        ("embed@(fsdp,tp)", "fsdp=2,tp=4", (Shard(0), Shard(0))),
        ("embed@(tp,fsdp)", "fsdp=2,tp=4", (strided(4), Shard(0))),
        ("embed@(cp,tp,dp)", "dp=2,tp=3,cp=4", (strided(12), strided(4), Shard(0))),
        ("(3 heads=8@tp head) embed", "dp=2,tp=4", (Replicate(), strided(3))),
        ("(heads=8@tp head) embed", "tp=4", (Shard(0),)),
        ("(3 heads=8@(fsdp,tp) head)", "fsdp=2,tp=4", (strided(3), strided(3))),
        ("(3 heads=8@(tp,fsdp) head)", "fsdp=2,tp=4", (strided(12), strided(3))),
        ("(heads=8@tp head@fsdp)", "fsdp=2,tp=4", (strided(8), Shard(0))),
        ("(3 heads=3@tp head)", "dp=2,tp=1", (Replicate(), Replicate())),
        ("batch embed + sum@tp", "dp=2,tp=4", (Replicate(), Partial("sum"))),
        ("batch embed + avg@(dp,tp)", "dp=2,tp=4", (Partial("avg"), Partial("avg"))),
        ("", "tp=2", (Replicate(),)),
    ],
)
def test_known_placements(text: str, mesh: str, expected: tuple[Placement, ...]):
    assert Layout.parse(text).placements(mesh) == expected


def test_the_ellipsis_takes_the_number_of_dims():
    assert Layout.parse("... ff@tp").placements("tp=2", ndim=3) == (Shard(2),)


@thorough
@given(cases(partial=True))
def test_placements_to_layout_and_back_is_the_identity(case: Case):
    placements = case.layout.placements(case.mesh)
    back = Layout.from_placements(placements, case.mesh, ndim=len(case.global_shape))
    assert back.placements(case.mesh) == placements
    whole = Layout.from_placements(placements, case.mesh, global_shape=case.global_shape)
    for place in case.coordinates:
        expected = case.layout.local_slices(case.global_shape, case.mesh, place)
        assert whole.local_slices(case.global_shape, case.mesh, place) == expected


@st.composite
def any_placements(draw: st.DrawFn) -> tuple[MeshShape, list[Placement]]:
    """Anything one may write down for a vector, whether or not it makes sense."""
    mesh = draw(meshes())
    kinds = st.one_of(
        st.just(Replicate()), st.just(Shard(0)), st.integers(1, 8).map(lambda f: _StridedShard(0, split_factor=f))
    )
    return mesh, [draw(kinds) for _ in mesh]


@thorough
@given(any_placements())
def test_any_placements_are_a_layout_of_the_same_shards_or_refused(given_: tuple[MeshShape, list[Placement]]):
    mesh, placements = given_
    size = math.lcm(*range(1, 9)) * mesh.world_size
    try:
        layout = Layout.from_placements(placements, mesh, global_shape=(size,))
    except LayoutError as error:
        assert "does not fall on a boundary of the shards before it" in str(error)
        return
    for rank in range(mesh.world_size):
        place = mesh.coordinate(rank)
        expected = torch.arange(size)
        for (axis, n), placement in zip(mesh.items(), placements, strict=True):
            if not isinstance(placement, Replicate):
                expected = placement._split_tensor(expected, n, with_padding=False)[0][place[axis]]
        assert torch.equal(layout.take(torch.arange(size), mesh, place), expected)


@pytest.mark.parametrize(
    ("placements", "mesh", "text"),
    [
        # What fully_shard writes for a dim that tp splits already.
        ((_StridedShard(0, split_factor=4), Shard(0)), "dp=2,tp=4", "_@(tp,dp)"),
        ((_StridedShard(0, split_factor=3),), "tp=2", "(3 _@tp)"),
        ((_StridedShard(0, split_factor=8), Shard(0)), "dp=2,tp=4", "(_=8@tp _@dp)"),
        ((Shard(0), _StridedShard(0, split_factor=2)), "dp=2,tp=4", "(_=4@dp _@tp)"),
        ((Shard(0), Shard(0)), "dp=1,tp=4", "_@tp"),
        ((Shard(-1), _StridedShard(-1, split_factor=2)), "dp=2,tp=2", "(_=4@dp _@tp)"),
        ((Partial("avg"), Replicate()), "dp=2,tp=4", "_ + avg@dp"),
        ((Partial("sum"), Replicate()), "dp=1,tp=4", "_"),
    ],
)
def test_known_layouts_of_placements(placements: tuple[Placement, ...], mesh: str, text: str):
    assert Layout.from_placements(placements, mesh, ndim=1) == Layout.parse(text)


def test_names_and_sizes_are_taken_over():
    layout = Layout.from_placements(
        [_StridedShard(0, split_factor=3)], "tp=2", global_shape=(12, 5), dim_names=["qkv", "embed"]
    )
    assert layout == Layout.parse("(3 qkv=4@tp) embed")


@pytest.mark.parametrize(
    ("placements", "kwargs", "message"),
    [
        (
            (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)),
            {"ndim": 1},
            'Placements (_StridedShard(dim=0, sf=2), _StridedShard(dim=0, sf=3)) on mesh "dp=2,tp=2" for a tensor of 1 '
            'dims: axis "tp" (split factor 3) does not fall on a boundary of the shards before it. '
            "Redistribute the tensor to plain Shard or Replicate placements first.",
        ),
        (
            (Shard(0),),
            {"ndim": 1},
            'Placements (Shard(dim=0),) on mesh "dp=2,tp=2" for a tensor of 1 dims: 1 placements were given for 2 '
            "axes. Give one placement per mesh axis.",
        ),
        (
            (Shard(0), Shard(2)),
            {"ndim": 2},
            'Placements (Shard(dim=0), Shard(dim=2)) on mesh "dp=2,tp=2" for a tensor of 2 dims: dim 2 on axis "tp" is '
            "out of range. Name one of the dims that the tensor has.",
        ),
        (
            (Replicate(), _MaskPartial()),
            {"ndim": 2},
            "Placements (Replicate(), _MaskPartial(reduce_op=sum, offset_shape=None, offset_dim=0)) on mesh "
            '"dp=2,tp=2" '
            'for a tensor of 2 dims: _MaskPartial(reduce_op=sum, offset_shape=None, offset_dim=0) on axis "tp" is '
            "not a Shard, _StridedShard, Replicate or Partial. Redistribute the tensor to one of these first.",
        ),
        (
            (Replicate(), Replicate()),
            {"ndim": 1, "dim_names": ["a", "b"]},
            "The number of dims was given as ndim=1, global_shape=None, dim_names=['a', 'b']. Give at least one of "
            "them, and let them agree.",
        ),
    ],
)
def test_what_is_no_layout_is_refused(placements: tuple[Placement, ...], kwargs: dict, message: str):
    with pytest.raises(LayoutError) as caught:
        Layout.from_placements(placements, "dp=2,tp=2", **kwargs)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "embed@fsdp",
            'Layout "embed@fsdp" on mesh "dp=2,tp=4": axis "fsdp" is not on the mesh, which has "dp", "tp". Use one of '
            'these, or add the axis to the mesh. Did you mean "dp"?',
        ),
        (
            "... ff@tp",
            'Layout "... ff@tp" on mesh "dp=2,tp=4": "..." leaves the number of dims open. Pass ndim=, or call '
            "with_ndim first.",
        ),
        (
            "(kv@tp? head)",
            'Layout "(kv@tp? head)" on mesh "dp=2,tp=4": whether "kv" is sharded is still open ("?"). Call '
            "layout.resolve(global_shape, mesh) first; it needs the size of the dim.",
        ),
        (
            "(qkv heads=8 head@tp)",
            'Layout "(qkv heads head@tp)" on mesh "dp=2,tp=4": the size of "qkv" in dim "qkv heads head" is not known, '
            'and "head" is sharded inside it. Give it, as in sizes={"qkv": 3}, or call layout.resolve(global_shape, '
            "mesh) first.",
        ),
        (
            "(3 heads=6@tp head)",
            'Layout "(3 heads@tp head)" on mesh "dp=2,tp=4": factor "heads" of size 6 does not divide over tp=4. '
            "Factors "
            'of a fused dim must divide: use axes whose sizes divide 6, or write "heads@tp?" to shard it only where it '
            "divides.",
        ),
    ],
)
def test_what_has_no_placements_is_refused(text: str, message: str):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text).placements("dp=2,tp=4")
    assert str(caught.value) == message
