"""Write `docs/contract.md` from what is declared beside the habits.

python -m tests.contract.document
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

from tests.contract.declare import Habit, Verdict, habits_of, modules
from tests.contract.harness import KINDS

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contract.md"

_HEAD = """# What people do to a model

A sharded model is promised to be the model that was written for one device. People do many things to a model besides
calling it in a loop: they write into weights, hook gradients, wrap optimizers, copy, compile, catch exceptions. This
page is the list of {habits} such habits, each a small program, and of what happens on each kind of sharding. The
programs are in [tests/contract/habits](../tests/contract/habits); the tests run every cell, and fail where it does
something else than the table says. `make test` runs each habit on `tp`, `zero(3)`, `pp` and one of `replicate`,
`zero(1)` and `zero(2)`. It leaves most of the other cells that say "same" to `make test-deep`, and three of four habits
that a pipeline refuses because they call the model. This page is written from the same declarations, by
`python -m tests.contract.document`.

Each program runs in float64 on one device and on sharded models of two ranks (four for `fsdp x tp`), data ranks with
their part of the batch, and returns what it saw: losses, gradients, weights after some steps, what it read. The numbers
have to agree within 1e-10.

The models are small, and so are the units and buckets of their plans: as in a large model at default settings, blocks
are units of their own, stage 3 alternates between two buffers, gradients travel in several buckets, large tensors by
themselves and small ones packed. The habits under "layers of several MiB" have the default settings.

| a cell | means |
|---|---|
| same | everything that the program returns is that of one device |
| *refused* | an error of shardlib, whose number is in the list of messages below |
| *noticed* | ranks differ without a word; `shard_model(check="always")` refuses it, with the message below |
| *as DDP* | not that of one device, but that of torch's DistributedDataParallel on two ranks; the reason is below |
| *microbatches* | not that of one device on the batch, but on its microbatches in turn; the reason is below |
| *own part* | not that of one device, since a rank acts on the part of the model that it holds; the reason is below |
| **differs** | wrong numbers, an error that helps nobody, or ranks that wait for each other; the reason is below |

The kinds: {kinds}. On compiled blocks
and on four ranks, which cost more, only some of the habits run; the other cells of these columns are empty.

{counts}
"""


def page() -> str:
    """Return the text of the page."""
    found = {module: habits_of(module) for module in modules()}
    habits = [habit for several in found.values() for habit in several]
    notes = _notes(habits)
    kinds = ", ".join(f"`{name}` ({_meaning(name)})" for name in KINDS)
    parts = [_HEAD.format(habits=len(habits), kinds=kinds, counts=_counts(habits))]
    for module, several in found.items():
        title = (importlib.import_module(module).__doc__ or "").split("\n")[0].rstrip(".")
        parts.append(f"## {title}\n\n{_table(several, notes)}\n")
    for what, title in _TITLES.items():
        lines = [f"{number}. {_text(how)}" for (kind_of_note, how), number in notes.items() if kind_of_note == what]
        if lines:
            parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


_TITLES = {
    "refused": "Messages of refusals",
    "noticed": 'What `check="always"` says',
    "as DDP": "Where it is as DDP",
    "microbatches": "Where it is as on microbatches",
    "own part": "Where a rank acts on its own part",
    "broken": "Where it differs",
}
_MARKS = {
    "refused": "*refused* {}",
    "noticed": "*noticed* {}",
    "as DDP": "*as DDP* {}",
    "microbatches": "*microbatches* {}",
    "own part": "*own part* {}",
    "broken": "**differs** {}",
}


def _meaning(name: str) -> str:
    kind = KINDS[name]
    mesh = f'mesh "{kind.mesh}"'
    return f"{mesh}, blocks compiled" if kind.compile else mesh


def _notes(habits: list[Habit]) -> dict[tuple[str, str], int]:
    """Number the messages and reasons, each kind of note from 1, in the order of the tables."""
    notes: dict[tuple[str, str], int] = {}
    for habit in habits:
        for verdict in habit.declared.values():
            if (verdict.what, verdict.how) not in notes:
                notes[verdict.what, verdict.how] = 1 + sum(what == verdict.what for what, _ in notes)
    return notes


def _table(habits: list[Habit], notes: dict[tuple[str, str], int]) -> str:
    rows = [f"| habit | {' | '.join(KINDS)} |", f"|---|{'---|' * len(KINDS)}"]
    for habit in habits:
        cells = [_cell(habit.verdict(kind), notes) if kind in habit.kinds else "" for kind in KINDS]
        rows.append(f"| {_text(habit.sentence.removesuffix('.'))} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(verdict: Verdict, notes: dict[tuple[str, str], int]) -> str:
    return "same" if verdict.what == "same" else _MARKS[verdict.what].format(notes[verdict.what, verdict.how])


def _counts(habits: list[Habit]) -> str:
    cells = Counter(habit.verdict(kind).what for habit in habits for kind in habit.kinds)
    words = {
        "same": "are the same",
        "refused": "are refused",
        "noticed": 'are noticed by `check="always"`',
        "as DDP": "are as DDP has them",
        "microbatches": "are as on microbatches",
        "own part": "act on a rank's own part",
        "broken": "differ, for the reason below",
    }
    said = ", ".join(f"{cells[what]} {text}" for what, text in words.items() if cells[what])
    return f"{len(habits)} habits on {len(KINDS)} kinds are {cells.total()} cells: {said}."


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("][", "]\\[").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {_counts([habit for module in modules() for habit in habits_of(module)])}")
