"""Fit dims to a tensor and a mesh: expand "...", infer factor sizes, resolve "?", and find what does not fit.

A problem is a short fact and an advice; `Layout` adds the text, the tensor and the mesh that it is about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeAlias

from shardlib._mesh_shape import MeshShape
from shardlib.errors import nearest
from shardlib.layout._dims import Dim, Dims, Factor, plain, spell

__all__ = ["Problem", "axis_problems", "expand", "fit_dim", "mesh_problems", "settle", "shape_problems"]

Problem: TypeAlias = tuple[str, str]


def expand(dims: Dims, ndim: int) -> Dims:
    """Replace "..." by unnamed, unsplit dims; return the dims unchanged where that cannot give `ndim` dims."""
    missing = ndim - (len(dims) - 1)
    if ... not in dims or missing < 0:
        return dims
    at = dims.index(...)
    return (*dims[:at], *(plain() for _ in range(missing)), *dims[at + 1 :])


def fit_dim(dim: Dim, size: int, mesh: MeshShape) -> Dim:
    """Return the dim with its one open factor inferred and its optional splits resolved."""
    if not dim.fused:
        return Dim((_settle(dim.factors[0], size, mesh),))
    return Dim(tuple(_fit_factor(factor, size // dim.known_size, mesh) for factor in dim.factors))


def settle(dim: Any, mesh: MeshShape) -> Any:
    """Resolve the optional splits of those factors whose size is known."""
    if not isinstance(dim, Dim):
        return dim
    return Dim(tuple(f if f.size is None else _settle(f, f.size, mesh) for f in dim.factors))


def _fit_factor(factor: Factor, inferred: int, mesh: MeshShape) -> Factor:
    size = inferred if factor.size is None else factor.size
    return _settle(replace(factor, size=size), size, mesh)


def _settle(factor: Factor, size: int, mesh: MeshShape) -> Factor:
    if not factor.optional:
        return factor
    axes = factor.axes
    while size % math.prod(mesh[axis] for axis in axes):
        axes = axes[:-1]
    return replace(factor, axes=axes, optional=False)


def axis_problems(axes: Iterable[str], mesh: MeshShape) -> Iterator[Problem]:
    """Iterate over the axes that the mesh does not have."""
    known = ", ".join(f'"{name}"' for name in mesh.names)
    for axis in axes:
        if axis not in mesh:
            yield (
                f'axis "{axis}" is not on the mesh, which has {known}',
                f"Use one of these, or add the axis to the mesh.{nearest(axis, mesh.names)}",
            )


def shape_problems(dims: Dims, global_shape: tuple[int, ...]) -> Iterator[Problem]:
    """Iterate over the dims that do not match those of the tensor."""
    if len(dims) != len(global_shape):
        yield (
            f"it names {_count(len(dims) - dims.count(...))}, the tensor has {_count(len(global_shape))}",
            'Name every dim of the tensor once; leading dims may be written "...".',
        )
        return
    for index, (dim, size) in enumerate(zip(dims, global_shape, strict=True)):
        assert isinstance(dim, Dim)
        yield from _size_problems(index, dim, size)


def _size_problems(index: int, dim: Dim, size: int) -> Iterator[Problem]:
    where, product = f'dim {index} "{dim.name}"', _product(dim)
    names = ", ".join(f'"{factor.name}"' for factor in dim.open_factors)
    if dim.fused and len(dim.open_factors) > 1:
        yield (
            f"the sizes of {names} in {where} are not known",
            f"Give them, as in sizes={_example(dim)}; one is inferred.",
        )
    elif not dim.open_factors and dim.known_size != size:
        yield (
            f"{where} is {product} by the sizes given, the tensor has {size}",
            "Correct the sizes, or the pattern if it names another dim.",
        )
    elif size % dim.known_size:
        yield (
            f"{where} of size {size} is not a multiple of {product}",
            f"Correct the sizes given, so that {names} can be inferred.",
        )


def mesh_problems(dims: Dims, mesh: MeshShape) -> Iterator[Problem]:
    """Iterate over the splits that have no placements: unresolved, of unknown stride, or uneven inside a fused dim."""
    for dim in dims:
        assert isinstance(dim, Dim)
        yield from _unsettled(dim)
        if dim.fused:
            yield from _unknown_strides(dim, mesh)
            yield from _uneven_factors(dim, mesh)


def _unsettled(dim: Dim) -> Iterator[Problem]:
    for factor in dim.factors:
        if factor.optional:
            yield (
                f'whether "{factor.name}" is sharded is still open ("?")',
                "Call layout.resolve(global_shape, mesh) first; it needs the size of the dim.",
            )


def _unknown_strides(dim: Dim, mesh: MeshShape) -> Iterator[Problem]:
    for outer, inner in combinations(dim.factors, 2):
        if outer.size is None and any(mesh[axis] > 1 for axis in inner.axes):
            yield (
                f'the size of "{outer.name}" in dim "{dim.name}" is not known, and "{inner.name}" is sharded inside it',
                f'Give it, as in sizes={{"{outer.name}": 3}}, or call layout.resolve(global_shape, mesh) first.',
            )


def _uneven_factors(dim: Dim, mesh: MeshShape) -> Iterator[Problem]:
    for factor in dim.factors:
        pieces = math.prod(mesh[axis] for axis in factor.axes)
        if factor.size is not None and factor.size % pieces:
            over = " x ".join(f"{axis}={mesh[axis]}" for axis in factor.axes)
            yield (
                f'factor "{factor.name}" of size {factor.size} does not divide over {over}',
                f"Factors of a fused dim must divide: use axes whose sizes divide {factor.size}, or write "
                f'"{factor.name}@{spell(factor.axes)}?" to shard it only where it divides.',
            )


def _product(dim: Dim) -> str:
    sizes = [str(factor.size) for factor in dim.factors if factor.size is not None]
    return f"{' x '.join(sizes)} = {dim.known_size}" if len(sizes) > 1 else "".join(sizes)


def _example(dim: Dim) -> str:
    return "{" + ", ".join(f'"{factor.name}": ...' for factor in dim.open_factors[:-1]) + "}"


def _count(dims: int) -> str:
    return f"{dims} dim" if dims == 1 else f"{dims} dims"
