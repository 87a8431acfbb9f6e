"""Conversion between layout dims and a JAX `PartitionSpec`. Only these functions import jax, when they are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardlib.layout._dims import Dim, Dims, Factor
from shardlib.layout._fit import Problem

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["dims_of", "problems", "problems_in", "spec_of"]


def problems(dims: Dims, partials: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    """Iterate over what a `PartitionSpec` cannot express."""
    for axis, op in partials:
        yield f'a pending {op} over "{axis}" has no form there', "Reduce first; with_axes_dropped forgets it."
    for dim in dims:
        yield from _dim_problems(dim) if isinstance(dim, Dim) else _ellipsis_problem()


def _ellipsis_problem() -> Iterator[Problem]:
    yield '"..." leaves the number of dims open', "Call with_ndim first."


def _dim_problems(dim: Dim) -> Iterator[Problem]:
    if any(factor.optional for factor in dim.factors):
        yield f'dim "{dim.name}" is still open ("?")', "Call layout.resolve(global_shape, mesh) first."
    if any(factor.axes for factor in dim.factors[1:]):
        yield (
            f'the fused dim "{dim.name}" is sharded inside its outermost factor',
            "Keep that dim replicated in JAX and shard its factors after unfusing, or store the factors as dims.",
        )


def spec_of(dims: Dims) -> PartitionSpec:
    """Return the spec of the dims, one entry per dim: None, an axis, or a tuple of axes, outermost first."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*(_entry(dim.axes) for dim in dims if isinstance(dim, Dim)))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return axes if len(axes) > 1 else axes[0] if axes else None


def problems_in(spec: PartitionSpec, ndim: int) -> Iterator[Problem]:
    """Iterate over what a layout cannot express in a `PartitionSpec`."""
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        yield "it has unreduced or reduced axes", "Give a spec whose axes all shard dims."
    if len(spec) > ndim:
        yield f"it has {len(spec)} entries", "Give no more entries than the tensor has dims."
    for index, entry in enumerate(spec):
        if entry is not None and not isinstance(entry, str | tuple):
            yield f"dim {index} is left to the compiler", "Name its axes, or None."


def dims_of(spec: PartitionSpec, names: Sequence[str]) -> tuple[Dim, ...]:
    """Return one dim per name, not fused; dims beyond the end of the spec are not split."""
    entries = [*spec, *[None] * (len(names) - len(spec))]
    return tuple(Dim((Factor(name, _axes(entry)),)) for name, entry in zip(names, entries, strict=True))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
