"""What every test may use besides the fixture `ranks` of our own plugin: marks, torchvision.

At the end of a run it lists the slowest files.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections import Counter, defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

from shardlib.testing.equivalence import case
from tests.torchvision_on_cpu import import_torchvision

# Compiling a block takes seconds on every rank. Tests that are about compiled blocks are marked `compiled`; ranks and
# scripts get this variable from the process that runs the test.
_COMPILER_IS_OFF = "TORCHDYNAMO_DISABLE"
os.environ[_COMPILER_IS_OFF] = "1"
_READ_PATHS = "test_equivalence", "test_documents"


@pytest.fixture(autouse=True)
def _compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("compiled"):
        monkeypatch.delenv(_COMPILER_IS_OFF)


@pytest.fixture(autouse=True)
def _scale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs train at the sizes of a large model alone, unless tests are deep, or read what a proof says of paths."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "deep" and request.path.stem not in _READ_PATHS:
        monkeypatch.setattr(case, "SCALES", (True,))


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    return import_torchvision()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", type=_part, default=(1, 1), help="run every Nth test, from the Kth on")


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise ArgumentTypeError(f"{text!r} is not a part such as 1/2")
    return int(part), int(parts)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _let_most_cases_be_deep(items)
    part, parts = config.getoption("--part")
    items[:] = items[part - 1 :: parts]


def _let_most_cases_be_deep(items: list[pytest.Item]) -> None:
    """Of a test marked `covering`, the cases that cover run by default; the rest of the product is deep."""
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "covering" in marks and "deep" not in marks:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one in cases.values():
        kept = _covering(of_one)
        for item in of_one:
            if item not in kept:
                item.add_marker("deep")


def _covering(items: list[pytest.Function]) -> list[pytest.Function]:
    """Cases that have each value of each parameter once at least.

    Next is the first of those with most values that are new, and with those of the others that were used least.
    """
    values = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in items}
    used: Counter[tuple[str, int]] = Counter()
    kept: list[pytest.Function] = []
    while used.keys() < set().union(*values.values()):
        kept.append(max(items, key=lambda item: (len(values[item] - used.keys()), -sum(used[v] for v in values[item]))))
        used.update(values[kept[-1]])
    return kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the slowest files; under xdist this is the process that hears of all tests. pytest's own line comes last."""
    reports = [report for several in terminalreporter.stats.values() for report in several]
    lines = slowest_files((r.nodeid, r.duration) for r in reports if hasattr(r, "duration"))
    if len(lines) > 2:  # of several files
        terminalreporter.section("slowest files")
        terminalreporter.write_line("\n".join(lines))


def slowest_files(durations: Iterable[tuple[str, float]]) -> list[str]:
    """Seconds and names of ten files, and of all together; setup and teardown count with each test."""
    spent: defaultdict[str, float] = defaultdict(float)
    for test, seconds in durations:
        spent[test.partition("::")[0]] += seconds
    slowest = sorted(spent, key=lambda file: -spent[file])[:10]
    return [
        *(f"{spent[file]:8.1f} s  {file}" for file in slowest),
        f"{sum(spent.values()):8.1f} s  in all {len(spent)} files, added up over processes",
    ]
