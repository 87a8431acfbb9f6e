"""Caches of a device mesh end with it: an equal mesh may have other process groups."""

from __future__ import annotations

import ast

from tests.house import source


def _cached_by_functools(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith(("functools.cache", "functools.lru_cache")) for d in function.decorator_list)


def _takes_a_mesh(function: ast.FunctionDef) -> bool:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return any(a.annotation is not None and "DeviceMesh" in ast.unparse(a.annotation) for a in arguments)


def test_no_function_of_a_device_mesh_is_cached_for_good():
    wrong = [
        f"{module}.{node.name}"
        for module, tree in source.modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and _cached_by_functools(node) and _takes_a_mesh(node)
    ]
    assert not wrong, f"cache {', '.join(wrong)} with _torch.cached_by_mesh"
