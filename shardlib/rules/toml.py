"""The file form of rules. Read by `tomllib`; written by a few lines of our own.

description = "..."             the purpose of the rules
models = ["package.Class"]      the model classes they are for
unmatched = "replicate"         and optional, override, axis, as in `Rules`
stages = "embed | head"         stages of a pipeline, or "balanced(params)", "balanced(3, 5)"

[axes]                          dim name = mesh axis, or a list of axes
[sizes]                         factor name = number, or attribute path
[params]                        pattern = layout text, role, "Shard(0)", {axis = "Shard(0)"} or a list of placements
[activations]                   pattern ending in .input or .output = the same
[modes.NAME.SECTION]            a section of these, or "optional" in [modes.NAME]: changes of a mode, as in `Rules`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardlib._mesh_shape import listed
from shardlib._toml import is_path, parsed, read_file, toml_key, toml_text
from shardlib.errors import RuleError, nearest
from shardlib.rules._rule_set import RuleSet
from shardlib.rules._values import Cut, PerAxis, Placed, Role, Text, Value, read_value, spelled_placement
from shardlib.rules.stages import Balanced

__all__ = ["read", "write"]

_PLAIN = {"description": str, "models": list, "axis": str, "stages": str, "unmatched": str}
_PLAIN |= {"optional": list, "override": list}
_IN_MODES = {"axes": "axes", "sizes": "sizes", "params": "rules", "activations": "activations"}
_SECTIONS = _IN_MODES | {"modes": "modes"}
_ADVICE = 'Texts stand in double quotes, and so do keys with dots, as in "attn.qkv" = "(qkv heads@tp head)".'


def read(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Read a layout file; return its source, for messages, and the arguments of `Rules` in it.

    Raises:
        RuleError: no such file, invalid TOML, an unknown key, a value of the wrong kind.

    >>> read('axis = "tp"\\n[params]\\nup = "colwise"')
    ('rules given as text', {'axis': 'tp', 'rules': {'up': 'colwise'}})
    """
    where, text = _opened(source)
    sections = parsed(where, text, _ADVICE, RuleError)
    arguments = {_SECTIONS.get(key, key): _checked(where, key, given) for key, given in sections.items()}
    if modes := arguments.get("modes"):
        arguments["modes"] = {name: _mode(where, name, given) for name, given in modes.items()}
    return where, arguments


def write(rules: RuleSet) -> str:
    """Write rules as a layout file; reading it gives equal rules. Notes become comments."""
    head = [f"{key} = {_value(given)}" for key, given in _plain_values(rules)]
    sections = [
        ("axes", [f"{toml_key(name)} = {_value(given)}" for name, given in rules.axes.items()]),
        ("sizes", [f"{toml_key(name)} = {_value(given)}" for name, given in rules.sizes.items()]),
        ("params", _entries(rules.rules, rules.notes)),
        ("activations", _entries(rules.activations, rules.notes)),
    ]
    for name, mode in rules.modes.items():
        sections.append(
            (f"modes.{toml_key(name)}", [f"optional = {_value(mode['optional'])}"] if "optional" in mode else [])
        )
        sections += [
            (f"modes.{toml_key(name)}.{section}", _of_mode(field, mode.get(field, {})))
            for section, field in _IN_MODES.items()
        ]
    blocks = ["\n".join(head), *("\n".join([f"[{name}]", *lines]) for name, lines in sections if lines)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _mode(where: str, name: str, given: Any) -> dict[str, Any]:
    known = (*_IN_MODES, "optional")
    if not isinstance(given, dict):
        raise RuleError(
            f'{where}: mode "{name}" is {given!r}; write its sections, such as [modes.{toml_key(name)}.activations].'
        )
    for key in given:
        if key not in known:
            raise RuleError(
                f'{where}: "{key}" is not a section of a mode, which may have {listed(known)}.{nearest(key, known)}'
            )
    return {_IN_MODES.get(key, "optional"): section for key, section in given.items()}


def _opened(source: str | Path) -> tuple[str, str]:
    if not is_path(source):
        return "rules given as text", str(source)
    return str(source), read_file(Path(source), "Rules", RuleError)


def _checked(where: str, key: str, given: Any) -> Any:
    known = (*_PLAIN, *_SECTIONS)
    if key not in known:
        raise RuleError(
            f'{where}: "{key}" is not a key of a layout file, which may have {listed(known)}. Correct it, or move it '
            f"into [params] if it is a pattern.{nearest(key, known)}"
        )
    wanted = _PLAIN.get(key, dict)
    if not isinstance(given, wanted):
        kind = {str: "a text", list: "a list of texts", dict: f"a section, [{key}]"}[wanted]
        raise RuleError(f'{where}: "{key}" is {given!r}; write {kind}.')
    return given


def _plain_values(rules: RuleSet) -> Iterator[tuple[str, Any]]:
    defaults = {"axis": "tp", "unmatched": "error"}
    for key in _PLAIN:
        given = getattr(rules, key)
        given = given.text if isinstance(given, Balanced) else given
        if given and given != defaults.get(key):
            yield key, given


def _entries(rules: Mapping[str, Value], notes: Mapping[str, str]) -> list[str]:
    lines = []
    for key, value in rules.items():
        lines += [f"# {_printable(line)}" for line in notes.get(key, "").splitlines()]
        lines.append(f"{toml_key(key)} = {_rule(value)}")
    return lines


def _of_mode(field: str, section: Mapping[str, Any]) -> list[str]:
    if field in ("axes", "sizes"):
        return [f"{toml_key(name)} = {_value(given)}" for name, given in section.items()]
    return _entries({key: read_value(key, given) for key, given in section.items()}, {})


def _rule(value: Value) -> str:
    match value:
        case Role(text) | Text(text):
            return toml_text(text)
        case Placed(((None, placement),)):
            return _placement(placement)
        case Placed(by_axis):
            return "{ " + ", ".join(f"{toml_key(str(axis))} = {_placement(each)}" for axis, each in by_axis) + " }"
        case PerAxis(placements):
            return f"[{', '.join(map(_placement, placements))}]"


def _placement(cut: Cut | None) -> str:
    return toml_text(spelled_placement(cut))


def _value(given: Any) -> str:
    if isinstance(given, int):
        return str(given)
    return toml_text(given) if isinstance(given, str) else f"[{', '.join(map(toml_text, given))}]"


def _printable(line: str) -> str:
    # TOML allows no control characters in comments.
    return "".join(char if char.isprintable() else " " for char in line).rstrip()
