"""A script for ColossalAI, fairscale or an earlier shardlib, with its imports rewritten. It is not run."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardlib._renamed import RENAMED, Renamed
from shardlib.booster._options import Options, refused_keywords
from shardlib.errors import nearest

__all__ = ["NAMES", "Remark", "Rewritten", "look_up", "rewrite"]

# Module of theirs -> module of ours -> names; under "refused", name -> advice.
NAMES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("migrate.toml").read_text("utf-8"))

_ROOTS = ("colossalai", "fairscale")
_WIDTH = 88
_NEWLINE = re.compile(rb"\r\n|\r|\n")
_MODULE = re.compile(rb"from\s+([\w.]+)\s+import\b")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_TESTS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.If, ast.While, ast.IfExp, ast.Assert)


@dataclass(frozen=True, order=True)
class Remark:
    """A line of a script to look at: what it names, and what to do. `left`: it does not work as it is."""

    line: int
    name: str
    advice: str
    left: bool = True


@dataclass(frozen=True)
class Rewritten:
    """A script with its imports rewritten. `found`: it has something of ColossalAI or fairscale, or a former name."""

    text: str
    remarks: tuple[Remark, ...]
    found: bool


def rewrite(source: str) -> Rewritten:
    """Return a script with imports of shardlib in the place of those of ColossalAI and fairscale, and with the present
    names of shardlib in the place of former ones.

    What has no counterpart here keeps its import, and a remark says what to do. So does a keyword of a plugin that is
    refused. A script that has been rewritten is returned as it is, with the same remarks.

    Raises:
        SyntaxError: the text is no Python.

    >>> rewrite("from colossalai.booster.plugin import GeminiPlugin  # ours").text
    'from shardlib.booster import GeminiPlugin  # ours'
    >>> rewrite("import shardlib as sl; plan = sl.plan_of(model)").text
    'import shardlib as sl; plan = sl.get_plan(model)'
    >>> rewrite("from fairscale.optim import OSS").remarks[0].advice[:35]
    'Take the torch.optim class itself; '
    """
    return _Script(source).rewritten()


def look_up(module: str, name: str) -> tuple[list[str], str]:
    """Return the modules of shardlib that have a name of a module of theirs, and the advice if there are none.

    >>> look_up("colossalai.nn.optimizer", "HybridAdam")
    (['shardlib.optim'], '')
    """
    fitting = [key for key in NAMES if f"{module}.".startswith(f"{key}.")]
    for key in sorted(fitting, key=len, reverse=True):
        refused = NAMES[key].get("refused", {})
        targets = [target for target, names in NAMES[key].items() if target != "refused" and name in names]
        if targets or name in refused or "*" in refused:
            return targets, "" if targets else refused.get(name, refused.get("*"))
    known = {
        name for table in NAMES.values() for target, names in table.items() if target != "refused" for name in names
    }
    return [], f"shardlib has nothing of this name.{nearest(name, known)}"


@dataclass
class _Use:
    """An attribute of an imported module that is theirs: `node` reaches from the module's name to `name`."""

    node: ast.expr
    name: str
    depth: int
    targets: list[str]


@dataclass
class _Part:
    """One name that an import statement binds: a name of ours, a module whose attributes are used, or neither."""

    alias: ast.alias
    local: str
    module: str
    targets: list[str] = field(default_factory=list)  # of a name
    uses: list[_Use] = field(default_factory=list)  # of a module
    is_module: bool = False
    kept: bool = False  # something needs the import as it is


class _Script:
    def __init__(self, source: str) -> None:
        self.data = source.encode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's own text, such as an invalid escape
            self.tree = ast.parse(source)
        self.starts = [0, *(found.end() for found in _NEWLINE.finditer(self.data))]
        found = _NEWLINE.search(self.data)
        self.newline = found[0].decode() if found else "\n"
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.remarks: set[Remark] = set()
        self.edits: dict[tuple[int, int], str] = {}
        self.called: dict[ast.expr | str, tuple[str, str]] = {}

    def rewritten(self) -> Rewritten:
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        parts = {node: list(self._parts(node)) for node in nodes}
        found = {node: some for node, some in parts.items() if some}
        self.needed = {
            targets[0]
            for some in found.values()
            for part in some
            for targets in (part.targets, *(use.targets for use in part.uses))
            if len(targets) == 1
        }
        for node, some in found.items():
            if isinstance(node, ast.Import):
                self._rewrite_import(some)
            else:
                self._rewrite_from(node, some)
        self._note_calls(nodes)
        renamed = [self._rename_ours(node) for node in nodes]
        return Rewritten(self._edited(), tuple(sorted(self.remarks)), bool(found) or any(renamed))

    # What a statement imports

    def _parts(self, node: ast.Import | ast.ImportFrom) -> Iterator[_Part]:
        for alias in node.names:
            if isinstance(node, ast.Import):
                if _is_theirs(alias.name):
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    yield self._module(node, _Part(alias, alias.asname or module, module))
                elif alias.asname in _ROOTS and _is_ours(alias.name):  # rewritten before: what was left still is
                    self._module(node, _Part(alias, alias.asname, alias.asname))
            elif node.module and node.level == 0 and _is_theirs(node.module):
                yield self._name(node, _Part(alias, alias.asname or alias.name, node.module))

    def _name(self, node: ast.ImportFrom, part: _Part) -> _Part:
        name = part.alias.name
        part.targets, advice = look_up(part.module, name)
        if part.targets:
            return part
        if name == name.lower() and name != "*":
            module = self._module(node, _Part(part.alias, part.local, f"{part.module}.{name}"), only_if_used=True)
            if module.uses:
                return module
            advice = NAMES.get(module.module, {}).get("refused", {}).get("*", advice)
        if name == "*":
            advice = "A star says no names: import those that the script uses."
        self._left(part.alias, f"{part.module}.{name}", advice)
        part.kept = True
        return part

    def _module(self, node: ast.stmt, part: _Part, *, only_if_used: bool = False) -> _Part:
        """Find how a module is used. Uses that lead nowhere are noted, or with `only_if_used`, only beside others."""
        part.is_module = True
        lost: list[tuple[ast.expr, str, str]] = []
        for chain in _chains(self._scope(node), part.local):
            if len(chain) == 1:
                if not isinstance(self.parents[chain[0]], _TESTS):
                    advice = "The module itself is used here: what is taken from it is not followed."
                    lost.append((chain[0], part.module, advice))
                continue
            use, advice = _resolve(part.module, chain)
            if use:
                part.uses.append(use)
            else:
                attributes = [at.attr for at in chain if isinstance(at, ast.Attribute)]
                lost.append((chain[-1], ".".join([part.module, *attributes]), advice))
        if part.uses or not only_if_used:
            for at, name, advice in lost:
                self._left(at, name, advice)
        part.kept = bool(lost)
        return part

    def _rename_ours(self, node: ast.Import | ast.ImportFrom) -> bool:
        """Rewrite names that `shardlib` no longer offers; tell whether there are any."""
        scope, found = self._scope(node), False
        if isinstance(node, ast.Import):
            for alias in (alias for alias in node.names if alias.name == "shardlib"):
                for chain in _chains(scope, alias.asname or alias.name):
                    if len(chain) > 1 and isinstance(chain[1], ast.Attribute) and chain[1].attr in RENAMED:
                        new, found = RENAMED[chain[1].attr], True
                        module = new.module.replace("shardlib", alias.asname or alias.name, 1)
                        self._replace(chain[1], f"{module}.{new.call}")
            return found
        if node.module != "shardlib" or not any(alias.name in RENAMED for alias in node.names):
            return False
        froms: dict[str, list[str]] = {}
        for alias in node.names:
            new = RENAMED.get(alias.name, Renamed("shardlib", alias.name))
            local = alias.asname or (alias.name if _assigns(scope, alias.name) else new.name)
            froms.setdefault(new.module, []).append(new.name if local == new.name else f"{new.name} as {local}")
            for chain in _chains(scope, alias.asname or alias.name):
                self._replace(chain[0], new.call.replace(new.name, local, 1))
        start, end = self._range(node)
        self.edits[start, end] = self._statements(start, end, [], {key: _unique(names) for key, names in froms.items()})
        return True

    def _scope(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, (*_FUNCTIONS, ast.Module)):
            node = self.parents[node]
        return node

    # What takes its place

    def _chosen(self, targets: list[str]) -> str:
        return next((target for target in targets if target in self.needed), targets[0])

    def _rewrite_import(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            module, others = self._rewrite_uses(part)
            if module:
                others.insert(0, f"{module} as {part.local}")
            elif part.kept or not others:
                others.insert(0, ast.unparse(part.alias))
                if not part.kept:
                    self._left(part.alias, part.alias.name, "The script uses nothing of it by name: remove the import.")
            self._replace(part.alias, ", ".join(others))

    def _rewrite_from(self, node: ast.ImportFrom, parts: list[_Part]) -> None:
        froms: dict[str, list[str]] = {}
        imports: list[str] = []
        for part in parts:
            if not part.is_module:
                target = self._chosen(part.targets) if part.targets else part.module
                froms.setdefault(target, []).append(ast.unparse(part.alias))
                if part.targets:
                    self.called[part.local] = target, part.alias.name
                continue
            module, others = self._rewrite_uses(part)
            if module:
                package, _, name = module.rpartition(".")
                if package:
                    froms.setdefault(package, []).append(name if name == part.local else f"{name} as {part.local}")
                else:
                    others.insert(0, f"{module} as {part.local}")
            elif part.kept:
                froms.setdefault(part.module.rpartition(".")[0], []).append(ast.unparse(part.alias))
            imports += [f"import {other}" for other in others]
        assert node.module
        if froms.keys() == {node.module} and not imports:
            return
        start, end = self._range(node)
        module_at = _MODULE.match(self.data[start:end])
        if len(froms) == 1 and module_at and not imports and not any(part.is_module for part in parts):
            self.edits[start + module_at.start(1), start + module_at.end(1)] = next(iter(froms))
        else:
            self.edits[start, end] = self._statements(start, end, imports, froms)

    def _rewrite_uses(self, part: _Part) -> tuple[str | None, list[str]]:
        """Return the module of ours that takes the name of theirs, and those that are imported beside it."""
        module = self._module_for(part)
        beside: dict[str, None] = {}
        for use in part.uses:
            if module in use.targets:
                target, text = module, f"{part.local}.{use.name}"
            else:
                target = self._chosen(use.targets)
                text = f"{target}.{use.name}"
                beside[target] = None
            assert target
            self.called[use.node] = target, use.name
            if use.depth > 1 or module not in use.targets:
                self._replace(use.node, text)
        return module, list(beside)

    def _module_for(self, part: _Part) -> str | None:
        direct = [use.targets for use in part.uses if use.depth == 1]
        if direct:
            common = [target for target in direct[0] if all(target in targets for targets in direct)]
            return self._chosen(common or direct[0])
        if part.uses or part.kept:
            return None
        return next((target for target in NAMES.get(part.module, ()) if target != "refused"), None)

    def _statements(self, start: int, end: int, imports: list[str], froms: dict[str, list[str]]) -> str:
        """Return statements for the place of one: each on a line, if that one had its lines to itself."""
        line = max(at for at in self.starts if at <= start)
        indent = self.data[line:start].decode()
        alone = not indent.strip()
        comments = list(_comments(self.data[start:end].decode()))
        lines = [*(comments if alone else ()), *imports]
        for module, names in froms.items():
            one = f"from {module} import {', '.join(names)}"
            if alone and len(indent + one) > _WIDTH:
                each = f"{self.newline}{indent}    "
                one = f"from {module} import ({each}{f',{each}'.join(names)},{self.newline}{indent})"
            lines.append(one)
        return (self.newline + indent if alone else "; ").join(lines)

    # What is left

    def _left(self, node: ast.expr | ast.alias, name: str, advice: str) -> None:
        self.remarks.add(Remark(node.lineno, name, advice))

    def _note_calls(self, imports: Iterable[ast.Import | ast.ImportFrom]) -> None:
        """Note the keywords that a plugin refuses, and imports by a function."""
        modules: dict[str, str] = {}
        for ours in imports:
            if isinstance(ours, ast.Import):
                modules |= {alias.asname or alias.name: alias.name for alias in ours.names if _is_ours(alias.name)}
            elif ours.module and _is_ours(ours.module):
                self.called |= {alias.asname or alias.name: (ours.module, alias.name) for alias in ours.names}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Call):
                continue
            function = node.func.id if isinstance(node.func, ast.Name) else node.func
            if function in self.called:
                self._note_keywords(node, *self.called[function])
            elif isinstance(function, ast.Attribute) and (module := modules.get(ast.unparse(function.value))):
                self._note_keywords(node, module, function.attr)
            last = function if isinstance(function, str) else getattr(function, "attr", "")
            if last in ("import_module", "__import__") and node.args and _is_theirs(_constant(node.args[0])):
                self._left(
                    node, _constant(node.args[0]), "It is imported by a call: import by name what the script uses."
                )

    def _note_keywords(self, call: ast.Call, module: str, name: str) -> None:
        made = None if name in RENAMED else getattr(importlib.import_module(module), name, None)
        if not (isinstance(made, type) and issubclass(made, Options)):
            return
        known = {option.name: option.default for option in fields(made)}  # type: ignore[arg-type]
        reasons = refused_keywords(made)
        for given in call.keywords:
            if given.arg is None:
                continue
            what = f"{name}({given.arg}=)"
            if given.arg not in known:
                advice = f"{name} has no such keyword.{nearest(given.arg, known)}"
                self.remarks.add(Remark(given.value.lineno, what, advice))
            elif given.arg in reasons:
                default, reason = known[given.arg], reasons[given.arg]
                value = _literal(given.value)
                if value is _UNKNOWN:
                    advice = f"A value other than {default!r} is refused: {reason}"
                    self.remarks.add(Remark(given.value.lineno, what, advice, left=False))
                elif value != default:
                    advice = f"{reason} (Leave it out, or give {default!r}.)"
                    self.remarks.add(Remark(given.value.lineno, what, advice))

    # Text

    def _range(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _replace(self, node: ast.expr | ast.alias, text: str) -> None:
        start, end = self._range(node)
        if self.data[start:end].decode() != text:
            self.edits[start, end] = text

    def _edited(self) -> str:
        data = self.data
        for (start, end), text in sorted(self.edits.items(), reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()


def _assigns(scope: ast.AST, name: str) -> bool:
    """Tell whether something else is given this name, as in `fit = fit("1GB")`."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(scope))


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


_UNKNOWN = object()


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in _ROOTS


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "shardlib"


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def _constant(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _chains(scope: ast.AST, name: str) -> Iterator[list[ast.expr]]:
    """Iterate over uses of a name in a scope: the name's node, then its attributes from inside out.

    A function inside of it that binds the name again has another one of that name.
    """
    for node in ast.iter_child_nodes(scope):
        chain = _chain(node)
        if chain and isinstance(chain[0], ast.Name) and chain[0].id == name:
            if isinstance(chain[0].ctx, ast.Load):
                yield chain
        elif not (isinstance(node, _FUNCTIONS) and name in _bound(node)):
            yield from _chains(node, name)


def _chain(node: ast.AST) -> list[ast.expr]:
    nodes: list[ast.expr] = []
    while isinstance(node, ast.Attribute):
        nodes.insert(0, node)
        node = node.value
    return [node, *nodes] if isinstance(node, ast.Name) else []


def _bound(function: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(function):
        match node:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    return names


def _resolve(module: str, chain: list[ast.expr]) -> tuple[_Use | None, str]:
    """Return the longest part of a chain that names something of ours; or the advice about it."""
    attributes = [node.attr for node in chain if isinstance(node, ast.Attribute)]
    said = ""
    for depth in range(len(attributes), 0, -1):
        name = attributes[depth - 1]
        targets, advice = look_up(".".join([module, *attributes[: depth - 1]]), name)
        if targets:
            return _Use(chain[depth], name, depth, targets), ""
        said = said or advice
    return None, said


def _comments(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
