"""Meshes: some axes, of some sizes, in some order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from hypothesis import strategies as st

from shardlib._mesh_shape import MeshShape
from shardlib.errors import InputError, MeshError
from shardlib.testing.strategies._draws import check_size

__all__ = ["mesh_shapes"]


def mesh_shapes(
    max_world: int = 4,
    *,
    model_axes: Sequence[str] = ("tp",),
    data_axes: Sequence[str] = ("dp",),
    rows: int | None = None,
) -> st.SearchStrategy[MeshShape]:
    """Generate meshes of at least two ranks, of some of these axes in any order; sometimes an axis has size one.

    Shrinks towards one axis of two ranks, a model axis if there is one.

    Args:
        max_world: most ranks.
        model_axes: axes that divide the work on an example.
        data_axes: axes that carry different examples.
        rows: the rows of the global batch, which the number of data ranks then divides.

    Raises:
        InputError: there is no such mesh, or an axis is not of that kind.

    >>> from hypothesis import find
    >>> find(mesh_shapes(), lambda mesh: True)
    MeshShape("tp=2")
    >>> find(mesh_shapes(8), lambda mesh: len(mesh) == 2 and mesh.world_size > 4)
    MeshShape("tp=2,dp=3")
    """
    for name, size in (("max_world", max_world), ("rows", 2 if rows is None else rows)):
        check_size("mesh_shapes", name, size)
    model, data = _axes("model", model_axes), _axes("data", data_axes)
    axes = (*model, *data)
    fits = model or rows is None or any(rows % size == 0 for size in range(2, max_world + 1))
    if max_world < 2 or not axes or len(set(axes)) < len(axes) or not fits:
        raise InputError(
            f"mesh_shapes({max_world}, model_axes={model}, data_axes={data}, rows={rows}): there is no such mesh. Give "
            "at least one axis, each once, at least two ranks, and rows that some number of data ranks divides."
        )
    return _mesh_shapes(max_world, model, data, rows)


@st.composite
def _mesh_shapes(
    draw: st.DrawFn, max_world: int, model: tuple[str, ...], data: tuple[str, ...], rows: int | None
) -> MeshShape:
    # As many draws whatever is drawn, the last axes first: each axis shrinks away by itself, and the first ones stay.
    every = (*model, *data)
    there = {axis: draw(st.booleans()) for axis in reversed(every)}
    which = [draw(st.integers(0, 11)) for _ in every]
    order = draw(st.permutations(every))
    axes = [axis for axis in every if there[axis]] or [every[0]]
    sizes: dict[str, int] = {}
    for at, axis in enumerate(axes):
        most = max_world // math.prod(sizes.values()) // 2 ** (len(axes) - at - 1)
        allowed = [size for size in range(2, most + 1) if axis in model or _shared(rows, data, sizes, size)]
        sizes[axis] = allowed[which[at] * len(allowed) // 11] if allowed and which[at] < 11 else 1
    if math.prod(sizes.values()) == 1:
        axis = next((a for a in axes if a in model or _shared(rows, data, sizes, 2)), every[0])
        least = (n for n in range(2, max_world + 1) if axis in model or _shared(rows, data, sizes, n))
        sizes = {**sizes, axis: next(least)}
    return MeshShape({axis: sizes[axis] for axis in order if axis in sizes})


def _shared(rows: int | None, data: Sequence[str], sizes: Mapping[str, int], size: int) -> bool:
    """Return whether one more data axis of this size still divides the rows evenly."""
    return rows is None or rows % (size * math.prod(sizes[axis] for axis in data if axis in sizes)) == 0


def _axes(kind: Literal["model", "data"], names: Sequence[str]) -> tuple[str, ...]:
    given = f"{kind}_axes={names!r}"
    if isinstance(names, str):
        raise InputError(f'mesh_shapes({given}): give a sequence of names, as in {kind}_axes=("{names}",).')
    for name in names:
        try:
            known = MeshShape({name: 1}).kind(name)
        except MeshError as fault:
            raise InputError(f"mesh_shapes({given}): {fault}") from None
        if known != kind:
            raise InputError(f'mesh_shapes({given}): "{name}" is a {known} axis; give it as {known}_axes.')
    return tuple(names)
