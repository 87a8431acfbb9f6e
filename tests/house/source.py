"""The library's own source as syntax trees, for the tests about how it is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> syntax tree of every module of shardlib."""
    files = sorted((ROOT / "shardlib").rglob("*.py"))
    return {_dotted(file): ast.parse(file.read_text(), str(file)) for file in files}


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, at its top or inside of functions.

    `from a import b` counts as `a.b`, which may be a module or a name in one. Imports for type checkers alone, under
    `if TYPE_CHECKING:`, do not count: they never happen.
    """
    for node in _walk_run_time(modules()[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def aliases(module: str) -> dict[str, str]:
    """Local name -> dotted name for everything a module imports by name."""
    found: dict[str, str] = {}
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
            found |= {root: root for root in (a.name.split(".")[0] for a in node.names if not a.asname)}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _walk_run_time(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk_run_time(child)


def _dotted(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
