"""Try `shardlib audit` on public faults, and on models that are sharded rightly, and keep a line for each.

The faults are the files of tests/audit/faults: each has a public report, the sharding that has the fault, and what an
audit should say. A fault is *found* if the report tells of a difference, and *placed* if it names the module and the
line of the interface. Lines go to `results/audit.jsonl`; docs/audit.md has the table that `--table` prints of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from _report import parser, write

sys.path.insert(0, str(Path(__file__).parents[1]))

from shardlib.errors import ShardlibError
from shardlib.testing import AuditReport, Check, audit
from tests.audit import faults
from tests.audit.faults import models

RESULTS = Path(__file__).parent / "results" / "audit.jsonl"
RIGHTLY = Path(__file__).parent / "results" / "audit_rightly.jsonl"
HOSTS = "torch", "transformers", "accelerate"
RIGHT = """## Tried on models that are sharded rightly

`python benchmarks/audit.py --rightly all` audits models that PyTorch's own functions, transformers and Accelerate shard
as one device computes, in several ways each. Two backward passes in a step are a fault of transformers 5.23 where its
plan has `replicated_with_grad_allreduce`: an audit reports it, and it is no false alarm. What is raised is raised
without an audit as well: by three models of one family in float32 and float64, where a norm uses the partial output of
a parallel embedding twice (in bfloat16 they run), and by gpt-oss over `ep`, for tokens whose experts lie on the other
ranks alone."""
OWN = "accumulate", "clip", "generate", "load", "resume", "save"
HUNG = 40.0  # seconds


@dataclass(frozen=True)
class Outcome:
    """Outcome of an audit of a fault.

    Attributes:
        right: whether it reports nothing of the mended case; None where there is none.
    """

    name: str
    host: str
    report: str
    versions: str
    own: bool
    kind: str
    found: bool
    placed: bool
    said: str
    line: str
    right: bool | None
    seconds: float

    def line_of_text(self) -> str:
        marks = (
            f"{'found' if self.found else 'MISSED'}, {'placed' if self.placed else 'NOT placed'}, mended {self.right}"
        )
        return f"{self.name}: {marks}; {self.said[:100]} | {self.line[:60]} [{self.seconds} s]"


def run(case: ModuleType, *, mended: bool = False) -> AuditReport:
    """Audit a case, or the mended one."""
    functions = {name: _own(case, name, mended=mended) for name in OWN}
    shard = getattr(case, "right", case.shard) if mended else case.shard
    more = {name: getattr(case, name, None) for name in ("loss", "optimizer", "split")}
    arguments: dict[str, Any] = {**more, **functions}
    return audit(case.build, shard, case.MESH, case.batch, timeout=HUNG, **arguments)


def _own(case: ModuleType, name: str, *, mended: bool) -> Any:
    """Return the case's own function, but none that it has imported for its own use."""
    found = (getattr(case, f"{name}_right", None) if mended else None) or getattr(case, name, None)
    of_case = found is not None and getattr(found, "__module__", "") in (case.__name__, models.__name__)
    return found if of_case else None


def outcome(name: str) -> Outcome:
    """Audit a fault and its mended case."""
    case, begun = faults.case(name), time.perf_counter()
    fault = case.FAULT
    report = run(case)
    seconds = time.perf_counter() - begun
    has_mended = any(hasattr(case, each) for each in ("right", *(f"{own}_right" for own in OWN)))
    mended = run(case, mended=True) if has_mended else None
    spared = {check.name for check in (_told(mended) if mended else ())} | {"unequal tokens"}
    told = [check for check in _told(report) if check.name not in spared]
    placed, line = _placed(fault, told)
    said = f"{told[0].name}: {told[0].origin.what if told[0].origin else told[0].said}".splitlines()[0] if told else ""
    right = None if mended is None else mended.ok
    return Outcome(
        name, fault.host, fault.report, fault.versions, fault.own, fault.kind, bool(told), placed, said, line, right,
        round(seconds, 1),
    )  # fmt: skip


def _told(report: AuditReport) -> list[Check]:
    """Return the checks that tell of something: differences, and what the library's own means do not do."""
    told = "wrong", "raised", "weighted"
    return [c for c in report.checks if c.verdict in told or (c.advice and c.verdict == "not offered")]


def _placed(fault: faults.Fault, told: list[Check]) -> tuple[bool, str]:
    """Return whether some check names the module and the line, and that line."""
    for check in told:
        module = "" if check.origin is None else check.origin.module
        text = f"{check.said} {check.origin or ''}"
        named = not fault.module or fault.module in text or module.startswith(fault.module)
        lines = [advice.line for advice in check.advice if fault.line.lower() in f"{advice.line} {advice.why}".lower()]
        if named and lines:
            return True, lines[0]
    return False, next((advice.line for check in told for advice in check.advice), "")


def table(outcomes: list[Outcome]) -> str:
    """Return the table of docs/audit.md."""
    rows = ["| fault | library | report | found | placed | the line that is named |", "|---|---|---|---|---|---|"]
    for each in outcomes:
        marks = " | ".join("yes" if mark else "no" for mark in (each.found, each.placed))
        link = f"[{each.report.split('github.com/')[-1]}]({each.report})"
        rows.append(
            f"| {each.name.replace('_', ' ')} | {each.host}{'' if each.own else ' (planted)'} | {link} | {marks} | "
            f"{f'`{each.line}`' if each.line else ''} |"
        )
    return "\n".join(rows)


@dataclass(frozen=True)
class Verdict:
    """Verdict of an audit on a model that is sharded rightly."""

    host: str
    case: str
    ok: bool
    said: str
    seconds: float


def verdict(host: str, case: Any) -> Verdict:
    """Audit a model that is sharded rightly."""
    begun = time.perf_counter()
    context = None if case.context is contextlib.nullcontext else case.context
    try:
        report = audit(
            case.build, case.shard, case.mesh, case.batch, loss=case.loss, split=case.split, context=context,
            timeout=HUNG,
        )  # fmt: skip
        told = str(report.failures[0]).splitlines()[0] if report.failures else ""
        ok = report.ok
    except ShardlibError as error:
        ok, told = False, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Verdict(host, str(case), ok, told[:200], round(time.perf_counter() - begun, 1))


def known_verdicts() -> dict[tuple[str, str], Verdict]:
    """Return the lines of the results by host and case."""
    return {(each["host"], each["case"]): Verdict(**each) for each in _lines(RIGHTLY)}


def rightly(hosts: Sequence[str], *, quick: bool) -> None:
    """Audit the models of some hosts, and keep a line for each."""
    known = known_verdicts()
    for host in hosts:
        cases = importlib.import_module(f"tests.audit.rightly.{host}_models").CASES
        for case in cases[:: 20 if quick else 1]:
            made = verdict(host, case)
            known[made.host, made.case] = made
            print(f"{'ok ' if made.ok else 'BAD'} {host}: {made.case} {made.said} [{made.seconds} s]", flush=True)
        if not quick:
            text = "".join(json.dumps(asdict(known[key])) + "\n" for key in sorted(known))
            RIGHTLY.write_text(text, encoding="utf-8")


def rightly_table() -> str:
    """Return the table of docs/audit.md of models that are sharded rightly."""
    made = known_verdicts().values()
    rows = ["| sharded by | models and ways | nothing reported | reported |", "|---|---|---|---|"]
    for host in HOSTS:
        of_host = [each for each in made if each.host == host]
        told = Counter(each.said.partition(",")[0] for each in of_host if not each.ok)
        said = "; ".join(f"{count}: {text}" for text, count in told.most_common())
        rows.append(f"| {host} | {len(of_host)} | {sum(each.ok for each in of_host)} | {said} |")
    return "\n".join(rows)


def read() -> dict[str, Outcome]:
    """Return the lines of the results by name."""
    return {each["name"]: Outcome(**each) for each in _lines(RESULTS)}


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the values of a file of JSON lines; none where it is not there."""
    return list(map(json.loads, file.read_text(encoding="utf-8").splitlines())) if file.exists() else []


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--names", default=None, help="only these faults, separated by commas")
    arguments.add_argument("--table", action="store_true", help="print the table of docs/audit.md from the results")
    arguments.add_argument("--rightly", choices=(*HOSTS, "all"), help="audit models that this library shards rightly")
    args: argparse.Namespace = arguments.parse_args()
    if args.rightly:
        rightly(HOSTS if args.rightly == "all" else (args.rightly,), quick=args.quick)
        return
    known = read()
    if args.table:
        print(f"{table([known[name] for name in faults.cases() if name in known])}\n\n{RIGHT}\n\n{rightly_table()}")
        return
    names = args.names.split(",") if args.names else faults.cases()[:: 8 if args.quick else 1]
    for name in names:
        known[name] = each = outcome(name)
        print(each.line_of_text(), flush=True)
        if not args.quick:
            RESULTS.write_text("".join(json.dumps(asdict(known[n])) + "\n" for n in sorted(known)), encoding="utf-8")
    made = [known[name] for name in names]
    print(f"{sum(e.found for e in made)} of {len(made)} found, {sum(e.placed for e in made)} placed")
    if args.json:
        write(args.json, {"faults": [asdict(each) for each in made]})


if __name__ == "__main__":
    main()
