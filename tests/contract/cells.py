"""What comes of cells on warm ranks: many in one call, and alone those that may hang or end their processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shardlib import testing
from tests.contract.declare import Habit, habits_of
from tests.contract.harness import DDP, KINDS, MICRO, ONE, Apart, Finding, Part, compare, kind_of, play

__all__ = ["Cells", "wrong"]

_ALONE = 60.0  # seconds for a cell that is run alone, compiling included
_PATIENCE = 2.0  # that its ranks wait for each other
_TOGETHER = 110.0
_AT_ONCE = 4
_OTHERS = {"as DDP": DDP, "microbatches": MICRO}  # what a cell is compared with that is not as on one device


@dataclass
class Cells:
    """The findings of this session, by module, habit and kind.

    A kind's first question runs the module's habits on it, those that are deep apart from the others.
    """

    ranks: Any
    played: dict[tuple[str, str, bool], dict[str, list[Part] | Finding]] = field(default_factory=dict)

    def found(self, module: str, habit: Habit, kind: str) -> Finding:
        """Return what came of a cell."""
        parts = self._parts(module, kind, habit.is_deep(kind))[habit.name]
        if isinstance(parts, Finding):
            return parts
        other = _OTHERS.get(habit.verdict(kind).what, ONE)
        expected = self._parts(module, other)[habit.name]
        if isinstance(expected, Finding) or any(part.error for part in expected):
            return Finding("raised", f"on {other} already: {expected}")
        return compare(parts, expected, staged=kind_of(kind).staged)

    def _parts(self, module: str, kind: str, deep: bool = False) -> dict[str, list[Part] | Finding]:
        if (module, kind, deep) not in self.played:
            names, apart, noticed, alone = _divided(module, kind, deep)
            with ThreadPoolExecutor(_AT_ONCE) as threads:  # they wait, most of the time
                waiting = threads.map(lambda name: self._on_ranks_of_its_own(module, name, kind), alone)
                found = self._together(module, names, kind)
                found |= self._each(module, apart, kind) | self._each(module, noticed, kind, check="always")
                self.played[module, kind, deep] = found | dict(zip(alone, waiting, strict=True))
        return self.played[module, kind, deep]

    def _each(self, module: str, names: list[str], kind: str, check: Any = True) -> dict[str, list[Part] | Finding]:
        """Run habits one after the other."""
        found: dict[str, list[Part] | Finding] = {}
        for name in names:
            try:
                found |= self._play(module, [name], kind, _ALONE, check=check)
            except Apart as apart:
                found[name] = apart.finding
        return found

    def _on_ranks_of_its_own(self, module: str, name: str, kind: str) -> list[Part] | Finding:
        with testing.ranks(2) as pool:
            return Cells(pool)._alone(module, name, kind, _PATIENCE)

    def _together(self, module: str, names: list[str], kind: str) -> dict[str, list[Part] | Finding]:
        """Run habits in one call; where it fails, in several, to find those that are to blame."""
        if len(names) == 1:
            return {names[0]: self._alone(module, names[0], kind)}
        try:
            return self._play(module, names, kind, _TOGETHER) if names else {}
        except Exception:
            size = -(-len(names) // 8)
            parts = [names[i : i + size] for i in range(0, len(names), size)]
            return {name: found for part in parts for name, found in self._together(module, part, kind).items()}

    def _alone(self, module: str, name: str, kind: str, patience: float | None = None) -> list[Part] | Finding:
        try:
            return self._play(module, [name], kind, _ALONE, patience)[name]
        except Apart as apart:
            return apart.finding
        except Exception as error:
            return Finding("hung", " ".join(str(error).split())[:500])

    def _play(
        self,
        module: str,
        names: list[str],
        kind: str,
        timeout: float,
        patience: float | None = None,
        check: Any = True,
    ) -> dict[str, list[Part] | Finding]:
        pool = self.ranks(kind_of(kind).ranks)
        by_rank = pool.run(play, module, names, kind, patience, check, timeout=timeout)
        return {name: list(parts) for name, parts in zip(names, zip(*by_rank, strict=True), strict=True)}


def _divided(module: str, kind: str, deep: bool) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the habits that run together, by themselves, with `check="always"`, and on ranks of their own."""
    habits = [h for h in habits_of(module) if kind not in KINDS or (kind in h.kinds and h.is_deep(kind) == deep)]
    for what, other in _OTHERS.items():
        if kind == other:
            habits = [habit for habit in habits if any(v.what == what for v in habit.declared.values())]
    verdicts = {habit.name: habit.verdict(kind) for habit in habits}
    apart = [name for name, verdict in verdicts.items() if verdict.apart]
    noticed = [name for name, verdict in verdicts.items() if verdict.what == "noticed"]
    alone = [name for name, verdict in verdicts.items() if verdict.alone]
    return [name for name in verdicts if name not in (*apart, *noticed, *alone)], apart, noticed, alone


def wrong(habit: Habit, kind: str, found: Finding) -> str:
    """Say how a finding differs from what is declared, or nothing."""
    declared = habit.verdict(kind)
    if declared.what == "broken":
        # A rank that raised lets the others wait until they say that it is lost.
        mended = found.what == "same" or (found.what == "refused" and "LostRankError" not in found.how)
        return f"{habit.name} on {kind}: declared as broken, and mended: {found}" if mended else ""
    if declared.what == "own part":
        as_declared = found.what != "same"
    elif declared.what in ("refused", "noticed"):
        as_declared = found.what == "refused" and declared.how in found.how
    else:
        as_declared = found.what == "same"
    return "" if as_declared else f"{habit.name} on {kind}: declared as {declared.what} ({declared.how}), found {found}"
