"""Private interfaces of torch stay in one file, which says on which versions they were seen."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.house import source

HOME = "shardlib.engine._torch"
FOREIGN = "torch", "jax", "einops", "transformers", "safetensors", "rich"


def _dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    inside = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return [*inside, node.attr] if inside and isinstance(node, ast.Attribute) else None


def _private(part: str) -> bool:
    return part.startswith("_") and not part.endswith("__")


@cache
def _own_names() -> set[str]:
    """Every name that shardlib itself gives to something."""
    own: set[str] = set()
    for tree in source.modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own | {name.split(".")[-1] for name in source.modules()}


def _uses(module: str) -> Iterator[tuple[int, str]]:
    """Line and text of each private name of another package that a module reaches for."""
    for line, name in source.imports(module):
        if name.split(".")[0] in FOREIGN and any(map(_private, name.split("."))):
            yield line, name
    known, own = source.aliases(module), _own_names()
    for node in ast.walk(source.modules()[module]):
        if not isinstance(node, ast.Attribute) or not _private(node.attr):
            continue
        path = _dotted(node)
        root = known.get(path[0], "") if path else ""
        if root.split(".")[0] in FOREIGN or node.attr not in own:
            yield node.lineno, ast.unparse(node)


def _allowed(module: str, text: str) -> bool:
    # The fused layout is upstream's class: conversions name it, and a rule may be written as a placement.
    fused = module.startswith(("shardlib.layout.", "shardlib.rules.")) and text.endswith("_StridedShard")
    # An op of ATen is public whatever its name begins with: it stands in every exported graph.
    return fused or text.startswith("torch.ops.aten.")


def test_no_private_name_of_another_package_is_used():
    modules = source.modules().keys() - {HOME}
    found = [f"{m}:{line} {text}" for m in modules for line, text in _uses(m) if not _allowed(m, text)]
    assert sorted(found) == []


def test_the_one_home_of_private_names_says_on_which_versions_they_were_seen():
    if HOME in source.modules():
        text = ast.get_docstring(source.modules()[HOME]) or ""
        assert "2.13" in text
