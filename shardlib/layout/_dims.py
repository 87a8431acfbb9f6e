"""Dims of a layout: the factors that a dim is fused from, and the mesh axes that split each factor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from types import EllipsisType
from typing import TypeAlias

__all__ = ["Dim", "Dims", "Factor", "axes_of_dims", "plain", "spell"]


@dataclass(frozen=True)
class Factor:
    """One name of a pattern, with the mesh axes that shard it, outermost first.

    A dim that is not fused is one factor. `optional` marks the text form `name@axis?`: sharded over as many of the
    axes, outermost first, as divide it; it is settled by `Layout.resolve`.
    """

    name: str
    axes: tuple[str, ...] = ()
    size: int | None = None
    optional: bool = False

    def without(self, axes: Iterable[str]) -> Factor:
        kept = tuple(axis for axis in self.axes if axis not in set(axes))
        return replace(self, axes=kept, optional=self.optional and bool(kept))


@dataclass(frozen=True)
class Dim:
    """One tensor dim, as its factors, outermost (slowest varying) first."""

    factors: tuple[Factor, ...]

    @property
    def fused(self) -> bool:
        """Whether the dim is written as a product, such as `(qkv heads head)`."""
        return len(self.factors) > 1

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis that shards the dim, in the order of its factors."""
        return tuple(axis for factor in self.factors for axis in factor.axes)

    @property
    def name(self) -> str:
        """The name of the dim; of a fused one, the names of its factors joined by spaces."""
        return " ".join(factor.name for factor in self.factors)

    @property
    def known_size(self) -> int:
        """The product of the factor sizes that are known."""
        return math.prod(factor.size for factor in self.factors if factor.size is not None)

    @property
    def open_factors(self) -> tuple[Factor, ...]:
        """The factors whose size is not known."""
        return tuple(factor for factor in self.factors if factor.size is None)

    def without(self, axes: Iterable[str]) -> Dim:
        return Dim(tuple(factor.without(axes) for factor in self.factors))


Dims: TypeAlias = tuple[Dim | EllipsisType, ...]


def plain(name: str = "_", *axes: str) -> Dim:
    """Return a dim that is not fused."""
    return Dim((Factor(name, axes),))


def axes_of_dims(dims: Dims) -> tuple[str, ...]:
    """Return every axis that splits some dim, with repeats, in the order of the text."""
    return tuple(axis for dim in dims if isinstance(dim, Dim) for axis in dim.axes)


def spell(axes: tuple[str, ...]) -> str:
    """Format axes as a layout's text has them after "@"."""
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"
