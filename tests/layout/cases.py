"""Generated meshes, tensors and layouts. They shrink towards one axis of size one, one dim, nothing split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from hypothesis import settings
from hypothesis import strategies as st

from shardlib import MeshShape
from shardlib.layout import Dim, Factor, Layout
from shardlib.testing import strategies

AXES = ("tp", "dp", "cp")
# These laws cost a millisecond an example, and what they are about (two splits of one fused dim) is drawn rarely.
thorough = settings(max_examples=4 * settings.default.max_examples)


@dataclass(frozen=True)
class Case:
    """A tensor and its layout on a mesh."""

    mesh: MeshShape
    global_shape: tuple[int, ...]
    layout: Layout

    @property
    def coordinates(self) -> list[dict[str, int]]:
        return [self.mesh.coordinate(rank) for rank in range(self.mesh.world_size)]

    def is_even(self) -> bool:
        return not self.layout.uneven_dims(self.global_shape, self.mesh)

    def in_mesh_order(self) -> bool:
        names = self.mesh.names
        return all(list(dim.axes) == sorted(dim.axes, key=names.index) for dim in self.layout.dims)


@st.composite
def meshes(draw: st.DrawFn) -> MeshShape:
    """One to three axes of sizes one to four, in any order."""
    names = draw(st.permutations(AXES))[: draw(st.integers(1, 3))]
    return MeshShape({name: draw(st.integers(1, 4 if len(names) < 3 else 3)) for name in names})


@st.composite
def cases(draw: st.DrawFn, *, fused: bool = True, uneven: bool = True, partial: bool = False) -> Case:
    """Any axes on any dims in any order, with uneven sizes, or as fused dims with any factor split."""
    mesh = draw(meshes())
    shape = draw(strategies.shapes(mesh, uneven=uneven))
    return Case(mesh, shape, draw(strategies.layouts(shape, mesh, fused=fused, uneven=uneven, partial=partial)))


@st.composite
def axis_lists(draw: st.DrawFn, mesh: MeshShape, ndim: int) -> list[tuple[str, ...]]:
    """For each dim the axes that split it, outermost first; each axis at most once."""
    held: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(mesh.names)):
        at = draw(st.integers(0, ndim))
        if at:
            held[at - 1].append(axis)
    return [tuple(axes) for axes in held]


@st.composite
def plain_dims(draw: st.DrawFn, mesh: MeshShape, axes: Sequence[str], name: str, kind: str) -> tuple[Dim, int]:
    pieces = math.prod(mesh[axis] for axis in axes)
    size = draw(st.integers(0, 14)) if kind == "uneven" else pieces * draw(st.integers(1, 3))
    return Dim((Factor(name, tuple(axes)),)), size


@st.composite
def fused_dims(draw: st.DrawFn, mesh: MeshShape, axes: Sequence[str], name: str, kind: str) -> tuple[Dim, int]:
    """Two or three factors; the axes go to any of them, in any order."""
    count = draw(st.integers(2, 3))
    held: list[list[str]] = [[] for _ in range(count)]
    for axis in axes:
        held[draw(st.integers(0, count - 1))].append(axis)
    sizes = [math.prod(mesh[axis] for axis in mine) * draw(st.integers(1, 3)) for mine in held]
    factors = tuple(
        Factor(f"{name}f{i}", tuple(mine), size) for i, (mine, size) in enumerate(zip(held, sizes, strict=True))
    )
    return Dim(factors), math.prod(sizes)


def plain_layouts(axes: Sequence[str], ndim: int) -> Iterator[Layout]:
    """Every way to let some of the axes split the dims, in every order."""
    for count in range(len(axes) + 1):
        for chosen in permutations(axes, count):
            for at in product(range(ndim), repeat=count):
                # Only the order within a dim matters: keep one representative.
                if list(at) == sorted(at):
                    yield Layout(
                        tuple(
                            Dim((Factor(f"d{dim}", tuple(a for a, i in zip(chosen, at, strict=True) if i == dim)),))
                            for dim in range(ndim)
                        )
                    )
