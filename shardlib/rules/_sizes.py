"""Sizes of the factors of fused dims: numbers, or attributes of the modules around."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from shardlib.errors import RuleError
from shardlib.rules._match import Entry
from shardlib.rules._model import ModelIndex, called

__all__ = ["SizeFinder"]


@dataclass(frozen=True)
class SizeFinder:
    """Finds sizes by factor name; an attribute path is looked up on the module itself, then on those around it."""

    index: ModelIndex
    sizes: Mapping[str, int | str]

    def find(
        self, entry: Entry, names: Iterable[str], module_name: str, also: Mapping[str, int | str]
    ) -> dict[str, int]:
        """Return the sizes of the names that a rule mentions, and of those in the module's own dims (`also`)."""
        wanted = {**also, **{name: self.sizes[name] for name in names if name in self.sizes}}
        return {name: self._size(entry, name, given, module_name) for name, given in wanted.items()}

    def _size(self, entry: Entry, name: str, given: int | str, module_name: str) -> int:
        if isinstance(given, int):
            return given
        for module in self.index.enclosing(module_name):
            try:
                found = attrgetter(given)(module)
            except Exception:  # configurations raise errors of their own for what differs between layers
                continue
            if type(found) is int and found > 0:
                return found
            raise RuleError(
                f'Rule {entry}: the size of "{name}" is given as the attribute "{given}", which on '
                f"{called(module)} is {found!r}. Name an attribute that is a positive int, or give the number."
            )
        around = ", ".join(dict.fromkeys(map(called, self.index.enclosing(module_name))))
        raise RuleError(
            f'Rule {entry}: the size of "{name}" is given as the attribute "{given}", which none of the modules around '
            f'"{module_name}" has ({around}). Name an attribute of one of them, or give the number.'
        )
