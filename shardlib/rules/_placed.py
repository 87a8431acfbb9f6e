"""Placements as rules: on the dims of a tensor, and on an activation whose number of dims is not known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardlib._mesh_shape import MeshShape
from shardlib.errors import RuleError
from shardlib.layout import Dim, Factor, Layout
from shardlib.rules._match import Entry
from shardlib.rules._values import Cut, PerAxis, Placed, spelled_placement

__all__ = ["border_of_placements", "by_axis", "placed_dims", "unsplit"]


def by_axis(entry: Entry, mesh: MeshShape, default_axis: str) -> list[tuple[str, Cut | None]]:
    """Return the placements of a rule with their axes, in the order in which they nest."""
    if isinstance(entry.value, Placed):
        return [(axis or default_axis, cut) for axis, cut in entry.value.by_axis]
    assert isinstance(entry.value, PerAxis)
    given = entry.value.placements
    for axes in (mesh.names, mesh.model_axes):
        if len(axes) == len(given):
            return list(zip(axes, given, strict=True))
    raise RuleError(
        f'Rule {entry} gives {len(given)} placements, but mesh "{mesh}" has {len(mesh)} axes, '
        f"{len(mesh.model_axes)} of them model axes. Give one per axis, or {{axis: placement}}."
    )


def placed_dims(
    entry: Entry,
    name: str,
    global_shape: tuple[int, ...],
    named: Sequence[str],
    placements: Sequence[tuple[str, Cut | None]],
) -> tuple[Dim, ...]:
    """Apply placements to a tensor with named dims; axes on one dim nest in the order given."""
    dims = [unsplit(each) for each in named]
    for axis, cut in placements:
        if cut is not None:
            at = _checked_dim(entry, name, cut, global_shape)
            dims[at] = _placed(entry, name, dims[at], named[at], axis, cut)
    return tuple(dims)


def unsplit(name: str) -> Dim:
    """Return a dim that no axis splits; a fused name, "(qkv heads head)", has several factors."""
    return Dim(tuple(Factor(word) for word in name.strip("()").split()))


def border_of_placements(entry: Entry, placements: Sequence[tuple[str, Cut | None]]) -> Layout:
    """Return the layout of an activation. Dims counted from the front leave those behind open, and the other way
    round."""
    split = [(axis, cut.dim) for axis, cut in placements if cut is not None and cut.pieces == 1]
    if len(split) < sum(cut is not None for _, cut in placements) or len({d < 0 for _, d in split}) > 1:
        raise RuleError(
            f"Rule {entry}: these placements cannot be read for an activation whose number of dims is not known. Count "
            'all dims from the front or all from the back, or give its layout as text, as in "batch seq@tp embed".'
        )
    if not split:
        return Layout.parse("...")
    count = max(-d if d < 0 else d + 1 for _, d in split)
    dims = [unsplit("_")] * count
    for axis, d in split:
        dims[d] = Dim((replace(dims[d].factors[0], axes=(*dims[d].factors[0].axes, axis)),))
    return Layout((..., *dims) if split[0][1] < 0 else (*dims, ...))


def _checked_dim(entry: Entry, name: str, cut: Cut, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= cut.dim < len(shape):
        raise RuleError(
            f'Rule {entry}: dim {cut.dim} is out of range for "{name}", global shape {shape}. Use a dim from '
            f"{-len(shape)} to {len(shape) - 1}, or name the dims in a text."
        )
    return cut.dim % len(shape)


def _placed(entry: Entry, name: str, dim: Dim, registered: str, axis: str, cut: Cut) -> Dim:
    if registered.startswith("("):
        raise RuleError(
            f'Rule {entry}: this dim of "{name}" is fused from "{registered}", and {spelled_placement(cut)} would not '
            f'shard its factors alike. Use "colwise", or shard a factor in a text, as in "heads@{axis}".'
        )
    if cut.pieces == 1 and not dim.fused:
        factor = dim.factors[0]
        return Dim((replace(factor, axes=(*factor.axes, axis)),))
    if cut.pieces > 1 and not dim.axes:
        return Dim((Factor("_", size=cut.pieces), Factor(registered, (axis,))))
    raise RuleError(
        f'Rule {entry}: two axes on one dim of "{name}", one of them strided, have no clear order. Write the layout as '
        'text, as in "(qkv heads@(fsdp,tp) head) embed".'
    )
