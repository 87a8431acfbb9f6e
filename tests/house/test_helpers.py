"""Tests share code by public names of helper modules, and do not use each other's private names."""

from __future__ import annotations

import ast

from tests.house.source import ROOT


def _imported() -> list[tuple[str, str]]:
    """File and line, and the dotted name of everything that modules of tests import by name."""
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.ImportFrom):
                where = f"{file.relative_to(ROOT)}:{node.lineno}"
                found += [(where, f"{node.module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Import):
                found += [(f"{file.relative_to(ROOT)}:{node.lineno}", alias.name) for alias in node.names]
    return found


def test_no_test_imports_from_a_test_module():
    wrong = [(where, name) for where, name in _imported() if ".test_" in name and name.startswith("tests.")]
    assert not wrong, "move what they share to a module whose name does not begin with test_"


def test_no_test_imports_a_private_name_of_other_tests_or_of_shardlib_testing():
    ours = ("tests.", "shardlib.testing.")
    wrong = [(at, name) for at, name in _imported() if name.startswith(ours) and name.split(".")[-1].startswith("_")]
    assert not wrong, "give it a public name, or use what is public already"
