"""Private interfaces of torch stay in one package, whose tables say what needs each and what is lost without it."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from shardlib import _supported
from shardlib.engine import _torch
from shardlib.engine._torch import _private as tables
from shardlib.engine._torch._private import SEEN, TABLE, Private
from shardlib.errors import VersionError
from tests.house import source

HOME = "shardlib.engine._torch"
FILES = sorted(module for module in source.modules() if module.startswith(f"{HOME}."))
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
    # A subclass of a trainer's class shares its parts with it; that is the way in which trainers are extended.
    inherited = module.startswith("shardlib.integrations.") and text.startswith("self._")
    # Accelerate has no public way to begin anew in a process; its own tests take this one.
    anew = module.endswith(".hosts.accelerate") and text.endswith("._reset_state")
    return fused or inherited or anew or text.startswith("torch.ops.aten.")


def test_no_private_name_of_another_package_is_used():
    modules = source.modules().keys() - {HOME, *FILES}
    found = [f"{m}:{line} {text}" for m in modules for line, text in _uses(m) if not _allowed(m, text)]
    assert sorted(found) == []


# --- the tables ---------------------------------------------------------------------------------------------------


def _rows(module: str) -> list[ast.Call]:
    calls = (node for node in ast.walk(source.modules()[module]) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) in ("private", "private_when_used")]


def _declared(module: str) -> list[str]:
    return [ast.literal_eval(name) for row in _rows(module) for name in row.args]


def _written(module: str) -> tuple[set[str], set[str]]:
    """Iterate over what a file writes outside of its table: parts of imported names and attributes; strings."""
    names = {part for _, name in source.imports(module) if name.startswith("torch.") for part in name.split(".")}
    strings: set[str] = set()
    skipped = {id(inside) for row in _rows(module) for inside in ast.walk(row)}
    skipped |= {id(inside) for node in source.modules()[module].body for inside in ast.walk(node) if _offers(node)}
    for node in ast.walk(source.modules()[module]):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "aten", "torch.ops.aten"):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            strings.add(node.value)
    return names, strings


def _offers(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def _is_written(part: str, names: set[str], strings: set[str]) -> bool:
    """Also by the beginning that several names have in common: `_global_` of hooks."""
    return part in names | strings or any(re.fullmatch(r"_\w+_", one) and part.startswith(one) for one in strings)


@pytest.mark.parametrize("module", FILES)
def test_each_private_name_that_a_file_uses_stands_in_its_table(module: str):
    names, strings = _written(module)
    used = {one for one in names | strings if re.fullmatch(r"_\w+", one) and _private(one)}
    parts = {part for name in _declared(module) for part in name.split(".")}
    parts |= {mark for row in TABLE for mark in row.marks}
    loose = {one for one in used if not any(_is_written(part, {one}, {one}) for part in parts)}
    assert {one for one in loose if not one.startswith("_shardlib")} == set(), "declare them at the top of the file"


@pytest.mark.parametrize("module", FILES)
def test_each_name_of_a_table_is_used_in_its_file(module: str):
    names, strings = _written(module)
    last = {name: [part for part in name.split(".") if _private(part)][-1:] for name in _declared(module)}
    marked = {row.name for row in TABLE if any(mark in names | strings for mark in row.marks)}
    unused = [
        name
        for name in last
        if name not in marked and not any(_is_written(p, names, strings) for p in (name.split(".")[-1], *last[name]))
    ]
    assert unused == [], "delete it from the table"


def test_private_names_were_seen_on_the_oldest_and_the_newest_torch_that_is_supported():
    (major, oldest), (_, newest) = _supported.OLDEST, _supported.NEWEST
    assert [_supported.release(version) for version in SEEN] == [(major, n) for n in range(oldest, newest + 1)]


# What shardlib imports at the first use: compilers, and samples that forbid a process to set flags.
_LATE = ("torch._dynamo.", "torch._inductor.", "torch.testing.", "torch.distributed.pipelining.")


def _is_late(name: str) -> bool:
    return name.startswith(_LATE)


class _Gone:
    """An attribute that a class inherits and pretends not to have."""

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError


def _take_away(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, last = name.rsplit(".", 1)
    if _is_late(name):
        importlib.import_module(path.rpartition(".")[0])
    if _is_late(name) and path not in sys.modules:
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        return
    owner = pkgutil.resolve_name(path)
    if last in vars(owner):
        monkeypatch.delattr(owner, last)
    if last in vars(owner).get("__annotations__", ()):
        monkeypatch.delitem(owner.__annotations__, last)
    if hasattr(owner, last) and isinstance(owner, type):
        monkeypatch.setattr(owner, last, _Gone())
    elif hasattr(owner, last):  # made anew when it is asked for
        monkeypatch.setattr(path, types.SimpleNamespace())


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_torch_that_lacks_a_private_name_is_refused_in_the_words_of_the_table(
    row: Private, monkeypatch: pytest.MonkeyPatch
):
    if not _is_late(row.name):
        row.require()
    _take_away(row.name, monkeypatch)
    if row.optional:
        row.require()
        return
    with pytest.raises(VersionError) as caught:
        row.require()
    assert str(caught.value) == (
        f"torch {torch.__version__} is installed and has no {row.name}, a private name that shardlib needs {row.why}. "
        f"Without it, {row.without}. Seen in torch 2.13.0, 2.14.1 and 2.15.0. Install one that has it: "
        'pip install "torch==2.15.0".'
    )


_FIRST_USES: dict[str, Callable[[], Any]] = {
    "samples of ops": _torch.op_database,
    "half of a backward pass": lambda: _torch.backward_of_inputs([], [], [], []),
    "the other half": lambda: _torch.backward_of_weights([], None),
    "graphs": _torch.graph_backend,
    "inductor": lambda: _torch.inductor_backend({}),
    "dynamo": lambda: _torch.keep_compiler_out_of("shardlib"),
    "errors of dynamo": _torch.compile_errors,
    "breaks of graphs": _torch.graph_breaks_raise,
}


@pytest.mark.parametrize("use", _FIRST_USES.values(), ids=_FIRST_USES)
def test_what_is_imported_late_is_looked_for_at_the_first_use(use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "_exists", lambda name: not _is_late(name))
    with pytest.raises(VersionError, match="a private name that shardlib needs to"):
        use()


PROBE = """
import torch
del torch._C._current_graph_task_id
import shardlib
try:
    shardlib.shard_model
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_the_first_use_of_shardlib_looks_for_private_names():
    fresh = {"PATH": os.environ["PATH"]}
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=source.ROOT, env=fresh)
    wanted = f"VersionError torch {torch.__version__} is installed and has no torch._C._current_graph_task_id, "
    assert run.stdout.startswith(wanted), run.stderr
