"""The page of models, from the kept results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardlib.testing.census._run import MESHES, Result, read

__all__ = ["page", "summary", "totals"]

_ENOUGH = 0.6  # the share of a model's block parameters from which it counts as sharded


def page(file: Path) -> str:
    """Return the Markdown of `docs/models.md` for a file of results that `write` made."""
    results = read(file)
    facts = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    return "\n".join([_HEAD.format(**_words(results, facts)), *_tables(results), ""])


def summary(results: Sequence[Result]) -> str:
    """Return the totals in one phrase, as the README has them."""
    counts, built = totals(results), sum(result.built for result in results)
    return f"{counts['proved']} of {built} architectures of transformers that the census builds"


def totals(results: Iterable[Result]) -> Counter[str]:
    """Return the number of results by status."""
    return Counter(result.status for result in results)


def _words(results: Sequence[Result], facts: dict[str, object]) -> dict[str, object]:
    counts, built = totals(results), [result for result in results if result.built]
    proved = [result for result in built if result.status == "proved"]
    versions = facts["versions"]
    assert isinstance(versions, dict)
    return {
        "date": facts["date"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "all": len(results),
        "built": len(built),
        "proved": len(proved),
        "share": f"{len(proved) / max(len(built), 1):.0%}",
        "enough": sum(result.sharded >= _ENOUGH for result in proved),
        "wrong": counts["wrong"],
        "refused": counts["refused"],
        "not_built": counts["not built"],
        "meshes": " and ".join(f"`{mesh}`" for mesh in MESHES),
    }


_HEAD = """\
# Models

`shardlib census` builds every architecture of an installed library with a tiny configuration, shards it by its layout
file, its own `tp_plan`, or the rules that [`shardlib init`](how-to/write-rules.md) proposes, and compares one training
step with one device in float64: loss, outputs, gradients, buffers, and parameters after AdamW. This page lists what it
found on {meshes}. It is generated from `benchmarks/results/census.jsonl`.

```text
shardlib census --only llama whisper          # these
shardlib census --sample 20 --seed 7          # some
python benchmarks/census.py                   # all of transformers, continued where it was stopped
```

Run of {date}, on CPU over gloo, with {versions}:

| architectures | number |
|---|---|
| taken up | {all} |
| built and trained on one device | {built} |
| proved on both meshes, or on `tp=2` where outputs compare rows of a batch | {proved} ({share} of those built) |
| proved, with at least 60 % of the block parameters sharded | {enough} |
| numbers differ from one device | {wrong} |
| refused by an error | {refused} |
| not built by the census | {not_built} |

How to read the tables:

- **layout**: `file NAME` is a layout file of shardlib, `tp_plan` the plan that the model carries, `proposed` the rules
  that were suggested from its modules.
- **sharded**: the share of the bytes of parameters in repeated blocks that is sharded on `tp=2`; of all parameters
  where no block repeats.
- **trained**: the share of the parameters that got a gradient. A model of text and images is given text alone if it
  accepts that; its vision tower is then sharded, and its weights are compared, but it computes nothing.

Dropout, layer drop and masking of spectra are off, so this says nothing of random numbers. Weights are moved away from
their first values, so that no zero or one hides a difference.
"""


def _tables(results: Sequence[Result]) -> list[str]:
    by_status: dict[str, list[Result]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result)
    proved = [
        f"| {r.name} | {r.cls} | {r.layout} | {r.sharded:.0%} | {r.trained:.0%} | {_remarks(r)} |"
        for r in by_status.get("proved", ())
    ]
    lines = [
        "## Proved",
        "",
        "| architecture | class | layout | sharded | trained | remarks |",
        "|---|---|---|---|---|---|",
        *proved,
    ]
    for status, title in (("wrong", "Numbers that differ"), ("refused", "Refused")):
        if found := by_status.get(status):
            lines += [
                "",
                f"## {title}",
                "",
                "| architecture | class | layout | proved on | why |",
                "|---|---|---|---|---|",
            ]
            lines += [f"| {r.name} | {r.cls} | {r.layout} | {_meshes(r)} | {_cell(r.error)} |" for r in found]
    if found := by_status.get("not built"):
        lines += [
            "",
            "## Not built",
            "",
            "The census lacks their inputs, their tiny configuration does not run, or their code takes no float64.",
            "",
        ]
        lines += ["| architecture | class | why |", "|---|---|---|"]
        lines += [f"| {r.name} | {r.cls} | {_cell(r.error)} |" for r in found]
    return lines


def _meshes(result: Result) -> str:
    return ", ".join(mesh for mesh, proved in result.proved.items() if proved) or "none"


def _remarks(result: Result) -> str:
    gathered = [f"`{op.removeprefix('aten.').removesuffix('.default')}` gathered" for op in result.gathered]
    mixes = ["`tp=2` only: it compares the rows of a batch"] if result.mixes else []
    return ", ".join(mixes + gathered)


def _cell(text: str) -> str:
    """Return text that stands in a table's cell as it is."""
    short = text if len(text) <= 200 else f"{text[:197]}..."
    return f"`{short.replace('`', chr(39)).replace('|', '/')}`" if short else ""
