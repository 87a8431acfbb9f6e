"""Drawings of a tensor cut into the pieces that ranks hold, with characters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from shardlib._mesh_shape import MeshShape
from shardlib.layout._dims import Dim

__all__ = ["draw", "drawn_dims"]

_MOST = 16  # rows and columns of a picture; of more, the first and the last are drawn
_MOST_RANKS = 6  # of a set of ranks that is not an interval
_Pieces = Sequence[Sequence[slice]]  # for each dim the slices that a rank holds


class Drawable(Protocol):
    """The part of a `Layout` that a picture reads."""

    @property
    def dims(self) -> Sequence[Any]: ...
    @property
    def axes(self) -> frozenset[str]: ...
    @property
    def partial(self) -> Mapping[str, str]: ...
    def axes_of(self, dim: int) -> tuple[str, ...]: ...
    def local_slices(
        self, global_shape: Sequence[int], mesh: MeshShape, coordinate: Mapping[str, int]
    ) -> Sequence[Sequence[slice]]: ...


def draw(layout: Drawable, global_shape: tuple[int, ...], mesh: MeshShape) -> str:
    """Draw a concrete layout; see `Layout.picture`."""
    ranks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    used = [axis for axis in mesh.names if axis in layout.axes]
    for rank in range(mesh.world_size):
        index = mesh.coordinate(rank)
        ranks[tuple(index[axis] for axis in used)].append(rank)
    shards = [
        (layout.local_slices(global_shape, mesh, dict(zip(used, index, strict=True))), of)
        for index, of in ranks.items()
    ]
    dims = drawn_dims(layout, len(global_shape))
    rows, columns = ([None, *dims] if len(dims) == 1 else dims) if dims else (None, None)
    lines = _grid(
        _labels(layout, global_shape, shards, rows),
        _labels(layout, global_shape, shards, columns),
        shards,
        rows,
        columns,
    )
    return "\n".join([f'{global_shape} "{layout}" on "{mesh}"', *lines, *_notes(layout, shards, dims)])


def drawn_dims(layout: Drawable, ndim: int) -> list[int]:
    """Return at most two dims to draw, preferring those that are split."""
    split = [dim for dim in range(ndim) if layout.axes_of(dim)]
    rest = [dim for dim in range(ndim) if dim not in split]
    return sorted((split + rest)[:2])


class _Labels:
    """One side of the picture: the name of its dim, and the intervals between the boundaries of local shards."""

    def __init__(self, name: str, cuts: Sequence[int]) -> None:
        self.name = name
        self.all = list(itertools.pairwise(cuts)) or [(0, 0)]
        half = _MOST // 2
        self.shown: list[tuple[int, int] | None] = (
            [*self.all] if len(self.all) <= _MOST else [*self.all[:half], None, *self.all[-half:]]
        )


def _labels(
    layout: Drawable, shape: Sequence[int], shards: Sequence[tuple[_Pieces, list[int]]], dim: int | None
) -> _Labels:
    if dim is None:
        return _Labels("", (0, 1))
    cuts = {0, shape[dim], *(edge for pieces, _ in shards for part in pieces[dim] for edge in (part.start, part.stop))}
    entry = layout.dims[dim]
    name = " ".join(factor.name for factor in entry.factors) if isinstance(entry, Dim) else ""
    return _Labels(f"dim {dim}" if name.strip("_ ") == "" else name, sorted(cuts))


def _grid(
    rows: _Labels, columns: _Labels, shards: Sequence[tuple[_Pieces, list[int]]], down: int | None, across: int | None
) -> list[str]:
    cells = [[_cell(shards, (down, row), (across, column)) for column in columns.shown] for row in rows.shown]
    starts = [
        "..." if interval is None else str(interval[0]) if across is not None else "" for interval in columns.shown
    ]
    widths = [max(len(text) for text in column) for column in zip(starts, *cells, strict=True)]
    left = ["..." if row is None else f"{row[0]}" if down is not None else "" for row in rows.shown]
    margin = max(len(rows.name), *(len(text) for text in left)) + 1

    def line(begin: str, between: str, end: str) -> str:
        return begin + between.join("─" * (width + 2) for width in widths) + end

    head = []
    if across is not None:
        above = " ".join(f"{start:<{width + 2}}" for start, width in zip(starts, widths, strict=True))
        head = [" " * (margin + 1) + columns.name, f"{rows.name:<{margin}} {above}"]
    lines = [f"{'':<{margin}}{line('┌', '┬', '┐')}"]
    for at, (text, row) in enumerate(zip(left, cells, strict=True)):
        lines += [f"{'':<{margin}}{line('├', '┼', '┤')}"] if at else []
        lines.append(f"{text:<{margin}}│" + "│".join(f" {c:<{w}} " for c, w in zip(row, widths, strict=True)) + "│")
    return [each.rstrip() for each in (*head, *lines, f"{'':<{margin}}{line('└', '┴', '┘')}")]


def _cell(shards: Sequence[tuple[_Pieces, list[int]]], *where: tuple[int | None, tuple[int, int] | None]) -> str:
    """Return the text of one cell: the ranks that hold the given interval of each drawn dim."""
    if any(interval is None for _, interval in where):
        return "..."
    found = [
        rank
        for pieces, ranks in shards
        if all(dim is None or _holds(pieces[dim], interval) for dim, interval in where)
        for rank in ranks
    ]
    return ranks_text(sorted(found))


def _holds(parts: Sequence[slice], interval: tuple[int, int] | None) -> bool:
    assert interval is not None
    return any(part.start <= interval[0] and interval[1] <= part.stop for part in parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks in few characters.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([1, 3]), ranks_text(list(range(0, 64, 4)))
    ('0-3', '1,3', '0,4,8,...,60')
    """
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return ",".join(shown if len(shown) <= _MOST_RANKS else [*shown[:3], "...", shown[-1]])


def _notes(layout: Drawable, shards: Iterable[tuple[_Pieces, list[int]]], dims: Sequence[int]) -> list[str]:
    empty = sorted(r for pieces, ranks in shards if any(_length(parts) == 0 for parts in pieces) for r in ranks)
    hidden = [dim for dim in range(len(layout.dims)) if dim not in dims and layout.axes_of(dim)]
    notes = [f"ranks that hold nothing: {ranks_text(empty)}"] if empty else []
    notes += [f"dim {dim} is sharded over {', '.join(layout.axes_of(dim))} too, and not drawn" for dim in hidden]
    return notes + ([f"still to be reduced: {_written(layout.partial)}"] if layout.partial else [])


def _length(parts: Iterable[slice]) -> int:
    return sum(part.stop - part.start for part in parts)


def _written(partial: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} over {axis}" for axis, kind in partial.items())
