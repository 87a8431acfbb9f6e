"""Docstrings begin as PyTorch's do: functions with a verb, values with a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house import source

_ODD_START = re.compile(r"(What|Of|Where|How|Whose|That)\b")
_FOLDERS = sorted({module.split(".")[1] for module in source.modules() if "." in module})


def _docstrings(folder: str) -> Iterator[tuple[str, str]]:
    """Iterate over the docstrings of a folder or module of shardlib, each with its place in the source."""
    for module, tree in source.modules().items():
        if module.split(".")[1:2] == [folder]:
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    at = f"{module}:{node.body[0].lineno if node.body else 1} {getattr(node, 'name', 'module')}"
                    yield at, ast.get_docstring(node) or ""


@pytest.mark.parametrize("folder", _FOLDERS)
def test_a_docstring_begins_with_a_verb_or_a_noun(folder: str):
    odd = [f"{at}: {text.splitlines()[0]}" for at, text in _docstrings(folder) if _ODD_START.match(text)]
    assert not odd, "begin with a verb, or, for a value, with a noun:\n" + "\n".join(odd)
