"""Matching of rules with the modules, tensors and borders of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from shardlib.errors import RuleError
from shardlib.rules._adapters import renamed
from shardlib.rules._model import ModelIndex, folded
from shardlib.rules._resolution import Side
from shardlib.rules._values import Role, Value, spelled
from shardlib.rules.patterns import TENSOR_REGEX, NameIndex, Pattern, compile_pattern

__all__ = ["Entry", "Match", "Matcher", "border_key"]


@dataclass(frozen=True)
class Entry:
    """One rule: its key as written, its value, and whether it can only speak about module borders."""

    key: str
    value: Value
    section: Literal["params", "activations"] = "params"

    def __str__(self) -> str:
        return f'"{self.key}": {spelled(self.value)}'


@dataclass(frozen=True)
class Match:
    """The matches of one rule. `modules` own tensors; `containers` own none, so that a rule can lay out only their
    borders."""

    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    borders: tuple[tuple[str, Side], ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.tensors or self.modules or self.borders)


class Matcher:
    """Matches rules with one model. Modules that adapters renamed match under their former names too."""

    def __init__(self, index: ModelIndex) -> None:
        self.index = index
        self._tensors = NameIndex(index.leaf)
        self._modules = NameIndex(index.modules)
        self._renamed, self._inner = renamed(index)
        self._former: dict[str, list[str]] = {}
        for name, former in self._renamed.items():
            self._former.setdefault(former, []).append(name)
        self._formers = NameIndex(self._former)

    def match(self, entry: Entry) -> Match:
        """Return the modules, tensors and borders that a rule matches.

        Raises:
            RuleError: `X.output` can be read both as the border of X and as a module called "output".
        """
        borders = tuple(dict.fromkeys(self._borders(entry.key)))
        if entry.section == "activations":
            return Match(borders=borders)
        pattern = compile_pattern(entry.key)
        former = self._named_before(pattern)
        tensors = _in_order(self._tensors.select(pattern), [name for name in former if name in self.index.leaf])
        if pattern.tensors_only:
            return Match(tuple(tensors))
        found = _in_order(self._modules.select(pattern), [name for name in former if name in self.index.modules])
        modules = tuple(name for name in found if self.index.own[name])
        containers = tuple(name for name in found if not self.index.own[name])
        if not (tensors or modules):
            return Match(containers=containers, borders=borders)
        if borders and entry.value not in (Role("colwise"), Role("rowwise")):
            raise _two_readings(entry, borders[0], (*modules, *tensors)[0])
        return Match(tuple(tensors), modules, containers)

    def readable_names(self) -> Iterable[str]:
        """Return names as a pattern would write them: numbers folded, modules before tensors."""
        return dict.fromkeys(folded(name) for name in (*self.index.modules, *self.index.leaf) if name)

    def _borders(self, key: str) -> Iterable[tuple[str, Side]]:
        split = border_key(key)
        if split is None:
            return
        base, side = split
        for name in self._select_modules(base, side):
            yield self.index.module_name(self.index.modules[name]), side

    def _named_before(self, pattern: Pattern) -> list[str]:
        return [name for former in self._formers.select(pattern) for name in self._former[former]]

    def _select_modules(self, base: str | Pattern, side: str) -> list[str]:
        """Return the modules that a border's key names; for one that an adapter wraps, its wrapper."""
        if isinstance(base, str):
            pattern = compile_pattern(base)
            found = _in_order(self._modules.select(pattern), self._named_before(pattern))
        else:
            called = {name: (name, self._renamed.get(name, name)) for name in self.index.modules}
            found = [n for n, each in called.items() if any(base.matches(f"{e}.{side}" if e else side) for e in each)]
        return [name for name in found if name in self.index.modules and name not in self._inner]


def _in_order(found: list[str], more: list[str]) -> list[str]:
    return list(dict.fromkeys((*found, *more))) if more else found


def border_key(key: str) -> tuple[str | Pattern, Side] | None:
    """Split "X.output" into the pattern X and the side; None when the key does not end so. "^output" is the root's.

    A regular expression speaks about border names whole, so it is given back compiled and uncut.

    >>> border_key("blocks.*.output"), border_key("^input"), border_key("mlp.up")
    (('blocks.*', 'output'), ('^', 'input'), None)
    """
    if key.startswith(TENSOR_REGEX):
        return None
    for side in get_args(Side):
        if key == f"^{side}":
            return "^", side
        if key.endswith(f".{side}"):
            base = compile_pattern(key) if key.startswith("re:") else key.removesuffix(f".{side}")
            return base, side
    return None


def _two_readings(entry: Entry, border: tuple[str, Side], other: str) -> RuleError:
    module, side = border
    return RuleError(
        f'Rule {entry} is ambiguous: it names the {side} of module "{module}", and also the module "{other}". For the '
        f'parameters name them, as in "{entry.key}.weight"; for the activation put the rule into activations={{...}} '
        "instead."
    )
