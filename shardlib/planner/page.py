"""The HTML page of a search: its table, reasons, calls, and the streams of one rank over time."""

from __future__ import annotations

from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from shardlib._plan.quantities import spell_quantity

__all__ = ["timeline", "write"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse } td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #d8dee6 }
td:nth-child(-n+3), th:nth-child(-n+3) { text-align: left } pre { background: #f4f6f9; padding: .8rem; overflow: auto }
svg text { font: 11px system-ui, sans-serif } .near { color: #5a6775 }
"""
_COLOURS = {"forward": "#8db7e8", "backward": "#f2b38f", "gather": "#a9d6a0", "reduce": "#c9b3e6"}
_WIDTH, _LANE = 1000.0, 26.0  # pixels
_MOST = 600  # spans of a picture


def write(plans: Any, path: str | PathLike[str]) -> None:
    """Write the page."""
    head, *rows = plans.rows()
    table = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    parts = [
        f"<h1>{plans.world} ranks of {escape(plans.cluster.name)}, {plans.batch} examples a step</h1>",
        f"<table><tr>{table}</tr>{body}</table>",
        '<p class="near">~ within what predicted times can tell</p>' if plans.near_ties() else "",
    ]
    for number, each in enumerate(plans, 1):
        reasons = "".join(f"<li>{escape(line)}</li>" for line in (each.behind, *each.reasons) if line)
        parts += [
            f"<h2>{number}. {escape(str(each.mesh))}</h2>",
            f"<pre>{escape(each.call)}</pre><ul>{reasons}</ul><pre>{escape(str(each.time))}</pre>",
            timeline(each.time),
        ]
    refused = "".join(f"<li>{escape(line)}</li>" for line in plans.refused)
    parts.append(f"<h2>Refused</h2><ul>{refused}</ul>" if refused else "")
    title = f"Plans for {plans.world} ranks of {plans.cluster.name}"
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>"
    )
    Path(path).write_text(text, encoding="utf-8")


def timeline(time: Any) -> str:
    """Draw what a rank does, one lane for each stream."""
    spans = time.spans[:_MOST]
    if not spans:
        return ""
    length = max(span.end for span in spans) or 1.0
    lanes = [stream for stream in ("compute", "communication") if any(span.stream == stream for span in spans)]
    drawn = []
    for span in spans:
        x, width = 110 + _WIDTH * span.start / length, max(_WIDTH * (span.end - span.start) / length, 0.3)
        y = 4 + _LANE * lanes.index(span.stream)
        said = f"{span.name}: {spell_quantity(span.end - span.start, 's', digits=3)}"
        drawn.append(
            f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.2f}" height="{_LANE - 6:.0f}" fill="{_colour(span.name)}" '
            f'stroke="#fff" stroke-width=".3"><title>{escape(said)}</title></rect>'
        )
    names = "".join(f'<text x="0" y="{18 + _LANE * i:.0f}">{lane}</text>' for i, lane in enumerate(lanes))
    more = "" if len(spans) == len(time.spans) else f" (the first {_MOST} of {len(time.spans)} parts)"
    height = 8 + _LANE * len(lanes)
    return (
        f"<p>One rank over {spell_quantity(length, 's', digits=3)}{more}</p>"
        f'<svg width="100%" viewBox="0 0 {_WIDTH + 120:.0f} {height:.0f}" role="img" aria-label="timeline of a rank">'
        f"{names}{''.join(drawn)}</svg>"
    )


def _colour(name: str) -> str:
    first = name.partition(" ")[0]
    if first in _COLOURS:
        return _COLOURS[first]
    kind = next((letter for letter in name if letter.isalpha()), "")  # an action of a pipeline, as in 0F3
    return {"F": "#8db7e8", "B": "#f2b38f", "I": "#f2cf8f", "W": "#a9d6a0"}.get(kind, "#cccccc")
