"""Draw the pictures of docs/concepts.md: `python docs/_site/pictures.py` writes them into docs/pictures."""

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


def _text(words: str, x: float, y: float) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-family="sans-serif" font-size="14" fill="#808890">{words}</text>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in pictures():
        (FOLDER / name).write_text(drawing + "\n")
