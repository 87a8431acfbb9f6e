"""Draw the pictures of the documents: `python docs/_site/pictures.py` writes them into docs/pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch import nn

import shardlib as sl
from shardlib._plan.page import picture
from shardlib._plan.rows import PHASES

FOLDER = Path(__file__).parent.parent / "pictures"
_SIZE = re.compile(r'width="([\d.]+)" height="([\d.]+)"')


def pictures() -> Iterator[tuple[str, str]]:
    """Iterate over names of files and their contents."""
    yield "column.svg", picture(sl.Layout.parse("out@tp in"), (8, 4), sl.MeshShape("dp=2,tp=2"))
    fused = sl.Layout.parse("(qkv heads@tp head) in", sizes={"qkv": 3, "heads": 4})
    yield "fused.svg", picture(fused, (24, 8), sl.MeshShape("tp=2"))
    yield "phases.svg", _phases()
    yield "reward.svg", _curves(FOLDER.parent / "how-to" / "reinforcement-learning.md")


def _phases() -> str:
    """A row for each transform, a column for each phase of one weight."""
    weight = nn.Linear(8, 8, bias=False)
    plan = sl.plan(weight, "dp=4", {"weight": "out in"})
    cells, y = [], 40.0
    for x, phase in enumerate(PHASES):
        cells.append(_text(phase, 130 + 130 * x, 22))
    for transform in (None, sl.zero(1), sl.zero(2), sl.zero(3)):
        row = (plan if transform is None else plan | transform)["weight"]
        cells.append(_text("data parallel" if transform is None else str(transform), 0, y + 55))
        for x, phase in enumerate(PHASES):
            drawing = picture(getattr(row, phase), (8, 8), plan.mesh)
            width, height = map(float, _SIZE.search(drawing).groups())  # type: ignore[union-attr]
            place = f'x="{130 + 130 * x}" y="{y:g}" width="100" height="100" viewBox="0 0 {width:g} {height:g}"'
            cells.append(_SIZE.sub(place, drawing, count=1))
        y += 120
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{y:g}" role="img">{"".join(cells)}</svg>'


def _curves(page: Path) -> str:
    """A line for each column of the page's table of rewards by step."""
    table = re.search(r"^\| step \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    assert table is not None, f"{page.name} has no table that begins with | step |"
    rows = [[float(cell) for cell in row.strip("|").split("|")] for row in table[2].splitlines()]
    cells = [f'<path d="M 40 10 V 170 H {40 + 4 * rows[-1][0]:g}" fill="none" stroke="#808890"/>']
    cells += [_text(f"{value:g}", 10, 174 - 160 * value) for value in (0, 0.5, 1)]
    cells.append(_text("step", 440, 190))
    for column, name in enumerate(table[1].strip("|").split("|"), 1):
        points = " ".join(f"{40 + 4 * row[0]:g},{170 - 160 * row[column]:g}" for row in rows)
        colour = ("#0072b2", "#d55e00", "#009e73")[column - 1]
        cells.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = 80 + 20 * column
        cells.append(f'<path d="M 270 {y - 5} H 295" stroke="{colour}" stroke-width="2"/>')
        cells.append(_text(name.strip().replace("`", ""), 302, y))
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="200" role="img">{"".join(cells)}</svg>'


def _text(words: str, x: float, y: float) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-family="sans-serif" font-size="14" fill="#808890">{words}</text>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in pictures():
        (FOLDER / name).write_text(drawing + "\n")
