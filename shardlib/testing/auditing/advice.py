"""Advice: from what a check found, a kind of module and a host, to the line of the host's interface that usually
decides it. The tables are `advice/*.toml`, one for each host."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from torch import nn

from shardlib.errors import InputError
from shardlib.testing.auditing.report import Advice
from shardlib.testing.equivalence.locate import Origin

__all__ = ["Finding", "advice_on", "table"]

_FIELDS = ("check", "what", "cause", "module", "found", "said", "used")


@dataclass(frozen=True)
class Finding:
    """The findings of a check, as texts that the patterns of a table are searched in.

    Attributes:
        check: the name of the check.
        what: the value that differs, in words.
        cause: likely causes.
        module: the class of the module.
        found: the layouts of its tensors, inputs and outputs.
        said: what the check says.
        used: the interfaces of the host that sharded the model.
    """

    check: str
    what: str = ""
    cause: str = ""
    module: str = ""
    found: str = ""
    said: str = ""
    used: str = ""


@dataclass(frozen=True)
class _Entry:
    patterns: dict[str, re.Pattern[str]]
    advice: Advice

    def on(self, finding: Finding, names: dict[str, str]) -> Advice | None:
        groups = dict(names)
        for field, pattern in self.patterns.items():
            if (match := pattern.search(getattr(finding, field))) is None:
                return None
            groups |= {name: value for name, value in match.groupdict().items() if value}
        filled = {name: _filled(getattr(self.advice, name), groups) for name in ("line", "why", "link")}
        return Advice(**filled)


def _filled(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: groups.get(match[1], match[0]), text)


@functools.cache
def table(name: str) -> tuple[_Entry, ...]:
    """Return a table of advice.

    Raises:
        InputError: an entry has a field that none has.
    """
    text = resources.files("shardlib.testing.auditing").joinpath("tables", f"{name}.toml").read_text(encoding="utf-8")
    return tuple(_entry(name, values) for values in tomllib.loads(text)["advice"])


def _entry(name: str, values: dict[str, Any]) -> _Entry:
    if strange := values.keys() - {*_FIELDS, "line", "why", "link"}:
        raise InputError(
            f'Advice for "{name}" has {sorted(strange)}; its fields are {", ".join(_FIELDS)}, line, why, link.'
        )
    patterns = {field: re.compile(values[field]) for field in _FIELDS if field in values}
    return _Entry(patterns, Advice(values["line"], " ".join(values["why"].split()), values.get("link", "")))


def advice_on(
    tables: Iterable[str],
    used: Iterable[str],
    check: str,
    origin: Origin | None,
    said: str,
    model: nn.Module | None = None,
) -> tuple[Advice, ...]:
    """Return the lines that usually decide a finding, the likeliest first, two at most.

    Args:
        tables: the names of the host's tables.
        used: the host's interfaces that sharded the model.
        check: the name of the check.
        origin: where the difference begins.
        said: what the check says.
        model: the model, whose classes the module is of.
    """
    module = "" if origin is None or origin.module.startswith("(") else origin.module
    finding = Finding(
        check,
        "" if origin is None else origin.what,
        "" if origin is None else "\n".join(origin.causes),
        "" if model is None else _class_of(model, module),
        "" if origin is None else "\n".join((*origin.found, origin.layout)),
        said,
        ", ".join(used),
    )
    names = {"module": re.sub(r"\.\d+(?=\.|$)", ".*", module) or "(the model)"}
    return tuple(_first(_spoken(tables, finding, names), 2))


def _spoken(tables: Iterable[str], finding: Finding, names: dict[str, str]) -> Iterator[Advice]:
    for name in tables:
        for entry in table(name):
            if (advice := entry.on(finding, names)) is not None:
                yield advice


def _first(found: Iterable[Advice], count: int) -> Iterator[Advice]:
    for number, advice in enumerate(found):
        if number == count:
            return
        yield advice


def _class_of(model: nn.Module, name: str) -> str:
    """Return the name of a module's class, and of those of the modules around it."""
    parts = name.split(".") if name else []
    try:
        around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1)]
    except AttributeError:
        return ""
    return " in ".join(type(module).__name__ for module in around)
