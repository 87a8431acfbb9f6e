"""The page about the trainer says what the code says."""

from __future__ import annotations

import inspect
import re

import pytest

from shardlib import trainer
from shardlib.trainer import hooks
from shardlib.trainer._handlers import _DONE_ANYWAY
from tests.house.source import ROOT

PAGE = (ROOT / "docs" / "trainer.md").read_text()


@pytest.mark.parametrize("name", trainer.__all__)
def test_a_public_name_has_a_docstring_with_an_example_and_stands_in_the_document(name):
    value = getattr(trainer, name)
    assert re.search(rf"`[^`]*\b{name}\b", PAGE)
    assert inspect.getdoc(value)
    if getattr(value, "__module__", "").startswith("shardlib.trainer") and callable(value):
        assert ">>> " in inspect.getdoc(value)
        methods = {n: m for n, m in inspect.getmembers(value, inspect.isroutine) if n in vars(value)}
        assert [n for n, method in methods.items() if not n.startswith("_") and not inspect.getdoc(method)] == []


@pytest.mark.parametrize("name", hooks.__all__)
def test_a_hook_has_a_docstring_and_its_priority_stands_in_the_document(name):
    kind = getattr(hooks, name)
    assert inspect.getdoc(kind)
    line = re.search(rf"^\|[^|]*`{name}\(.*\| (\d+) \|", PAGE, re.MULTILINE)
    if name != "BaseHook":
        assert line is not None
        assert int(line[1]) == inspect.signature(kind).parameters["priority"].default


@pytest.mark.parametrize("name", _DONE_ANYWAY)
def test_a_handler_that_is_accepted_stands_in_the_document(name):
    assert f"`{name}`" in PAGE
