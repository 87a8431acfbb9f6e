"""Files that commands read, layouts, plans and reports that an earlier run wrote, and files that they write."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardlib import layouts
from shardlib._plan import Plan
from shardlib.cli.usage import UsageError
from shardlib.errors import nearest
from shardlib.rules import Rules

__all__ = ["check_target", "loaded_layout", "read_text", "saved_plan", "write_new"]


def loaded_layout(options: argparse.Namespace) -> Rules:
    """Return the rules that `--layout` and `--mode` name."""
    if options.layout.endswith(".toml") and not Path(options.layout).is_file():
        raise UsageError(f'There is no layout file "{options.layout}".')
    if not options.layout.endswith(".toml") and options.layout not in layouts.available():
        known = list(layouts.available())
        raise UsageError(
            f'There is no layout called "{options.layout}"; there are {", ".join(known)}. Give one of them, or the '
            f"path of a file that ends in .toml.{nearest(options.layout, known)}"
        )
    return layouts.load(options.layout, options.mode)


def saved_plan(path: str) -> Plan:
    """Return the plan of a file."""
    return Plan.from_json(read_text(path, "plan"))


def read_text(path: str, what: str) -> str:
    """Return the text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f'The {what} "{path}" cannot be read: {error.strerror}.') from error


def check_target(path: str | None, *, force: bool) -> None:
    """Check that a file can be written, before there is anything to write; None is no file."""
    if path is None:
        return
    if Path(path).exists() and not force:
        raise _exists(path)
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise UsageError(f'"{path}" cannot be written: name a file in a folder that exists.')


def _exists(path: str | Path) -> UsageError:
    return UsageError(f'"{path}" is there already. Name another file, or give --force to replace it.')


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write a file; one that is there already is replaced only with `force`."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise UsageError(f'"{path}" cannot be written: {error.strerror}.') from error
