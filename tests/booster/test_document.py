"""The page about boosters says what the code says."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass

import pytest

from shardlib import booster
from shardlib.booster._options import Options, refused_keywords
from shardlib.booster._refusals import refusals, requests
from tests.house import source
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "boosters.md").read_text()


def _code(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


@pytest.mark.parametrize(
    ("title", "rows"), [("Keywords that are refused", refusals()), ("Requests for speed or memory", requests())]
)
def test_the_tables_of_keywords_have_all_of_them_with_their_reasons(title, rows):
    section = PAGE.partition(f"### {title}\n")[2].partition("\n### ")[0]
    written = [line for line in section.splitlines() if line.startswith("| `")]
    assert written == [f"| {_code(names)} | {_code(owners)} | {reason} |" for names, owners, reason in rows]


def _kinds(base: type[Options] = Options) -> Iterator[type[Options]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def test_nothing_is_refused_beside_the_table():
    """Every class with keywords is listed, and `refuse` is called only with what the table is made of."""
    listed = {owner for _, owners, _ in refusals() for owner in owners}
    named = [kind for kind in _kinds() if kind.__name__ in booster.__all__ and is_dataclass(kind)]
    public = [kind for kind in named if refused_keywords(kind)]
    assert public and {kind.__name__ for kind in public} <= listed
    calling = {
        module
        for module, tree in source.modules().items()
        if module.startswith("shardlib.booster.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "refuse"
    }
    assert calling == {"shardlib.booster._options"}


@pytest.mark.parametrize("name", booster.__all__)
def test_a_public_name_has_a_docstring_and_stands_in_the_documents(name):
    assert inspect.getdoc(getattr(booster, name))
    texts = [PAGE, *((ROOT / "docs" / page).read_text() for page in ("api.md", "launching.md"))]
    assert any(re.search(rf"`[^`]*\b{name}\b", text) for text in texts)
