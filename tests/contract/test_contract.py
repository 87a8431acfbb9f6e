"""Each habit does on each kind what is declared beside it."""

from __future__ import annotations

import pytest

from tests.contract.cells import Cells, wrong
from tests.contract.declare import habits_of, modules
from tests.contract.document import PAGE, page
from tests.contract.harness import KINDS

_KINDS = [pytest.param(kind, marks=pytest.mark.compiled if KINDS[kind].compile else ()) for kind in KINDS]


@pytest.fixture(scope="session")
def cells(ranks) -> Cells:
    return Cells(ranks)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("module", modules(), ids=lambda module: module.rpartition(".")[2])
def test_habits_do_what_is_declared_of_them(cells: Cells, module: str, kind: str):
    habits = [habit for habit in habits_of(module) if kind in habit.kinds]
    lines = [wrong(habit, kind, cells.found(module, habit, kind)) for habit in habits]
    assert not any(lines), "\n".join(line for line in lines if line)


def test_the_page_says_what_is_declared():
    assert PAGE.read_text() == page(), "write it anew: python -m tests.contract.document"
