"""Which boxes are whose: laws of shares, on imaginary ranks in one process, for any layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shardlib._mesh_shape import MeshShape
from shardlib.checkpoint._items import Item, RankMesh
from shardlib.checkpoint._share import file_groups, packed, sources, turns, written_by
from shardlib.layout import Layout
from shardlib.layout._boxes import Box, parts, tiles
from shardlib.testing import strategies

_MESHES = strategies.mesh_shapes(12, model_axes=("tp", "sp"))


@st.composite
def _drawn(draw: st.DrawFn) -> tuple[MeshShape, list[tuple[tuple[int, ...], Layout]]]:
    mesh = draw(_MESHES)
    shapes = draw(st.lists(st.just(()) | strategies.shapes(mesh), min_size=1, max_size=4))
    return mesh, [(shape, draw(strategies.layouts(shape, mesh))) for shape in shapes]


def _items(
    mesh: MeshShape, tensors: list[tuple[tuple[int, ...], Layout]], rank: int, ranks: tuple[int, ...]
) -> list[Item]:
    """What a rank holds of tensors whose elements are their own numbers."""
    rank_mesh, found = RankMesh(mesh, ranks), []
    for n, (shape, layout) in enumerate(tensors):
        layout = layout.resolve(shape, mesh)
        local = layout.take(_numbered(shape), mesh, rank_mesh.coordinate(rank)).clone()
        found.append(Item("model", f"t{n}", shape, torch.int64, layout, rank_mesh, local))
    return found


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def _order(draw: Any, mesh: MeshShape) -> tuple[int, ...]:
    return tuple(draw(st.permutations(range(mesh.world_size))))


@given(drawn=_drawn(), data=st.data())
def test_every_element_is_written_once_and_where_it_belongs(drawn: Any, data: st.DataObject):
    mesh, tensors = drawn
    ranks = _order(data.draw, mesh)
    written = [torch.full(shape, -1) for shape, _ in tensors]
    boxes: list[list[Box]] = [[] for _ in tensors]
    for rank in range(mesh.world_size):
        items = _items(mesh, tensors, rank, ranks)
        for n, (item, turn) in enumerate(zip(items, turns(items), strict=True)):
            for part in written_by(item, turn, rank):
                boxes[n].append(part.box)
                assert (written[n][part.box.slices] == -1).all(), "written twice"
                written[n][part.box.slices] = part.of(item.local)
    for (shape, _), values, held in zip(tensors, written, boxes, strict=True):
        assert torch.equal(values, _numbered(shape))
        assert tiles(held, shape) is None
        assert len(held) >= 1, "even an empty tensor is in the checkpoint"


@given(drawn=_drawn(), data=st.data())
def test_a_rank_that_gathers_a_tensor_gets_each_part_from_one_that_has_it(drawn: Any, data: st.DataObject):
    mesh, tensors = drawn
    ranks = _order(data.draw, mesh)
    held = {rank: _items(mesh, tensors, rank, ranks) for rank in range(mesh.world_size)}
    share = turns(held[0])
    target = data.draw(st.sampled_from(range(mesh.world_size)))
    for n, (shape, _) in enumerate(tensors):
        full = torch.full(shape, -1)
        for source in sources(held[0][n], share[n], target):
            assert (full[source.part.box.slices] == -1).all(), "gathered twice"
            full[source.part.box.slices] = held[source.rank][n].local[source.part.local.slices]
            if source.rank != target:  # else a background save would not have copied it
                assert written_by(held[source.rank][n], share[n], source.rank)
        assert torch.equal(full, _numbered(shape))


@given(drawn=_drawn())
def test_turns_are_alike_on_all_ranks_and_share_the_bytes_of_copies(drawn: Any):
    mesh, tensors = drawn
    world = range(mesh.world_size)
    everywhere = [turns(_items(mesh, tensors, rank, tuple(world))) for rank in world]
    assert everywhere.count(everywhere[0]) == mesh.world_size
    copied = [((16,), Layout.replicate(1))] * (2 * mesh.world_size)
    items = _items(mesh, copied, 0, tuple(world))
    loads = [sum(len(written_by(i, t, rank)) for i, t in zip(items, turns(items), strict=True)) for rank in world]
    assert loads == [2] * mesh.world_size


@given(drawn=_drawn())
@example(drawn=(MeshShape("tp=2"), [((12, 2), Layout.parse("(3 heads@tp head) e", sizes={"heads": 2}))]))
def test_parts_are_the_local_tensor(drawn: Any):
    mesh, tensors = drawn
    for rank in range(mesh.world_size):
        for item in _items(mesh, tensors, rank, tuple(range(mesh.world_size))):
            local = torch.full_like(item.local, -1)
            for part in item.parts(rank):
                local[part.local.slices] = _numbered(item.shape)[part.box.slices]
            assert torch.equal(local, item.local)


_BOXES = st.lists(
    st.builds(
        lambda at, size: Box(tuple(at), tuple(size)),
        st.lists(st.integers(0, 3), min_size=2, max_size=2),
        st.lists(st.integers(0, 3), min_size=2, max_size=2),
    ),
    max_size=5,
)


@given(boxes=_BOXES, shape=st.tuples(st.integers(1, 4), st.integers(1, 4)))
@example(boxes=[Box((0, 0), (1, 2)), Box((1, 0), (1, 2))], shape=(2, 2))
@example(boxes=[Box((0, 0), (2, 2)), Box((0, 0), (2, 2))], shape=(2, 2))
def test_what_tiles_accepts_covers_every_element_once(boxes: list[Box], shape: tuple[int, int]):
    count = torch.zeros(9, 9, dtype=torch.int64)
    for box in boxes:
        count[box.slices] += 1
    covered = count[: shape[0], : shape[1]].eq(1).all() and count.sum() == math.prod(shape)
    if tiles(boxes, shape) is None:
        assert covered


@given(drawn=_drawn())
def test_what_layouts_make_is_accepted_by_tiles(drawn: Any):
    mesh, tensors = drawn
    for shape, layout in tensors:
        boxes = {
            part.box
            for rank in range(mesh.world_size)
            for part in parts(layout.resolve(shape, mesh), shape, mesh, mesh.coordinate(rank))
        }
        assert tiles(list(boxes), shape) is None


@given(
    pieces=st.lists(st.tuples(st.sampled_from("abcd"), st.just(Box((0,), (1,))), st.integers(0, 9)), max_size=12),
    limit=st.integers(1, 12),
)
def test_no_file_has_a_name_twice_or_is_too_large_for_no_reason(pieces: list[tuple[str, Box, int]], limit: int):
    files: dict[int, list[tuple[str, Box, int]]] = {}
    for piece, at in zip(pieces, packed(pieces, limit), strict=True):
        files.setdefault(at, []).append(piece)
    assert sorted(files) == list(range(len(files)))
    for held in files.values():
        assert len({name for name, _, _ in held}) == len(held)
        assert sum(nbytes for *_, nbytes in held) <= limit or len(held) == 1


def test_whole_tensors_go_to_files_in_order_and_files_to_ranks_evenly():
    make: Callable[[int], Item] = lambda n: Item(  # noqa: E731
        "model", f"t{n}", (4,), torch.float32, Layout.replicate(1), RankMesh.everywhere(2), torch.zeros(4)
    )
    groups = file_groups([make(n) for n in range(4)], 32, 2)
    assert groups == [(0, [0, 1]), (1, [2, 3])]
    assert file_groups([make(n) for n in range(3)], 1, 3) == [(0, [0]), (1, [1]), (2, [2])]
