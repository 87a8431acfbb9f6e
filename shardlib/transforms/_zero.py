"""ZeRO: state that data parallelism replicates is sharded over the data ranks (Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Phase, Plan, Row
from shardlib.errors import PlanError, check_flags
from shardlib.layout import Dim, Layout
from shardlib.transforms._choose import Names, add_note, as_names, axes_of, chosen
from shardlib.transforms._spread import FactorIndex, axes_at, find_factor, with_axes_at
from shardlib.transforms._transform import Transform

__all__ = ["Zero", "split_plan", "zero"]

_PHASES: dict[int, tuple[Phase, ...]] = {1: ("state",), 2: ("grad", "state"), 3: ("stored", "grad", "state")}


def zero(stage: int, *, axis: Names = None, only: Names = None, overlap: bool = False) -> Transform:
    """Shard optimizer state (stage 1), gradients too (2), and stored parameters too (3) over data axes.

        stage 1: state  replicated -> sharded    gradients are reduce-scattered, updated shards are all-gathered
        stage 2: grad   replicated -> sharded    the unsharded gradient is freed after its reduction
        stage 3: stored replicated -> sharded    parameters are unsharded before use and resharded after it

    Parameters are unsharded by units (`plan.units`): repeated blocks, and layers outside of them. Parameters outside of
    all units, such as tied ones, stay unsharded from the model's forward to the end of backward.

    Dims that a rule shards stay sharded; the data axes are added innermost. Buffers stay replicated, and of frozen
    parameters only the stored phase is sharded. A phase that an axis shards already is not changed, so
    `zero(2) | zero(2)` is `zero(2)`.

    Args:
        stage: 1, 2 or 3.
        axis: a data axis of the mesh, several of them, outermost first, or None for all.
        only: patterns of parameters, or of modules, as in rules; None is all.
        overlap: at stages 1 and 2, all-gather updated parameters of repeated blocks during the next forward; each block
            waits for its own. Until then they hold the values before the step. Forward, `state_dict()`,
            `shardlib.save`, the optimizer and loading wait for them; code that reads a parameter directly after a step
            does not.

    Raises:
        PlanError: another stage, `overlap` is no bool; applied to a plan, an axis that is not a data axis, a pattern
            that matches nothing.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> made = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"})
    >>> sharded = made | zero(1)
    >>> str(sharded["weight"].state), sharded.memory().state == made.memory().state // 4
    ('out@dp in', True)
    >>> zero(2, axis="dp")
    zero(2, axis="dp")
    """
    if isinstance(stage, bool) or stage not in _PHASES:
        raise PlanError(
            f"zero({stage!r}): the stages are 1 (optimizer state is sharded), 2 (and gradients), 3 (and parameters); "
            "give one of them. To shard nothing leave it out, or write replicate()."
        )
    check_flags("zero", PlanError, overlap=overlap)
    if overlap and stage == 3:
        raise PlanError(
            "zero(3, overlap=True): stage 3 always unshards the parameters of a unit while another computes. Leave "
            "overlap out; stages 1 and 2 take it."
        )
    return Zero(int(stage), as_names(axis), as_names(only), overlap)


@dataclass(frozen=True, repr=False)
class Zero(Transform):
    """The transform that `zero` returns."""

    call: ClassVar[str] = "zero"
    stage: int
    axis: str | tuple[str, ...] | None = None
    only: str | tuple[str, ...] | None = None
    overlap: bool = False

    def __call__(self, plan: Plan) -> Plan:
        def reshards(row: Row, stored: Layout) -> bool:
            return row.reshard if stored == row.stored else bool(plan.unit(row))

        made = split_plan(plan, _PHASES[self.stage], self.axis, self.only, self, reshards)
        return made.replace(step=made.step.replace(overlap=True)) if self.overlap else made


def split_plan(
    plan: Plan,
    phases: tuple[Phase, ...],
    axis: Names,
    only: Names,
    who: object,
    reshards: Callable[[Row, Layout], bool],
) -> Plan:
    """Return the plan with these phases of parameters split over data axes as well.

    `reshards(row, stored)` is whether a parameter is resharded after forward, given its row before and the new layout.
    """
    axes, names = axes_of(plan, axis, who), chosen(plan, only, who)
    if not axes:
        plan = add_note(plan, f'{who} shards nothing: no such data axis of "{plan.mesh}" has more than one rank.')

    def split(row: Row) -> Row:
        if row.name not in names:
            return row
        changes = _changes(row, phases, axes, plan.mesh) if axes else {}
        reshard = reshards(row, changes.get("stored", row.stored))
        return row.replace(**changes, reshard=reshard) if changes or reshard != row.reshard else row

    return plan.map_rows(split)


def _changes(row: Row, phases: tuple[Phase, ...], axes: tuple[str, ...], mesh: MeshShape) -> dict[str, Any]:
    """Return the fields of a row that change if the axes split these phases of it."""
    own = {phase: layout for phase in phases if (layout := getattr(row, phase)) is not None}
    if not own:
        return {}
    split = _split_layouts(tuple(own.values()), row.global_shape, axes, mesh)
    if not isinstance(split, str):
        return dict(zip(own, split, strict=True))
    return {} if split in row.note else {"note": "; ".join(filter(None, (row.note, split)))}


@lru_cache(maxsize=4096)
def _split_layouts(
    layouts: tuple[Layout, ...], global_shape: tuple[int, ...], axes: tuple[str, ...], mesh: MeshShape
) -> tuple[Layout, ...] | str:
    """The layouts of some phases with the axes added, or why they are not."""
    # Later phases are split at least as far as earlier ones, so the axes that the last one lacks are new to the tensor.
    last = layouts[-1].resolve(global_shape, mesh)
    new = [axis for axis in axes if axis not in last.axes]
    index = find_factor(last, global_shape, mesh, new) if new else None
    if new and index is None:
        fused = any(isinstance(dim, Dim) and dim.fused for dim in last.dims)
        return f"{'fused dim not sharded' if fused else 'too small to shard'} over {','.join(new)}"
    for axis in axes:
        layouts = _nested(layouts, global_shape, axis, index if axis in new else _factor_of(last, axis), mesh)
    return layouts


def _factor_of(layout: Layout, axis: str) -> FactorIndex | None:
    """Return the factor that an axis splits; None if it splits none."""
    for at, dim in enumerate(layout.dims):
        for factor, entry in enumerate(dim.factors if isinstance(dim, Dim) else ()):
            if axis in entry.axes:
                return at, factor
    return None


def _nested(
    layouts: tuple[Layout, ...], global_shape: tuple[int, ...], axis: str, index: FactorIndex | None, mesh: MeshShape
) -> tuple[Layout, ...]:
    """Add an axis to one factor in the layouts of some phases, where they lack it.

    Shards of each phase stay parts of those of the phase before it: the axis is innermost in the first phase, and
    the axes that only later phases have come after it.
    """
    if index is None:
        return layouts
    resolved = [layout.resolve(global_shape, mesh) for layout in layouts]
    first = axes_at(resolved[0], index)
    outer = first if axis in first else (*first, axis)

    def nested(layout: Layout) -> Layout:
        here = axes_at(layout, index)
        if axis in here or axis not in layout.axes:
            return with_axes_at(layout, index, (*outer, *(a for a in here if a not in outer)))
        return layout

    return tuple(map(nested, resolved))
