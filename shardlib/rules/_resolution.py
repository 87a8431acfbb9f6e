"""Resolutions: a layout for every tensor and every module border of one model on one mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardlib._dtypes import keeps_dtype_names
from shardlib._mesh_shape import MeshShape
from shardlib.layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["Border", "Resolution", "Side", "TensorLayout"]

Side = Literal["input", "output"]


@keeps_dtype_names
@dataclass(frozen=True)
class TensorLayout:
    """The layout of one parameter or buffer; one value for all names of a tied tensor.

    Attributes:
        name: the canonical name, the first under which the model lists the tensor.
        tied: every name of the tensor, the canonical one first.
        layout: concrete: one dim per tensor dim, factor sizes known, only axes of the mesh.
        rule: the pattern of the rule that gave the layout, as written; None when no rule did.
        note: the meaning of the layout for the tensor's module, in words.
    """

    name: str
    kind: Literal["parameter", "buffer"]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool
    tied: tuple[str, ...]
    layout: Layout
    rule: str | None
    note: str

    @property
    def global_bytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.global_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Border:
    """The layout of an activation that enters or leaves a module.

    Attributes:
        layout: the layout that it is redistributed to; None leaves it as it is and only completes its gradient.
        rule: the pattern of the rule that asked for it; None where the layout follows from those of parameters.
    """

    module: str
    side: Side
    layout: Layout | None
    rule: str | None
    reason: str


@dataclass(frozen=True)
class Resolution:
    """Every tensor by its canonical name and every activation by (module, side), in model order."""

    mesh: MeshShape
    tensors: dict[str, TensorLayout]
    borders: dict[tuple[str, Side], Border]

    @property
    def unmatched(self) -> tuple[TensorLayout, ...]:
        """The parameters that no rule matches; they are replicated."""
        return tuple(each for each in self.tensors.values() if each.rule is None and each.kind == "parameter")

    @property
    def unmatched_bytes(self) -> int:
        """Bytes of the parameters that no rule matches."""
        return sum(each.global_bytes for each in self.unmatched)
