"""Plans and moves as self-contained HTML pages: tables, pictures of the layouts, and the matrix of what is sent."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from shardlib._mesh_shape import MeshShape
from shardlib._plan import pictures, text
from shardlib._plan.fold import Folded
from shardlib._plan.readable import human_bytes
from shardlib._plan.rows import PHASES, Row
from shardlib._plan.table import PlanTable
from shardlib.layout import Layout
from shardlib.layout._picture import drawn_dims

__all__ = ["body", "moves_body", "picture", "write", "write_body"]

_STYLE = """
.shardlib { font: 14px/1.45 system-ui, sans-serif; color: #1c2330; }
.shardlib h1 { font-size: 18px } .shardlib h2 { font-size: 15px; margin: 1.6em 0 .4em }
.shardlib table { border-collapse: collapse } .shardlib td, .shardlib th { padding: 3px 10px; text-align: left;
  vertical-align: top; border-bottom: 1px solid #e3e6ec } .shardlib th { border-bottom: 2px solid #9aa3b2 }
.shardlib code, .shardlib td:first-child { font-family: ui-monospace, monospace; font-size: 13px }
.shardlib .number { text-align: right; white-space: nowrap }
.shardlib figure { margin: 0; width: 170px } .shardlib figcaption { font-size: 12px; overflow-wrap: anywhere }
.shardlib .shards td:first-child { max-width: 230px; overflow-wrap: anywhere }
.shardlib .keys span { white-space: nowrap; margin-right: 8px } .shardlib .keys i { display: inline-block;
  width: 10px; height: 10px; margin-right: 3px }
.shardlib .bar { display: flex; width: 640px; max-width: 100%; height: 26px; margin: 6px 0 }
.shardlib .bar div { overflow: hidden; white-space: nowrap; padding: 3px 0 0 4px; font-size: 12px;
  box-sizing: border-box }
""".strip()
_SIDE, _SMALL = 200.0, 150.0  # pixels, of a picture's longer side, by itself and in the table of the page
_MOST_KEYS = 16  # shards whose labels do not fit in a picture and stand below it
_COLOURS = {"parameters": "#8db7e8", "gradients": "#f2b38f", "state": "#a9d6a0", "buffers": "#d9c6ec"}
_MOST_PIECES = 256  # a picture of more shards than this is unreadable
_MOST_NAMES = 3  # tensors in one caption
_LETTER = 6.5, 14.0  # pixels that a letter of a label takes
_Slices = tuple[slice, ...]


def write(plan: PlanTable, path: str | PathLike[str]) -> None:
    """Write the page to a file."""
    write_body(body(plan), text.headline(plan), path)


def write_body(content: str, title: str, path: str | PathLike[str]) -> None:
    """Write a page with this body to a file."""
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    Path(path).write_text(f"{head}\n{content}\n</html>\n", encoding="utf-8")


def body(plan: PlanTable) -> str:
    """Return the body of the page, as notebooks show it."""
    groups = text.fold_rows(plan.rows)
    parts = [
        f"<style>{_STYLE}</style>",
        f"<h1>{escape(text.headline(plan))}</h1>",
        f"<p>{escape(text.memory_line(plan))}</p>",
        _memory_bar(plan),
        *(f"<p>{escape(note)}</p>" for note in plan.notes),
        *_pipeline(plan),
        *(f"<h2>{escape(title)}</h2>\n{_table(columns, rows)}" for title, columns, rows in text.tables(plan)),
        f"<p>{escape(text.step_line(plan))}</p>",
        *_shards(groups, plan.mesh),
    ]
    return _joined(parts)


def moves_body(
    headline: str,
    busiest: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    what: str,
    places: Sequence[int],
    sent: Mapping[tuple[int, int], int],
) -> str:
    """Return the body of a page of moves.

    Args:
        headline: the title.
        busiest: the line below it.
        columns: the head of the table of tensors.
        rows: its lines; without any, nothing is sent.
        what: what sends and receives, "rank" or "node".
        places: the numbers of these.
        sent: the bytes from one to another.
    """
    parts = [f"<style>{_STYLE}</style>", f"<h1>{escape(headline)}</h1>"]
    if rows:
        parts += [f"<p>{escape(busiest)}</p>", f"<h2>Sent from {what} to {what}</h2>", _matrix(what, places, sent)]
        parts += ["<h2>Tensors</h2>", _table(columns, rows)]
    return _joined(parts)


def _matrix(what: str, places: Sequence[int], sent: Mapping[tuple[int, int], int]) -> str:
    """Draw bytes as a table: the more are sent, the darker is the cell."""
    most = max(sent.values())
    head = "".join(f"<th>{b}</th>" for b in places)
    lines = (
        f"<tr><th>{a}</th>{''.join(_sent(what, a, b, sent.get((a, b), 0), most) for b in places)}</tr>" for a in places
    )
    return f'<table class="links"><tr><th>from \\ to</th>{head}</tr>\n' + "\n".join(lines) + "\n</table>"


def _sent(what: str, source: int, target: int, size: int, most: int) -> str:
    if not size:
        return "<td></td>"
    label = f"{what} {source} to {what} {target}: {human_bytes(size)}"
    shade = f"color-mix(in srgb, {_COLOURS['parameters']} {max(8, round(100 * size / most))}%, white)"
    return f'<td class="number" title="{label}" style="background:{shade}">{human_bytes(size)}</td>'


def _joined(parts: Iterable[str]) -> str:
    return '<div class="shardlib">\n' + "\n".join(parts) + "\n</div>"


def _pipeline(plan: PlanTable) -> Iterator[str]:
    if plan.stages:
        yield f"<p>{escape(pictures.facts(plan))}</p>"
        yield f"<h2>What ranks do when</h2><div>{pictures.drawn(pictures.times(plan))}</div>"


def _memory_bar(plan: PlanTable) -> str:
    """Draw what the largest rank holds, to scale."""
    memory = plan.memory()
    held = {name: size for name in _COLOURS if (size := getattr(memory, name))}
    parts = (
        f'<div title="{name} {human_bytes(size)}" style="width:{100 * size / memory.total:.2f}%;'
        f'background:{_COLOURS[name]}">{name} {human_bytes(size)}</div>'
        for name, size in held.items()
    )
    return f'<div class="bar">{"".join(parts)}</div>'


def picture(layout: Layout, global_shape: Sequence[int], mesh: MeshShape, *, side: float = _SIDE) -> str:
    """Draw a tensor and the local shards of ranks as SVG; at most two dims, preferring those that are sharded.

    Each colour is one local shard, labelled with its coordinate where that fits; of a fused dim it is several
    stripes.
    """
    axes = {axis: size for axis, size in mesh.items() if axis in layout.axes and size > 1}
    dims = drawn_dims(layout, len(global_shape))
    size = [global_shape[dim] for dim in dims]
    width, height = _box(size, side)
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" role="img">'
    border = f'<rect width="{width:g}" height="{height:g}" fill="none" stroke="#1c2330"/>'
    pieces = mesh.only(tuple(axes)).world_size if axes else 1
    if pieces > _MOST_PIECES:
        label = f'<text x="6" y="{height / 2 + 4:g}" font-size="11">{pieces} shards</text>'
        return f'{frame}<rect width="{width:g}" height="{height:g}" fill="#e3e6ec"/>{label}{border}</svg>'
    shapes = [
        _piece(layout.local_slices(global_shape, mesh, at), dims, size, (width, height), at, index / pieces)
        for index, at in enumerate(_coordinates(axes))
    ]
    return f"{frame}{''.join(shapes)}{border}</svg>"


def _shards(groups: Iterable[Folded[Row]], mesh: MeshShape) -> Iterator[str]:
    """Iterate over the parts of the section of pictures: a row for each combination of global shape and layouts, a
    column for each phase. Phases side by side with one layout share a picture."""
    rows = list(_rows(groups, mesh))
    if rows:
        head = "".join(f"<th>{title}</th>" for title in ("tensor", *PHASES))
        yield "<h2>Local shards</h2>"
        yield (
            "<p>Each colour is one local shard. Its label is the place in the mesh of the ranks that hold it; the "
            "pointer shows it too. Dim 0 goes down, dim 1 to the right. A picture below several phases is that of all "
            "of them.</p>"
        )
        yield f'<table class="shards"><tr>{head}</tr>\n' + "\n".join(rows) + "\n</table>"


def _rows(groups: Iterable[Folded[Row]], mesh: MeshShape) -> Iterator[str]:
    shown: dict[tuple[tuple[int, ...], tuple[Layout, ...]], list[str]] = {}
    for group in groups:
        if any(layout.axes for layout in group.first.layouts.values()):
            key = (group.first.global_shape, tuple(group.first.layouts.values()))
            shown.setdefault(key, []).append(group.title)
    for (shape, layouts), titles in shown.items():
        more = f" and {len(titles) - _MOST_NAMES} more" if len(titles) > _MOST_NAMES else ""
        cells = [f"<td>{escape(', '.join(titles[:_MOST_NAMES]))}{more}<br>{tuple(shape)}</td>"]
        for layout, same in itertools.groupby(layouts):
            cells.append(f'<td colspan="{len(list(same))}">{_figure(layout, shape, mesh)}</td>')
        yield f"<tr>{''.join(cells)}</tr>"


def _figure(layout: Layout, shape: Sequence[int], mesh: MeshShape) -> str:
    drawing = picture(layout, shape, mesh, side=_SMALL)
    caption = f"<code>{escape(str(layout))}</code>{_replicated_on(layout, mesh)}"
    return f"<figure>{drawing}<figcaption>{caption}{_keys(drawing)}</figcaption></figure>"


def _keys(drawing: str) -> str:
    """List the colours of a picture in which labels do not fit."""
    shards = re.findall(r'<g fill="([^"]*)"[^>]*><title>([^<]*)</title>', drawing)
    if all(f">{name}</text>" in drawing for _, name in shards) or not 1 < len(shards) <= _MOST_KEYS:
        return ""
    keys = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for colour, name in shards)
    return f'<div class="keys">{keys}</div>'


def _replicated_on(layout: Layout, mesh: MeshShape) -> str:
    axes = [axis for axis, size in mesh.items() if size > 1 and axis not in layout.axes]
    return f"<br>the same on every rank of {escape(', '.join(axes))}" if axes else ""


def _box(size: Sequence[int], side: float) -> tuple[float, float]:
    """Return width and height in pixels; dim 0 goes down, and each side has a minimum."""
    rows, columns = (size[0] if size else 1), (size[1] if len(size) > 1 else 1)
    longest = max(rows, columns, 1)
    return max(side * columns / longest, 40.0), max(side * rows / longest, 40.0)


def _piece(
    slices: Sequence[_Slices],
    dims: Sequence[int],
    size: Sequence[int],
    box: tuple[float, float],
    coordinate: Mapping[str, int],
    hue: float,
) -> str:
    full: _Slices = (slice(0, 1),)
    rows = _scaled(slices[dims[0]] if dims else full, size[0] if size else 1, box[1])
    columns = _scaled(slices[dims[1]] if len(dims) > 1 else full, size[1] if len(size) > 1 else 1, box[0])
    name = escape(" ".join(f"{axis}={index}" for axis, index in coordinate.items()) or "every rank")
    colour = f"hsl({360 * hue:.0f} 62% 72%)"
    rects = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"/>'
        for (y, h), (x, w) in itertools.product(rows, columns)
    ]
    label = "".join(_label(name, x, y, w, h) for (y, h), (x, w) in itertools.product(rows, columns))
    return f'<g fill="{colour}" stroke="#fff" stroke-width=".5"><title>{name}</title>{"".join(rects)}</g>{label}'


def _label(name: str, x: float, y: float, width: float, height: float) -> str:
    """Label a shard with the ranks that hold it, where the label fits."""
    if len(name) * _LETTER[0] > width or height < _LETTER[1]:
        return ""
    place = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}" text-anchor="middle" font-size="11"'
    return f'<text {place} font-family="sans-serif" fill="#1c2330">{name}</text>'


def _scaled(slices: _Slices, size: int, pixels: float) -> list[tuple[float, float]]:
    """Return (start, length) in pixels."""
    unit = pixels / max(size, 1)
    return [(part.start * unit, (part.stop - part.start) * unit) for part in slices]


def _coordinates(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for indices in itertools.product(*map(range, axes.values())):
        yield dict(zip(axes, indices, strict=True))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    numbers = [column in text.NUMBERS for column in columns]
    lines = ["".join(_cell(cell, number) for cell, number in zip(row, numbers, strict=True)) for row in rows]
    return f"<table><tr>{head}</tr>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def _cell(cell: str, number: bool) -> str:
    return f'<td class="number">{escape(cell)}</td>' if number else f"<td>{escape(cell)}</td>"
