"""The report of an audit, as a value, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Plan
from shardlib._plan.fold import fold
from shardlib.errors import ShardlibError, nearest, printable
from shardlib.testing.equivalence.locate import Origin
from shardlib.testing.equivalence.report import Difference

__all__ = ["Advice", "AuditError", "AuditReport", "Check", "Verdict"]

Verdict = Literal["right", "wrong", "weighted", "raised", "not offered", "not reached"]
_SHOWN = {"right": "right", "wrong": "WRONG", "raised": "RAISED"}
_WIDTH = 118
WORTH_A_REMARK = 0.01  # the share of a rank's bytes or operations
_NAMES = len("values after sharding")


@dataclass(frozen=True)
class Advice:
    """The line of a host's interface that usually decides what a check has found.

    Attributes:
        line: what to write.
        why: what it does, and what happens without it.
        link: the page of the host's documentation, or of a public report.
    """

    line: str
    why: str
    link: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that an audit has compared, and its verdict.

    Attributes:
        name: what was compared, such as "gradients".
        verdict: "right" or "wrong"; "weighted" where each data rank's mean counts alike, whatever its number of tokens;
            "raised" where code of the host or the user has raised; "not offered" and "not reached" with the reason.
        said: the finding in one line.
        compared: the number of compared values.
        failures: the values that differ.
        origin: where the difference begins; None without one.
        advice: the lines that usually decide it, the likeliest first.
    """

    name: str
    verdict: Verdict
    said: str = ""
    compared: int = 0
    failures: tuple[Difference, ...] = ()
    origin: Origin | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def ok(self) -> bool:
        return self.verdict not in ("wrong", "raised")

    def line(self) -> str:
        """Return the check as a line of a table."""
        first = self.said.partition("\n")[0]
        return f"  {self.name:<{_NAMES}}  {_SHOWN.get(self.verdict, self.verdict):<11}  {first}".rstrip()

    def __str__(self) -> str:
        return f"{self.name}: {_SHOWN.get(self.verdict, self.verdict)}{f', {self.said}' if self.said else ''}"


@dataclass(frozen=True)
class AuditReport:
    """The outcome of an audit. True in a condition where nothing differs; prints as a table.

    Attributes:
        mesh: the mesh of the ranks.
        host: the library that sharded the model, such as "torch".
        used: its interfaces that were found in the model.
        checks: what was compared, in order.
        layouts: the layout of each parameter, as text such as "out@tp in".
        plan: the plan that `Plan.of` reads from the sharded model; None where its DTensors have no named axes.
        changed: what was redirected for CPU ranks: devices, back ends, dtypes, dropout.
        warnings: the warnings of the sharded run, on the first rank.
        strict: whether "weighted" is a difference.
        seconds: the seconds that the ranks took.
    """

    mesh: MeshShape
    host: str
    used: tuple[str, ...]
    checks: tuple[Check, ...]
    layouts: dict[str, str] = dataclasses.field(default_factory=dict)
    plan: Plan | None = None
    changed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    strict: bool = False
    seconds: float = 0.0

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that found a difference."""
        return tuple(c for c in self.checks if not c.ok or (self.strict and c.verdict == "weighted"))

    @property
    def ok(self) -> bool:
        return not self.failures

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> Check:
        """Return the check of that name.

        Raises:
            KeyError: there is none.
        """
        named = {check.name: check for check in self.checks}
        if name not in named:
            raise KeyError(f'There is no check "{name}".{nearest(name, named)} There are {", ".join(named)}.')
        return named[name]

    def to_json(self) -> str:
        """Return the report as JSON."""
        plan = None if self.plan is None else json.loads(self.plan.to_json())
        flat = dataclasses.asdict(dataclasses.replace(self, plan=None))
        values = flat | {"mesh": str(self.mesh), "ok": self.ok, "plan": plan}
        return json.dumps(values, indent=2, default=str)

    def __str__(self) -> str:
        return printable("\n".join(self._lines()))

    def explained(self) -> str:
        """Return the verdict and what explains it, without the table of checks."""
        return printable("\n".join([self._head(), *self._explanations()]))

    def _lines(self) -> Iterator[str]:
        yield self._head()
        yield ""
        yield from (check.line() for check in self.checks)
        yield from self._explanations()

    def _head(self) -> str:
        by = f"{self.host}{': ' if self.used else ''}{', '.join(self.used)}"
        weighted = any(check.verdict == "weighted" and check.name != "unequal tokens" for check in self.checks)
        same = "computes what one device computes"
        right = f"{same} of each data rank's rows (see what is weighted)" if weighted else same
        verdict = right if self.ok else "does NOT compute what one device computes"
        if self.checks and self.checks[0].verdict == "raised" and self.checks[0].name != "values after sharding":
            verdict = "could not be compared with one device"
        return f"The model {verdict}. Mesh {self.mesh}, sharded by {by}; {self.seconds:.1f} s"

    def _explanations(self) -> Iterator[str]:
        for check in self._explained():
            yield ""
            yield from _explanation(check)
        if replicated := list(self._replicated()):
            yield ""
            yield from replicated
        if self.changed:
            yield ""
            yield from (f"Changed for ranks on CPUs: {text}." for text in self.changed)
        yield from (f"Warning: {text}" for text in self.warnings)

    def _replicated(self) -> Iterator[str]:
        """Iterate over remarks on parameters that an axis could split, and that each of its ranks holds instead."""
        if self.plan is None:
            return
        mesh, params = self.plan.mesh, [row for row in self.plan.rows if row.kind == "parameter"]
        total = sum(row.local_bytes(mesh) for row in params)
        for axis in mesh.model_axes:
            divisible = [
                row for row in params if axis not in row.stored.axes and _divides(mesh[axis], row.global_shape)
            ]
            large = [row for row in divisible if row.local_bytes(mesh) >= WORTH_A_REMARK * total]
            if large:
                names = ", ".join(group.title for group in fold(large, name=lambda row: row.name, same=lambda _: None))
                share = sum(row.local_bytes(mesh) for row in large) / total
                yield f"Each rank of {axis} holds {names}, which {axis} could split: {share:.0%} of its parameters."

    def _explained(self) -> Iterator[Check]:
        """Iterate over the checks whose difference has an origin that no earlier one has, remarks too."""
        seen = set()
        for check in self.checks:
            if check not in self.failures and (check.verdict != "weighted" or check.origin is None):
                continue
            key = check.said if check.origin is None else (check.origin.module, check.origin.what.split(" (")[0])
            explained = check.origin is not None or check.advice or "\n" in check.said
            if explained and key not in seen:
                seen.add(key)
                yield check


def _divides(size: int, shape: Sequence[int]) -> bool:
    return any(length and length % size == 0 for length in shape)


def _explanation(check: Check) -> Iterator[str]:
    yield f"{check.name}: {check.said if check.origin is None else check.origin}"
    for i, advice in enumerate(check.advice):
        title = "usually        " if i == 0 else "or             "
        yield f"  {title}{advice.line}"
        yield from textwrap.wrap(advice.why, _WIDTH, initial_indent=" " * 17, subsequent_indent=" " * 17)
        if advice.link:
            yield f"{'':17}{advice.link}"


class AuditError(ShardlibError, AssertionError):
    """A sharded run that does not compute what one device computes; `report` has everything.

    Args:
        report: the report of `audit`.
    """

    def __init__(self, report: AuditReport) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        return str(self.report)

    def __reduce__(self) -> Any:
        return type(self), (self.report,)
