"""Each habit does on each kind what is declared beside it."""

from __future__ import annotations

import pytest

from tests.contract.cells import Cells, wrong
from tests.contract.declare import habits_of, modules
from tests.contract.document import PAGE, page
from tests.contract.harness import KINDS

_PARTS = [
    pytest.param(
        module,
        kind,
        deep,
        marks=[pytest.mark.compiled] * (KINDS[kind].compile is not None) + [pytest.mark.deep] * deep,
        id=f"{module.rpartition('.')[2]}-{kind}{'-deep' * deep}",
    )
    for module in modules()
    for kind in KINDS
    for deep in sorted({habit.is_deep(kind) for habit in habits_of(module)})
]


@pytest.fixture(scope="session")
def cells(ranks) -> Cells:
    return Cells(ranks)


@pytest.mark.parametrize(("module", "kind", "deep"), _PARTS)
def test_habits_do_what_is_declared_of_them(cells: Cells, module: str, kind: str, deep: bool):
    habits = [habit for habit in habits_of(module) if kind in habit.kinds and habit.is_deep(kind) == deep]
    lines = [wrong(habit, kind, cells.found(module, habit, kind)) for habit in habits]
    assert not any(lines), "\n".join(line for line in lines if line)


def test_the_page_says_what_is_declared():
    assert PAGE.read_text() == page(), "write it anew: python -m tests.contract.document"
