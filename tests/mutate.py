"""Mistakes made in the pure rooms at random, one at a time: does the room's own folder of tests notice?

    python tests/mutate.py                              # a hundred, spread over the rooms
    python tests/mutate.py --room layout --seed 1 --count 50
    python tests/mutate.py --at shardlib/_plan/fold.py:40

What the tests import of others is imported once. A mutant is a fork of that, in which one module of shardlib has a
mistake; tests that call the changed function run first, the quickest before the others. Tests on `ranks` do not run,
since other processes have the module as it is. `tests/mutate.toml` lists what changes no behaviour; it is not drawn.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import cProfile
import importlib
import importlib.machinery
import importlib.util
import json
import os
import pickle
import random
import resource
import sys
import tempfile
import time
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"layout": "layout", "rules": "rules", "plan": "_plan", "transforms": "transforms"}
LIST = Path(__file__).with_suffix(".toml")
WANTED = 0.9
# Processor time, not time on the clock: a machine that does other things too changes no verdict.
SECONDS, BYTES = 120, 16 << 30

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclass
class Mutant:
    """One change of one module: the `number`th of those that `changes` makes there."""

    room: str
    file: str
    number: int
    line: int
    function: int | None
    text: str
    change: str
    caught: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.text, self.change

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


@dataclass(frozen=True)
class Change:
    """A node, what to put where it stands, and the first line of the function that it is in."""

    node: ast.AST
    better: ast.AST = field(repr=False)
    parent: ast.AST = field(repr=False)
    function: int | None = None

    def text(self) -> str:
        return f"{_line(self.node)} -> {_line(self.better)}"

    def make(self) -> None:
        for name, value in ast.iter_fields(self.parent):
            if value is self.node:
                setattr(self.parent, name, self.better)
            elif isinstance(value, list):
                value[:] = [self.better if each is self.node else each for each in value]


def _line(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def changes(tree: ast.AST, *, function: int | None = None) -> Iterator[Change]:
    """Every mistake that can be made in a module.

    >>> for change in changes(ast.parse("def f(x: int = 1):\\n    return x > 2 and g(x)")):
    ...     print(change.text())
    1 -> 2
    1 -> 0
    return x > 2 and g(x) -> return None
    x > 2 and g(x) -> x > 2 or g(x)
    x > 2 -> x >= 2
    x > 2 -> x <= 2
    2 -> 3
    2 -> 1
    """
    for child in _children(tree):
        here = function
        if isinstance(child, ast.FunctionDef):
            here = min([child.lineno, *(each.lineno for each in child.decorator_list)])
        for better in _mistakes(child, tree):
            yield Change(child, ast.fix_missing_locations(ast.copy_location(better, child)), tree, here)
        yield from changes(child, function=here)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """What is code at run time: no annotation, decorator, message, export, import, assertion or docstring."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Assign | ast.AnnAssign) and ("__all__" in ast.unparse(node) or _is_type(node)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases", "ctx"):
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST))


def _is_type(node: ast.Assign | ast.AnnAssign) -> bool:
    return isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias"


def _mistakes(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, ops, rights):
            for at, op in enumerate(ops):
                for other in _COMPARED[type(op)]:
                    yield ast.Compare(left, [*ops[:at], other(), *ops[at + 1 :]], rights)
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED:
            yield ast.BinOp(left, _COMPUTED[type(op)](), right)
        case ast.AugAssign(target, op, value):
            yield ast.Pass()
            if type(op) in _COMPUTED:
                yield ast.AugAssign(target, _COMPUTED[type(op)](), value)
        case ast.BoolOp(ast.And(), values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            yield ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value) if not (isinstance(parent, ast.keyword) and parent.arg == "strict"):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value) if not isinstance(value, ast.Constant):
            yield ast.Pass()
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
    if _is_condition(node, parent):
        yield from (ast.Constant(True), ast.Constant(False))
        if not isinstance(node, ast.Compare | ast.UnaryOp):
            yield ast.UnaryOp(ast.Not(), node)


def _is_condition(node: ast.AST, parent: ast.AST) -> bool:
    match parent:
        case ast.If() | ast.While() | ast.IfExp():
            return node is parent.test
        case ast.comprehension():
            return any(node is each for each in parent.ifs)
        case ast.match_case():
            return node is parent.guard
    return False


def mutants_of(room: str) -> list[Mutant]:
    found = []
    for path in sorted((ROOT / "shardlib" / ROOMS[room]).glob("*.py")):
        source = path.read_text()
        lines, file = source.splitlines(), str(path.relative_to(ROOT))
        for number, change in enumerate(changes(ast.parse(source))):
            line = change.node.lineno  # type: ignore[attr-defined]
            found.append(Mutant(room, file, number, line, change.function, lines[line - 1].strip(), change.text()))
    return found


def draw(mutants: list[Mutant], count: int, chance: random.Random) -> list[Mutant]:
    """One mutant of each of so many lines."""
    by_line = defaultdict(list)
    for mutant in mutants:
        by_line[mutant.file, mutant.line].append(mutant)
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in lines]


def put_in_place(mutant: Mutant) -> None:
    """Let the module be imported with its mistake."""
    path = ROOT / mutant.file
    tree = ast.parse(path.read_text())
    list(changes(tree))[mutant.number].make()
    code = compile(tree, str(path), "exec")
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            return code

    class Finder:
        @staticmethod
        def find_spec(fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
            if fullname != name:
                return None
            return importlib.util.spec_from_file_location(name, path, loader=Loader(name, str(path)))

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


class Tests:
    """A plugin of pytest: keeps the order that was learnt, and learns what each test calls and how long it takes."""

    def __init__(self, known: Known | None = None, mutant: Mutant | None = None) -> None:
        self.known, self.mutant = known, mutant
        self.calls: dict[str, set[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not _on_ranks(item)]
        if self.known is not None and self.mutant is not None:
            called, known = (str(ROOT / self.mutant.file), self.mutant.function), self.known
            items.sort(key=lambda item: (called not in known.calls[item.nodeid], known.seconds[item.nodeid]))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        profile, began = cProfile.Profile(subcalls=False, builtins=False), time.perf_counter()
        if self.known is None:
            profile.enable()
        try:
            return (yield)
        finally:
            profile.disable()
            self.seconds[item.nodeid] = time.perf_counter() - began
            found = ((code.co_filename, code.co_firstlineno) for code, *_ in profile.getstats())
            self.calls[item.nodeid] = {place for place in found if place[0].startswith(f"{ROOT}/shardlib/")}


def _on_ranks(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else ()
    return "ranks" in getattr(item, "fixturenames", ()) and "ranks" not in parameters


@dataclass
class Known:
    """Of a room's tests: the functions that each calls, its seconds, and the modules of others that they import."""

    calls: dict[str, set[tuple[str, int]]]
    seconds: dict[str, float]
    modules: list[str]


def run(room: str, tests: Tests) -> int:
    """Run a room's tests in this process up to the first failure; pytest's exit status."""
    os.environ["HYPOTHESIS_PROFILE"] = "mutate"
    early = "ignore:Module already imported so cannot be rewritten"
    return int(pytest.main(["-x", "-p", "no:cacheprovider", "-W", early, f"tests/{room}"], plugins=[tests]))


def learn(room: str) -> Known:
    """Run a room's tests as they are, in a fork; import here what they import of others; run them as mutants run."""
    with tempfile.NamedTemporaryFile() as kept:
        child = os.fork()
        if not child:
            tests = Tests()
            status = run(room, tests)
            others = [name for name in sys.modules if not _is_ours(name)]
            Path(kept.name).write_bytes(pickle.dumps(Known(tests.calls, tests.seconds, others)))
            sys.stdout.flush()
            os._exit(status)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"tests/{room} fails as it is; mutants say nothing before it passes.")
        known: Known = pickle.loads(Path(kept.name).read_bytes())
    with warnings.catch_warnings(action="ignore"):
        for name in known.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if os.waitpid(start(Mutant(room, "", 0, 0, None, "", ""), known), 0)[1]:
        sys.exit(f"tests/{room} fails without a mistake in a fork that has its modules already: mutants say nothing.")
    return known


def _is_ours(name: str) -> bool:
    origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None) or ""
    return name in ("__main__", "conftest") or (origin.startswith(f"{ROOT}/") and "/.venv" not in origin)


def start(mutant: Mutant, known: Known) -> int:
    """Run the room's tests on a mutant, in a fork, silently; the fork's number. Status 0 is a mutant that survives."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
        if mutant.file:
            put_in_place(mutant)
        status = run(mutant.room, Tests(known, mutant))
    finally:
        os._exit(status)


def judge(mutants: list[Mutant], known: Known, jobs: int) -> None:
    """Write down for each mutant whether it was caught: a test failed, the import did, or time ran out."""
    running: dict[int, Mutant] = {}
    for mutant in [*mutants, *[None] * jobs]:
        if len(running) >= jobs or mutant is None:
            if not running:
                return
            child, status = os.wait()
            done = running.pop(child)
            done.caught = status != 0
            print("." if done.caught else f"\n{done}\n", end="", flush=True)
        if mutant is not None:
            running[start(mutant, known)] = mutant


def equivalent() -> dict[tuple[str, str, str], str]:
    """Mutants that change nothing, by file, line and change, with the reason."""
    listed = tomllib.loads(LIST.read_text())
    return {
        (file, entry["line"], change): entry["why"]
        for file, entries in listed.items()
        for entry in entries
        for change in entry["changes"]
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--room", choices=ROOMS, action="append", help="one room, several; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="of mutants, over all rooms (100)")
    parser.add_argument("--at", action="append", metavar="FILE:LINE", help="every mutant of a line instead")
    parser.add_argument("--jobs", type=int, default=2, help="of mutants that run side by side (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all mutants there, with what became of each")
    given = parser.parse_args(arguments)
    os.chdir(ROOT)
    found = {room: mutants_of(room) for room in given.room or ROOMS}
    same = equivalent()
    if stale := same.keys() - {mutant.key for room in ROOMS for mutant in found.get(room) or mutants_of(room)}:
        sys.exit("\n".join([f"{LIST.name} lists what can no longer be made:", *map(str, sorted(stale))]))
    chance, tried = random.Random(given.seed), []
    for index, (room, mutants) in enumerate(found.items()):
        share = (given.count + index) // len(found)
        mutants = [mutant for mutant in mutants if mutant.key not in same]
        drawn = [m for m in mutants if f"{m.file}:{m.line}" in given.at] if given.at else draw(mutants, share, chance)
        if drawn:
            began = time.monotonic()
            judge(drawn, learn(room), given.jobs)
            print(f"\n{room}: {sum(m.caught for m in drawn)} of {len(drawn)} caught, {time.monotonic() - began:.0f} s")
            tried += drawn
    caught = sum(mutant.caught for mutant in tried)
    print(*[f"survived {m}" for m in tried if not m.caught], f"{caught} of {len(tried)} caught", sep="\n")
    if given.json:
        given.json.write_text(json.dumps([asdict(mutant) for mutant in tried], indent=1))
    return int(caught < WANTED * len(tried))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    sys.path[0] = str(ROOT)  # Python puts this file's folder there, in which a `jax` is
    sys.exit(main())
