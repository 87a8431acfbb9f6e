"""Who holds what: the shards of all ranks make the tensor, and they are the shards that DTensor makes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from shardlib import MeshShape
from shardlib.errors import LayoutError
from shardlib.layout import Layout
from shardlib.testing import Ranks
from tests.layout.cases import Case, cases, plain_layouts, thorough


def numbered(global_shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(global_shape)).reshape(global_shape)


@thorough
@given(cases())
def test_gather_after_shard_is_the_identity(case: Case):
    full = numbered(case.global_shape)
    shards = [case.layout.take(full, case.mesh, place) for place in case.coordinates]
    assert torch.equal(case.layout.put(shards, case.global_shape, case.mesh), full)


@thorough
@given(cases())
def test_ranks_that_differ_on_a_splitting_axis_share_nothing(case: Case):
    full = numbered(case.global_shape)
    held = [case.layout.take(full, case.mesh, place).flatten() for place in case.coordinates]
    copies = math.prod(n for axis, n in case.mesh.items() if axis not in case.layout.axes)
    assert torch.equal(torch.cat(held).sort().values, full.flatten().repeat_interleave(copies))


@thorough
@given(cases())
def test_each_replica_has_every_element_once(case: Case):
    full = numbered(case.global_shape)
    held: dict[int, list[torch.Tensor]] = {}
    for place in case.coordinates:
        shard = case.layout.take(full, case.mesh, place).flatten()
        held.setdefault(case.layout.replica_id(case.mesh, place), []).append(shard)
    copies = math.prod(n for axis, n in case.mesh.items() if axis not in case.layout.axes)
    assert sorted(held) == list(range(copies))
    for shards in held.values():
        assert torch.equal(torch.cat(shards).sort().values, full.flatten())


@thorough
@given(cases())
def test_slices_shapes_and_bytes_agree(case: Case):
    shapes = [case.layout.local_shape(case.global_shape, case.mesh, place) for place in case.coordinates]
    slices = [case.layout.local_slices(case.global_shape, case.mesh, place) for place in case.coordinates]
    assert shapes == [tuple(sum(part.stop - part.start for part in dim) for dim in parts) for parts in slices]
    counted = [
        case.layout.local_bytes(case.global_shape, torch.bfloat16, case.mesh, place) for place in case.coordinates
    ]
    assert counted == [2 * math.prod(shape) for shape in shapes]
    assert case.layout.local_bytes(case.global_shape, torch.bfloat16, case.mesh) == max(counted)
    assert case.is_even() or len(set(shapes)) > 1


@thorough
@given(cases())
def test_an_axis_of_size_one_changes_nothing(case: Case):
    single = [axis for axis, n in case.mesh.items() if n == 1]
    without = case.layout.with_axes_dropped(single)
    for place in case.coordinates:
        assert case.layout.local_slices(case.global_shape, case.mesh, place) == without.local_slices(
            case.global_shape, case.mesh, place
        )
    resolved = case.layout.resolve(case.global_shape, case.mesh)
    assert resolved.placements(case.mesh) == without.resolve(case.global_shape, case.mesh).placements(case.mesh)


def split_as_dtensor(case: Case, full: torch.Tensor, place: dict[str, int]) -> torch.Tensor:
    """What `distribute_tensor` does on one rank: each placement splits, in mesh order, what is there so far."""
    for (axis, n), placement in zip(case.mesh.items(), case.layout.placements(case.mesh), strict=True):
        if not isinstance(placement, Replicate):
            shards, _ = placement._split_tensor(full, n, with_padding=False)
            full = shards[place[axis]]
    return full


@thorough
@given(cases())
def test_dtensor_splits_a_tensor_into_the_same_shards(case: Case):
    # On the rest distribute_tensor and redistribute differ; see the test on real ranks.
    assume(case.is_even() or case.in_mesh_order())
    full = numbered(case.global_shape)
    for place in case.coordinates:
        assert torch.equal(case.layout.take(full, case.mesh, place), split_as_dtensor(case, full, place))


@thorough
@given(cases())
def test_dtensor_computes_the_same_local_shape_and_offset(case: Case):
    assume(case.is_even() or case.in_mesh_order())
    for place in case.coordinates:
        shape, offset = _compute_local_shape_and_global_offset(
            case.global_shape, case.mesh.sizes, list(place.values()), case.layout.placements(case.mesh)
        )
        assert case.layout.local_shape(case.global_shape, case.mesh, place) == shape
        starts = [dim[0].start for dim in case.layout.local_slices(case.global_shape, case.mesh, place)]
        assert [at for at, n in zip(starts, shape, strict=True) if n] == [
            at for at, n in zip(offset, shape, strict=True) if n
        ]


def shards_of_dtensor(texts: list[str], global_shape: tuple[int, ...], spec: str) -> list[tuple[bool, ...]]:
    """On one rank, for each layout: are the shards of DTensor ours, and does it gather them back?"""
    shape = MeshShape(spec)
    mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    full = numbered(global_shape).double()
    place = dict(zip(shape.names, mesh.get_coordinate(), strict=True))
    found = []
    for text in texts:
        layout = Layout.parse(text)
        sharded = distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).redistribute(
            mesh, layout.placements(shape)
        )
        mine = layout.take(full, shape, place)
        found.append((torch.equal(sharded.to_local(), mine), torch.equal(sharded.full_tensor(), full)))
    return found


@pytest.mark.parametrize("global_shape", [(6, 5), (8, 4)])  # 6 in four as halves of halves: 2, 1, 2, 1; 5: 2, 1, 1, 1
def test_dtensor_on_real_ranks_has_the_same_shards(global_shape: tuple[int, ...], ranks: Callable[[int], Ranks]):
    texts = [layout.text for layout in plain_layouts(("dp", "tp"), 2)]
    assert len(texts) == 11
    for rank, found in enumerate(ranks(4).run(shards_of_dtensor, texts, global_shape, "dp=2,tp=2")):
        assert dict(zip(texts, found, strict=True)) == dict.fromkeys(texts, (True, True)), f"rank {rank}"


def test_nested_uneven_splits_are_chunks_of_chunks():
    layout = Layout.parse("x@(dp,tp)")
    shapes = [layout.local_shape((6,), "dp=2,tp=2", MeshShape("dp=2,tp=2").coordinate(r)) for r in range(4)]
    assert shapes == [(2,), (1,), (2,), (1,)]


def test_the_outer_axis_cuts_first_even_where_the_mesh_has_it_later():
    layout, mesh = Layout.parse("x@(tp,dp)"), MeshShape("dp=3,tp=2")
    held = [layout.take(torch.arange(7), mesh, mesh.coordinate(rank)).tolist() for rank in range(6)]
    assert held == [[0, 1], [4], [2, 3], [5], [], [6]]


def test_several_factors_of_a_fused_dim_are_split_by_different_axes():
    layout = Layout.parse("(2 heads@tp head@dp)", sizes={"heads": 2})
    held = [layout.take(torch.arange(16), "tp=2,dp=2", {"tp": t, "dp": d}).tolist() for t in (0, 1) for d in (0, 1)]
    assert held == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_a_scalar_is_held_by_every_rank():
    scalar = torch.tensor(3.0)
    assert Layout.parse("").take(scalar, "tp=2", {"tp": 1}) == 3
    assert torch.equal(Layout.parse("").put([scalar, scalar], (), "tp=2"), scalar)


def test_bytes_are_counted_in_the_dtype_that_the_layout_fixes():
    assert Layout.parse("x@tp : bfloat16").local_bytes((10,), torch.float32, "tp=4") == 6


def test_take_of_plain_dims_is_a_view():
    full = torch.zeros(8, 4)
    Layout.parse("a@tp b").take(full, "tp=2", {"tp": 1}).fill_(1)
    assert full.sum() == 16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Layout.parse("a@tp b").local_shape((4, 4), "dp=2,tp=4", {"dp": 0}),
            'Layout "a@tp b" on mesh "dp=2,tp=4": coordinate {\'dp\': 0} gives no index on axis "tp". Give an index '
            "from 0 to 3, as MeshShape.coordinate(rank) does for every axis.",
        ),
        (
            lambda: Layout.parse("a@tp").put([torch.zeros(2)], (4,), "tp=2"),
            'Layout "a@tp" for a tensor of global shape (4,) on mesh "tp=2": shards of 1 ranks were given, the mesh '
            "has 2. Give one per rank, in rank order.",
        ),
        (
            lambda: Layout.parse("a@tp").put([torch.zeros(2), torch.zeros(3)], (4,), "tp=2"),
            'Layout "a@tp" for a tensor of global shape (4,) on mesh "tp=2": the shard of rank 1 has shape (3,), '
            "expected (2,). Give local tensors without padding, in rank order.",
        ),
        (
            lambda: Layout.parse("a + sum@tp").put([torch.zeros(4)] * 2, (4,), "tp=2"),
            'Layout "a + sum@tp" for a tensor of global shape (4,) on mesh "tp=2": partial values cannot be joined '
            "into one tensor. Reduce them first.",
        ),
    ],
)
def test_what_cannot_be_cut_or_put_together_is_refused(call: Callable[[], object], message: str):
    with pytest.raises(LayoutError) as caught:
        call()
    assert str(caught.value) == message
