"""Marks follow storages, views and buffers of many tensors; a grid tells parts of axes apart."""

from __future__ import annotations

import gc

import pytest
import torch

from shardlib import MeshShape
from shardlib.testing.auditing.dry_grid import NOTHING, Grid
from shardlib.testing.auditing.dry_marks import Marks, Sum
from shardlib.testing.auditing.dry_watch import Watch

GRID = Grid(MeshShape("dp=4,tp=2"))
DP, TP = GRID.of_axes(["dp"]), GRID.of_axes(["tp"])


def test_views_of_one_storage_have_its_marks():
    marks, whole = Marks(), torch.zeros(4, 6)
    marks.write(whole, DP)
    assert [marks.read(each) for each in (whole, whole[1], whole.t(), whole[:, 2])] == [DP] * 4
    marks.write(whole[2:], TP)
    assert (marks.read(whole[:2]), marks.read(whole[2:]), marks.read(whole)) == (DP, TP, DP | TP)
    marks.write(whole, NOTHING)
    assert marks.read(whole) == marks.read(whole[3]) == NOTHING


def test_a_tensor_with_gaps_keeps_its_old_marks():
    marks, whole = Marks(), torch.zeros(4, 6)
    marks.write(whole, DP)
    marks.write(whole[:, :2], TP)
    assert marks.read(whole[:, :2]) == DP | TP and marks.read(whole[:, 4:]) >= DP


def test_a_part_that_a_rank_cuts_out_differs_alone():
    marks, whole = Marks(), torch.zeros(4, 6)
    marks.add_own(whole[:2], TP)
    assert (marks.read(whole[:2]), marks.read(whole), marks.read(whole[2:])) == (TP, NOTHING, NOTHING)
    assert marks.own(whole[:2]) == TP
    marks.write(whole, DP)
    assert marks.read(whole[:2]) == DP
    marks.add_own(whole, TP)
    assert marks.read(whole[3]) == DP | TP


def test_ranges_are_elements_of_a_tensor():
    marks, buffer = Marks(), torch.zeros(10)
    marks.write_range(buffer, 2, 5, DP)
    marks.write_range(buffer, 5, 7, TP)
    assert sorted(marks.ranges(buffer[3:].view(7))) == [(0, 2, DP), (2, 4, TP)]
    assert marks.read(buffer[7:]) == NOTHING
    marks.write_storage(buffer[:1], TP)
    assert marks.ranges(buffer[8:]) == [(0, 2, TP)]


def test_marks_go_with_their_storage():
    marks, tensor = Marks(), torch.zeros(3)
    marks.write(tensor, DP)
    marks.set_sums(tensor, dict.fromkeys(TP, Sum("pending", "a")))
    assert marks.sums(tensor[1:]) == dict.fromkeys(TP, Sum("pending", "a"))
    del tensor
    gc.collect()
    assert not marks._held


def test_an_axis_has_the_parts_into_which_groups_divide_it():
    grid = Grid(MeshShape("dp=8,tp=2"), [(0, 2), (0, 4, 8, 12), tuple(range(16)), (0, 1)])
    inner, outer = grid.of_ranks((0, 2)), grid.of_ranks((0, 4, 8, 12))
    assert len(inner) == len(outer) == 1 and inner | outer == grid.of_axes(["dp"]) == grid.of_ranks(
        tuple(range(0, 16, 2))
    )
    assert grid.axes(inner | grid.of_axes(["tp"])) == ("dp", "tp")
    assert grid.whole_axes(inner | grid.of_axes(["tp"])) == ("tp",)
    assert grid.of_ranks((1, 5, 9, 13)) == outer and grid.of_ranks(tuple(range(16))) == grid.all


@pytest.mark.parametrize("ranks", [(0,), (0, 6), (0, 2, 4), (0, 3)])
def test_a_group_that_does_not_follow_the_mesh_has_no_parts(ranks: tuple[int, ...]):
    grid = Grid(MeshShape("dp=8,tp=2"), [(0, 2), (0, 4, 8, 12)])
    assert grid.of_ranks(ranks) == NOTHING


def test_groups_that_divide_an_axis_in_no_order_leave_it_whole():
    grid = Grid(MeshShape("dp=6"), [(0, 1, 3), (0, 4)])
    assert len(grid.of_axes(["dp"])) == 1 and grid.of_ranks(tuple(range(6))) == grid.all


def test_a_copy_of_a_buffer_keeps_what_differs_apart():
    watch, buffer, longer = Watch(GRID), torch.zeros(6), torch.zeros(12)
    watch.marks.write_range(buffer, 2, 4, DP | TP)
    watch._copy(buffer, longer, lambda before: before - DP)
    assert watch.marks.ranges(longer[:6]) == [(2, 4, TP)]
    assert watch.marks.read(longer[6:]) == TP  # of the other ranks' parts it is not known which
