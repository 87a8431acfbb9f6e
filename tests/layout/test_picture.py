"""Pictures show what ranks hold."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib._mesh_shape import MeshShape
from shardlib.layout import Layout
from shardlib.testing import strategies


@given(st.data())
def test_each_cell_names_the_ranks_that_hold_its_first_element(data: st.DataObject):
    mesh = data.draw(strategies.mesh_shapes(max_world=8))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=2)))
    layout = data.draw(strategies.layouts(shape, mesh, partial=False))
    drawn = layout.picture(shape, mesh)
    index = torch.arange(shape[0] * shape[1]).view(shape)
    held = [set(layout.take(index, mesh, mesh.coordinate(rank)).flatten().tolist()) for rank in range(mesh.world_size)]
    _, _, head, *lines = drawn.splitlines()
    columns = [int(at) for at in re.findall(r"(?<=\s)\d+(?=\s|$)", head[_margin(lines) :])]
    for line in lines:
        if "│" not in line:
            continue
        start, *cells = line.removesuffix("│").split("│")
        assert len(cells) == len(columns)
        for cell, column in zip(cells, columns, strict=True):
            element = int(start) * shape[1] + column
            assert _ranks(cell) == [rank for rank, elements in enumerate(held) if element in elements], drawn
    empty = [rank for rank, elements in enumerate(held) if not elements]
    assert (f"ranks that hold nothing: {lines[-1].rpartition(': ')[2]}" == lines[-1]) == bool(empty)


def _margin(lines: Sequence[str]) -> int:
    return lines[0].index("┌")


def _ranks(cell: str) -> list[int]:
    first, dash, last = cell.strip().partition("-")
    if dash:
        return list(range(int(first), int(last) + 1))
    return [int(rank) for rank in cell.split(",")] if "..." not in cell else []


def test_large_pictures_are_cut_and_what_is_not_drawn_is_said():
    drawn = Layout.parse("a@dp b@tp c@sp").picture((64, 4, 8), MeshShape("dp=32,tp=2,sp=2"))
    lines = drawn.splitlines()
    assert lines[-1] == "dim 2 is sharded over sp too, and not drawn"
    assert sum("│" in line for line in lines) == 17 and any(line.startswith("...") for line in lines)
    whole = Layout.parse("a b + sum@dp").picture((2, 2), "dp=16")
    assert "│ 0-15 │" in whole and whole.endswith("still to be reduced: sum over dp")


@pytest.mark.parametrize(
    ("text", "shape", "mesh", "expected"),
    [
        (
            "rows@tp columns@dp",
            (5, 30),
            "dp=3,tp=2",
            """
                  columns
            rows  0   10   20
                 ┌───┬────┬────┐
            0    │ 0 │ 2  │ 4  │
                 ├───┼────┼────┤
            3    │ 1 │ 3  │ 5  │
                 └───┴────┴────┘
            """,
        ),
        (  # who is no run of ranks is listed, of more than six the first three and the last
            "_ a@tp",
            (1, 4),
            "dp=7,tp=2",
            """
                   a
            dim 0  0              2
                  ┌──────────────┬──────────────┐
            0     │ 0,2,4,...,12 │ 1,3,5,...,13 │
                  └──────────────┴──────────────┘
            """,
        ),
        (
            "a@tp",
            (2,),
            "dp=6,tp=3",
            """
              a
              0               1
             ┌───────────────┬────────────────┐
             │ 0,3,6,9,12,15 │ 1,4,7,10,13,16 │
             └───────────────┴────────────────┘
            ranks that hold nothing: 2,5,8,11,14,17
            """,
        ),
        (
            "a@tp b@dp",
            (1, 1),
            "tp=2,dp=2",
            """
               b
            a  0
              ┌───┐
            0 │ 0 │
              └───┘
            ranks that hold nothing: 1-3
            """,
        ),
        (
            "a b@tp c",
            (2, 2, 2),
            "tp=2",
            """
               b
            a  0   1
              ┌───┬───┐
            0 │ 0 │ 1 │
              └───┴───┘
            """,
        ),
    ],
)
def test_pictures(text: str, shape: tuple[int, ...], mesh: str, expected: str):
    first, *lines = Layout.parse(text).picture(shape, mesh).splitlines()
    assert first == f'{shape} "{text}" on "{mesh}"'
    assert lines == textwrap.dedent(expected).strip("\n").splitlines()


def test_a_scalar_has_a_picture_without_sides():
    assert Layout.parse("").picture((), "tp=2").splitlines()[1:] == [" ┌─────┐", " │ 0,1 │", " └─────┘"]
