"""The page of models, from the kept results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.testing.census._run import MESHES, Result, read

__all__ = ["page", "summary", "totals"]

_ENOUGH = 0.6  # the share of a model's block parameters from which it counts as sharded


def page(file: Path, on_jax: Path, on_torchax: Path) -> str:
    """Return the Markdown of `docs/models.md` for files of results that `write` made, of the two engines, and for the
    lines of `benchmarks/census_torchax.py`."""
    results = read(file)
    facts = _facts(file)
    found_on_jax = {(r.library, r.name): r for r in read(on_jax)}
    libraries = _by_library(results)
    head = _HEAD.format(
        date=facts["date"],
        versions=", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
        meshes=" and ".join(f"`{mesh}`" for mesh in MESHES),
        totals=_totals(libraries),
        jax=_jax(list(found_on_jax.values()), _facts(on_jax), _statuses(on_torchax)),
    )
    tables = [line for name, found in libraries.items() for line in _tables(name, found, found_on_jax)]
    return "\n".join([head, *tables, ""])


def _facts(file: Path) -> Mapping[str, Any]:
    """Return the date and the versions that stand in the first line of a file."""
    found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    return found


def _statuses(on_torchax: Path) -> dict[tuple[str, str], str]:
    lines = map(json.loads, on_torchax.read_text(encoding="utf-8").splitlines())
    return {(line["library"], line["name"]): line["status"] for line in lines}


def _jax(results: Sequence[Result], facts: Mapping[str, Any], torchax: Mapping[tuple[str, str], str]) -> str:
    """Return what was found on the JAX engine: the totals, torchax's beside them, and each architecture that was not
    proved."""
    counts, built = totals(results), [r for r in results if r.built]
    exported = [r for r in built if r.status != "not exported"]
    theirs, beside = [Counter(torchax.get((r.library, r.name)) for r in group) for group in (built, exported)]
    lines = [
        f"Run of {facts['date']} with jax {facts['versions']['jax']}, of {len(results)} architectures:",
        "",
        "| | shardlib | torchax 0.0.13 |",
        "|---|---|---|",
        f"| built and trained on one device by torch | {len(built)} | {sum(theirs.values()) - theirs[None]} taken up |",
        f"| exported by `torch.export` | {len(exported)} | |",
        f"| right, of those exported | {counts['proved']} ({_share(counts['proved'], len(exported))}) "
        f"| {beside['right']} ({_share(beside['right'], sum(beside.values()) - beside[None])} of those taken up) |",
        f"| numbers differ | {counts['wrong']} | {theirs['wrong']} |",
        f"| refused by an error | {counts['refused']} | {theirs['error']} |",
        f"| not exported, and right on torchax | | {theirs['right'] - beside['right']} |",
        "",
        "shardlib's are right where a training step is that of one device on all three meshes, within what rounding in",
        "float64 allows; torchax's where loss and gradients are on one device, to a millionth of the largest gradient.",
    ]
    others = [r for r in built if r.status != "proved"]
    lines += ["", "| architecture | class | found | why |", "|---|---|---|---|"] if others else []
    lines += [f"| {r.name} ({r.library}) | {r.cls} | {r.status} | {_cell(r.error)} |" for r in others]
    return "\n".join([*lines, ""])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def summary(results: Sequence[Result]) -> str:
    """Return the totals in one phrase, as the README has them."""
    counts, built = totals(results), sum(result.built for result in results)
    *names, last = _by_library(results)
    return f"{counts['proved']} of {built} architectures of {', '.join(names)} and {last} that the census builds"


def totals(results: Iterable[Result]) -> Counter[str]:
    """Return the number of results by status."""
    return Counter(result.status for result in results)


def _by_library(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results of each library, the largest first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.library, []).append(result)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _totals(libraries: Mapping[str, Sequence[Result]]) -> str:
    columns = [_column(results) for results in libraries.values()]
    lines = [f"| architectures | {' | '.join(libraries)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {what} | {' | '.join(column[what] for column in columns)} |" for what in columns[0]]
    return "\n".join(lines)


def _column(results: Sequence[Result]) -> dict[str, str]:
    counts, built = totals(results), [result for result in results if result.built]
    proved = [result for result in built if result.status == "proved"]
    return {
        "taken up": str(len(results)),
        "built and trained on one device": str(len(built)),
        "proved on both meshes, or on `tp=2` where rows of a batch mix": f"{len(proved)} "
        f"({100 * len(proved) // max(len(built), 1)} % of those built)",
        "proved, with at least 60 % of the block parameters sharded": str(
            sum(result.sharded >= _ENOUGH for result in proved)
        ),
        "numbers differ from one device": str(counts["wrong"]),
        "refused by an error": str(counts["refused"]),
        "not built by the census": str(counts["not built"]),
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
shardlib census timm --sample 20              # of another library
shardlib census --only llama --engine jax     # on JAX
python benchmarks/census.py                   # all of transformers, continued where it was stopped
```

Of timm and torchvision the census takes one small model of each family; a family of timm that is not in the table was
not run. Of diffusers it takes every UNet, transformer and autoencoder. It does not know torchaudio, which was built for
CUDA and does not import beside a torch for CPUs.

Run of {date}, on CPU over gloo, with {versions}:

{totals}

How to read the tables:

- **layout**: `file NAME` is a layout file of shardlib, `tp_plan` the plan that the model carries, `proposed` the rules
  that were suggested from its modules. `tp_plan, proposed` is a plan with rules suggested for blocks that it leaves
  out, such as those of a vision tower. A line says what was found when it was run; layout files and suggestions that
  came later may shard more.
- **sharded**: the share of the bytes of parameters in repeated blocks that is sharded on `tp=2`; of all parameters
  where no block repeats.
- **collectives**: how many a training step on `tp=2` has, forward and backward, in the repeated block that has most;
  in the whole model where no block repeats.
- **trained**: the share of the parameters that got a gradient. A model of text and images is given text alone if it
  accepts that; its vision tower is then sharded, and its weights are compared, but it computes nothing.
- **a batch is not its halves**: on one device, too, two halves of a batch do not give what the batch gives, since the
  model compares its rows, keeps statistics of them, or orders its outputs in another way. Data axes compute something
  else then, and the census proves such a model on `tp=2`.

Dropout, layer drop and masking of spectra are off, so this says nothing of random numbers. Where code asks for float32,
float64 is used instead if the two do not go into one op, or if rounding in float32 would hide a difference. Weights are
moved away from their first values, so that no zero or one hides a difference.

## On JAX

`shardlib census --engine jax` compares the same step of the same models on [`shardlib.jax`](jax.md) with torch on one
device, on `tp=1`, `tp=2` and `dp=2,tp=2`. The column **JAX** has what it found, and is empty where an architecture was
not run. `python benchmarks/census.py --engine jax` runs all of transformers into
`benchmarks/results/census_jax.jsonl`, and continues where it was stopped; then `python benchmarks/census_torchax.py`
trains the same models on torchax, with the same batches.

{jax}"""


def _tables(library: str, results: Sequence[Result], on_jax: Mapping[tuple[str, str], Result]) -> list[str]:
    by_status: dict[str, list[Result]] = {}
    for result in results:
        by_status.setdefault(result.status, []).append(result)
    proved = [
        f"| {r.name} | {r.cls} | {r.layout} | {r.sharded:.0%} | {_or_empty(r.collectives)} | {r.trained:.0%} | "
        f"{_status(on_jax.get((r.library, r.name)))} | {_remarks(r)} |"
        for r in by_status.get("proved", ())
    ]
    lines = [
        f"## {library}: proved",
        "",
        "| architecture | class | layout | sharded | collectives | trained | JAX | remarks |",
        "|---|---|---|---|---|---|---|---|",
        *proved,
    ]
    for status, title in (("wrong", "numbers that differ"), ("refused", "refused")):
        if found := by_status.get(status):
            lines += [
                "",
                f"## {library}: {title}",
                "",
                "| architecture | class | layout | proved on | why |",
                "|---|---|---|---|---|",
            ]
            lines += [f"| {r.name} | {r.cls} | {r.layout} | {_meshes(r)} | {_cell(r.error)} |" for r in found]
    if found := by_status.get("not built"):
        lines += [
            "",
            f"## {library}: not built",
            "",
            "The census lacks their inputs, their tiny configuration does not run, or their code takes no float64.",
            "",
        ]
        lines += ["| architecture | class | why |", "|---|---|---|"]
        lines += [f"| {r.name} | {r.cls} | {_cell(r.error)} |" for r in found]
    return lines


def _meshes(result: Result) -> str:
    return ", ".join(mesh for mesh, proved in result.proved.items() if proved) or "none"


def _status(result: Result | None) -> str:
    return "" if result is None else result.status


def _or_empty(number: int | None) -> str:
    return "" if number is None else str(number)


def _remarks(result: Result) -> str:
    gathered = [f"`{op.removeprefix('aten.').removesuffix('.default')}` gathered" for op in result.gathered]
    mixes = ["`tp=2` only: a batch is not its halves"] if result.mixes else []
    return ", ".join(mixes + gathered)


def _cell(text: str) -> str:
    """Return text that stands in a table's cell as it is."""
    short = text if len(text) <= 200 else f"{text[:197]}..."
    return f"`{short.replace('`', chr(39)).replace('|', '/')}`" if short else ""
