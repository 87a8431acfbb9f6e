"""ZeRO: what every data rank would hold alike is divided among them (Rajbhandari et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from shardlib._mesh import MeshShape
from shardlib._plan import Phase, Plan, Row
from shardlib.errors import PlanError
from shardlib.layout import Dim, Layout
from shardlib.transforms._choose import Names, add_note, as_names, axes_of, chosen
from shardlib.transforms._spread import Place, axes_at, find_place, with_axes_at
from shardlib.transforms._transform import Transform

__all__ = ["Zero", "split_plan", "zero"]

_PHASES: dict[int, tuple[Phase, ...]] = {1: ("state",), 2: ("grad", "state"), 3: ("stored", "grad", "state")}


def zero(stage: int, *, axis: Names = None, only: Names = None, overlap: bool = False) -> Transform:
    """Divide optimizer state (stage 1), gradients too (2), parameters between steps too (3), over data axes.

        stage 1: state  whole -> split    gradients are reduced to pieces, updated pieces are gathered
        stage 2: grad   whole -> split    and a whole gradient does not outlive its reduction
        stage 3: stored whole -> split    and parameters are gathered before they are used, and let go after it

    Parameters are gathered by units (`plan.units`): repeated blocks, and layers outside of them. What lies in none, a
    tied tensor say, stays gathered from the model's entry to the end of backward.

    What a rule splits stays split; the axes go inside of it. Buffers stay whole, and frozen parameters have only
    stage 3. A phase that an axis splits already is left as it is, so `zero(2) | zero(2)` is `zero(2)`.

    Args:
        stage: 1, 2 or 3.
        axis: a data axis of the mesh, several of them, outermost first, or None for all.
        only: patterns of parameters, or of modules, as in rules; None is all.
        overlap: at stages 1 and 2, let updated parameters of repeated blocks arrive while the next forward runs; each
            block waits for its own. Until then they hold the values before the step: forward, `state_dict()`,
            `shardlib.save`, the optimizer and loading wait for them, code that reads `p` itself after a step does not.

    Raises:
        PlanError: another stage; applied to a plan, an axis that is no data axis, a pattern that matches nothing.

    >>> from torch import nn
    >>> import shardlib as sl
    >>> whole = sl.plan(nn.Linear(64, 64, bias=False), "dp=4", {"weight": "out in"})
    >>> parted = whole | zero(1)
    >>> str(parted["weight"].state), parted.memory().state == whole.memory().state // 4
    ('out@dp in', True)
    >>> zero(2, axis="dp")
    zero(2, axis="dp")
    """
    if isinstance(stage, bool) or stage not in _PHASES:
        raise PlanError(
            f"zero({stage!r}): the stages are 1 (optimizer state is divided), 2 (and gradients), 3 (and parameters); "
            "give one of them. To divide nothing leave it out, or write replicate()."
        )
    if overlap and stage == 3:
        raise PlanError(
            "zero(3, overlap=True): stage 3 gathers the parameters of a unit while another computes, always. Leave "
            "overlap out; stages 1 and 2 take it."
        )
    return Zero(int(stage), as_names(axis), as_names(only), bool(overlap))


@dataclass(frozen=True, repr=False)
class Zero(Transform):
    """What `zero` makes."""

    call: ClassVar[str] = "zero"
    stage: int
    axis: str | tuple[str, ...] | None = None
    only: str | tuple[str, ...] | None = None
    overlap: bool = False

    def __call__(self, plan: Plan) -> Plan:
        made = split_plan(plan, _PHASES[self.stage], self.axis, self.only, self)
        if self.overlap:
            made = made.replace(step=made.step.replace(overlap=True))
        before = {row.name: row.stored for row in plan.rows}

        def settled(row: Row) -> Row:
            return row if row.stored == before[row.name] else row.replace(reshard=bool(made.unit(row)))

        return made.map_rows(settled)


def split_plan(plan: Plan, phases: tuple[Phase, ...], axis: Names, only: Names, who: object) -> Plan:
    """The plan with these phases of parameters split over data axes as well."""
    axes, names = axes_of(plan, axis, who), chosen(plan, only, who)
    if not axes:
        return add_note(plan, f'{who} divides nothing: no such data axis of "{plan.mesh}" has more than one rank.')
    return plan.map_rows(lambda row: _split(row, phases, axes, plan.mesh) if row.name in names else row)


def _split(row: Row, phases: tuple[Phase, ...], axes: tuple[str, ...], mesh: MeshShape) -> Row:
    own = tuple(phase for phase in phases if phase in row.layouts)
    if not own:
        return row
    split = _split_layouts(tuple(row.layouts[phase] for phase in own), row.global_shape, axes, mesh)
    return _noted(row, split) if isinstance(split, str) else row.replace(**dict(zip(own, split, strict=True)))


@lru_cache(maxsize=4096)
def _split_layouts(
    layouts: tuple[Layout, ...], global_shape: tuple[int, ...], axes: tuple[str, ...], mesh: MeshShape
) -> tuple[Layout, ...] | str:
    """The layouts of some phases with the axes added, or why they are not."""
    # Later phases are split at least as far as earlier ones, so the last one says what is new to the tensor.
    last = layouts[-1].resolve(global_shape, mesh)
    new = [axis for axis in axes if axis not in last.axes]
    place = find_place(last, global_shape, mesh, new) if new else None
    if new and place is None:
        fused = any(isinstance(dim, Dim) and dim.fused for dim in last.dims)
        return f"{'fused dim not split' if fused else 'too small to split'} over {','.join(new)}"
    for axis in axes:
        layouts = _nested(layouts, global_shape, axis, place if axis in new else _held_place(last, axis), mesh)
    return layouts


def _noted(row: Row, note: str) -> Row:
    return row if note in row.note else row.replace(note="; ".join(filter(None, (row.note, note))))


def _held_place(layout: Layout, axis: str) -> Place | None:
    """What an axis splits; None if nothing."""
    for at, dim in enumerate(layout.dims):
        for factor, entry in enumerate(dim.factors if isinstance(dim, Dim) else ()):
            if axis in entry.axes:
                return at, factor
    return None


def _nested(
    layouts: tuple[Layout, ...], global_shape: tuple[int, ...], axis: str, place: Place | None, mesh: MeshShape
) -> tuple[Layout, ...]:
    """The layouts of some phases with one more axis on one place, where they lack it.

    Pieces of each phase stay parts of those of the phase before it: after the axis, which stands innermost in the first
    phase, come the axes that later phases have besides.
    """
    if place is None:
        return layouts
    resolved = [layout.resolve(global_shape, mesh) for layout in layouts]
    first = axes_at(resolved[0], place)
    outer = first if axis in first else (*first, axis)

    def nested(layout: Layout) -> Layout:
        here = axes_at(layout, place)
        if axis in here or axis not in layout.axes:
            return with_axes_at(layout, place, (*outer, *(a for a in here if a not in outer)))
        return layout

    return tuple(map(nested, resolved))
