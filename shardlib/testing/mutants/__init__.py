"""Real mistakes, planted one at a time: does `equivalent` catch each, and name the module that made it?

A proof that finds nothing proves nothing unless it would have found something. Each mutant is a mistake that somebody
has made, in an engine like ours or in code like yours; the same case without it has to pass.

    python -m shardlib.testing mutants
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from shardlib._mesh_shape import MeshShape
from shardlib.errors import InputError, nearest
from shardlib.testing._pool import shared_pool
from shardlib.testing.equivalence import Report, equivalent
from shardlib.testing.equivalence import case as cases
from shardlib.testing.mutants._engine import ENGINE
from shardlib.testing.mutants._mutant import Arguments, Mutant
from shardlib.testing.mutants._scale import SCALE
from shardlib.testing.mutants._user import USER

__all__ = ["MUTANTS", "Mutant", "Verdict", "main", "prove", "table", "verdict"]

MUTANTS: tuple[Mutant, ...] = (*ENGINE, *SCALE, *USER)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one mutant.

    Attributes:
        caught: whether the proof fails.
        module: the module that the report names.
        named: whether that is the right one.
        clean: whether the same case passes without the mistake.
        looks_like: the report's first guess at the cause.
        seconds: the time of the run with the mistake, including the search for its origin.
    """

    name: str
    mistake: str
    evidence: str
    caught: bool
    module: str
    named: bool
    clean: bool
    looks_like: str
    seconds: float


def prove(name: str, *, planted: bool, at_scale: bool = True) -> Report:
    """Prove one mutant's case with or without its mistake, on a pool of ranks.

    Without `at_scale` the sharded run has the plan's own sizes of buckets alone, which the proof once had: mistakes
    that need several units or buckets are then missed in models as small as these.
    """
    scales = cases.SCALES if at_scale else (False,)
    return shared_pool(_world_size(name)).run(_on_ranks, name, planted, scales)[0]


def verdict(name: str) -> Verdict:
    """Run one mutant both ways.

    Raises:
        InputError: there is no mutant of that name.
    """
    mutant = _mutant(name)
    wrong = prove(name, planted=True)
    origin = wrong.origin
    module = origin.module if origin is not None else ""
    return Verdict(
        name,
        mutant.mistake,
        mutant.evidence,
        not wrong.ok,
        module,
        origin is not None and re.fullmatch(mutant.module, module) is not None,
        _passes(mutant.case),
        origin.causes[0] if origin is not None and origin.causes else origin.what if origin is not None else "",
        wrong.seconds,
    )


@cache
def _passes(case: Callable[[], Arguments]) -> bool:
    """Return whether a case passes without a mistake. Several mutants share one."""
    name = next(mutant.name for mutant in MUTANTS if mutant.case is case)
    return prove(name, planted=False).ok


def _on_ranks(name: str, planted: bool, scales: tuple[bool, ...]) -> Report:
    mutant = _mutant(name)
    with mock.patch.object(cases, "SCALES", scales):
        if not planted:
            return equivalent(**mutant.arguments(planted=False))
        with mutant.planted():
            return equivalent(**mutant.arguments(planted=True))


def _mutant(name: str) -> Mutant:
    by_name = {mutant.name: mutant for mutant in MUTANTS}
    if name not in by_name:
        raise InputError(f'There is no mutant "{name}".{nearest(name, by_name)} There are: {", ".join(by_name)}.')
    return by_name[name]


def _world_size(name: str) -> int:
    return MeshShape(_mutant(name).case()["mesh"]).world_size


def table(verdicts: Iterable[Verdict]) -> str:
    """Format the outcome as a Markdown table, for docs/mutants.md."""
    lines = ["| mistake | seen in | caught | module named | looks like |", "|---|---|---|---|---|"]
    for v in verdicts:
        named = f"`{v.module or 'the model itself'}`" + ("" if v.named else " (wrong)")
        lines.append(f"| {v.mistake} | {v.evidence} | {'yes' if v.caught else 'NO'} | {named} | {v.looks_like} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 1 if a mutant is missed, or a case fails without its mistake."""
    parser = argparse.ArgumentParser(prog="python -m shardlib.testing", description=__doc__)
    parser.add_argument("what", choices=["mutants"])
    parser.add_argument("--only", help="mutants whose name begins so")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    options = parser.parse_args(argv)
    found = []
    for mutant in MUTANTS:
        if options.only is None or mutant.name.startswith(options.only):
            found.append(verdict(mutant.name))
            sys.stderr.write(f"{mutant.name}: {'caught' if found[-1].caught else 'MISSED'}, {found[-1].module}\n")
    print(table(found))
    alarms = [v.name for v in found if not v.clean]
    print(
        f"\n{sum(v.caught for v in found)} of {len(found)} caught, the right module named for "
        f"{sum(v.named for v in found)}; without the mistake {len(found) - len(alarms)} of {len(found)} pass"
        + (f" (not: {', '.join(alarms)})" if alarms else "")
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(v) for v in found], indent=1) + "\n")
    return 0 if found and all(v.caught for v in found) and not alarms else 1
