"""TOML files: read by `tomllib`, with errors that show the line; keys and texts as they are written."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError

__all__ = ["is_path", "parsed", "read_file", "toml_key", "toml_text"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def is_path(source: str | Path) -> bool:
    """Tell whether a source is a path and not the text of a file.

    >>> is_path("mine.toml"), is_path(Path("mine")), is_path("a = 1")
    (True, True, False)
    """
    return isinstance(source, Path) or (source.endswith(".toml") and "\n" not in source)


def read_file(path: Path, what: str, error: type[ShardlibError]) -> str:
    """Return the text of a file; `what` is read from it, as in "Rules".

    Raises:
        ShardlibError: the given error, for a file that cannot be read as text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as fault:
        raise error(f'{what} cannot be read from "{path}": {fault.strerror}. Give the path of a TOML file.') from None
    except UnicodeDecodeError:
        raise error(f'"{path}" is not UTF-8 text, as TOML must be. Save it in that encoding.') from None


def parsed(where: str, text: str, advice: str, error: type[ShardlibError]) -> dict[str, Any]:
    """Parse TOML; the message about a text that is not TOML shows its line and ends with `advice`.

    Raises:
        ShardlibError: the given error.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise error(f"{_invalid(where, text, fault)} {advice}") from None


def _invalid(where: str, text: str, fault: tomllib.TOMLDecodeError) -> str:
    at = re.search(r"line (\d+)", str(fault))
    lines = text.splitlines()
    number = int(at[1]) if at else len(lines)
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    fact = re.sub(r" \(at .*\)$", "", str(fault))
    return f"{where}, line {number}: this is not valid TOML: {fact}. The line is `{line}`."


def toml_key(name: str) -> str:
    """Write a key, in quotes where TOML wants them.

    >>> toml_key("tp"), toml_key("mlp.up")
    ('tp', '"mlp.up"')
    """
    return name if _BARE.fullmatch(name) else toml_text(name)


def toml_text(text: str) -> str:
    r"""Write a text as a TOML basic string.

    >>> toml_text('a "b"')
    '"a \\"b\\""'
    """
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
