"""One row of the plan: a tensor, and its layout in each phase of a training step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from shardlib._dtypes import keeps_dtype_names
from shardlib._mesh_shape import MeshShape
from shardlib.errors import PlanError
from shardlib.layout import Layout

if TYPE_CHECKING:
    import torch

__all__ = ["PHASES", "Phase", "Row", "rows_by_name"]

Phase = Literal["stored", "compute", "grad", "state"]
PHASES: tuple[Phase, ...] = ("stored", "compute", "grad", "state")


@keeps_dtype_names
@dataclass(frozen=True)
class Row:
    """A parameter or buffer of a model, with its layout in each phase.

    Attributes:
        name: the first of its names in the model; `tied` has all of them, this one first.
        kind: "parameter" or "buffer".
        global_shape, dtype: global shape and dtype, as the model defines them.
        requires_grad: False for buffers and frozen parameters.
        persistent: False for buffers that a state dict leaves out.
        stored: its layout between steps.
        compute: its layout in forward and backward; of data axes, only those of experts split it here.
        grad, state: the layouts of its gradient and of each tensor of its optimizer state; None where it has none.
        rule: the pattern of the rule that was chosen, or None.
        note: remarks for the reader.
        reshard: if it is stored sharded and computed with unsharded, whether it is resharded between forward and
            backward. Only tensors of a unit can be.
        partial: the model axes over which its gradient leaves backward as a partial sum, as where activations are split
            over them. A dry run or the first backward pass finds them.
    """

    name: str
    kind: Literal["parameter", "buffer"]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    persistent: bool
    tied: tuple[str, ...]
    stored: Layout
    compute: Layout
    grad: Layout | None
    state: Layout | None
    rule: str | None = None
    note: str = ""
    reshard: bool = True
    partial: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> Row:
        """Return a copy with some fields changed; transforms are built from this.

        >>> from shardlib._plan import make_plan
        >>> row = make_plan(torch.nn.Linear(4, 8), "dp=2,tp=2", {"weight": "out@tp in", "bias": None}).rows[0]
        >>> str(row.replace(state=Layout.parse("out@(tp,dp) in")).state)
        'out@(tp,dp) in'
        """
        if unknown := changes.keys() - self.__dataclass_fields__.keys():
            raise PlanError(
                f"Row.replace was given {', '.join(sorted(unknown))}; a row has {', '.join(self.__dataclass_fields__)}."
            )
        return dataclasses.replace(self, **changes)

    @property
    def form(self) -> tuple[object, ...]:
        """The fields that rows of repeated blocks have in common: all that decide how the tensor is cut and moved."""
        phases = self.stored, self.compute, self.grad, self.state
        return (self.global_shape, self.dtype, *phases, self.reshard, self.partial)

    @functools.cached_property
    def layouts(self) -> dict[Phase, Layout]:
        """The layouts of the phases that this tensor has, in order."""
        phases: dict[Phase, Layout | None] = {p: getattr(self, p) for p in PHASES}
        return {phase: layout for phase, layout in phases.items() if layout is not None}

    def added(self, phase: Phase) -> frozenset[str]:
        """Return the axes that split a phase and not the compute layout: it is gathered, or reduced, over these."""
        layout: Layout | None = getattr(self, phase)
        return frozenset() if layout is None else layout.axes - self.compute.axes

    @property
    def has_master(self) -> bool:
        """Whether the optimizer state has a copy in a wider dtype than the stored parameter."""
        if self.state is None:
            return False
        return (self.state.dtype or self.dtype).itemsize > (self.stored.dtype or self.dtype).itemsize

    def local_shape(self, mesh: MeshShape, *, phase: Phase = "stored") -> tuple[int, ...]:
        """Return the local shape of the largest shard, the one at coordinate zero of every axis."""
        return tuple(self._layout(phase).local_shape(self.global_shape, mesh, dict.fromkeys(mesh.names, 0)))

    def local_bytes(self, mesh: MeshShape, *, phase: Phase = "stored") -> int:
        """Return the bytes of the largest shard in a phase, in that phase's dtype."""
        return self._layout(phase).local_bytes(self.global_shape, self.dtype, mesh)

    def _layout(self, phase: Phase) -> Layout:
        layout = self.layouts.get(phase)
        if layout is None:
            raise PlanError(f'"{self.name}" has no {phase} phase; it has {", ".join(self.layouts)}.')
        return layout


def rows_by_name(rows: Iterable[Row]) -> dict[str, Row]:
    """Return rows by all names of their tensors."""
    return {name: row for row in rows for name in row.tied}
