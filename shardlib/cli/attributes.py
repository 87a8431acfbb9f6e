"""Lookup of `module:name` and `file.py:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from shardlib.cli.usage import UsageError
from shardlib.errors import ShardlibError, nearest

__all__ = ["find_attribute"]


def find_attribute(spec: str, forms: str) -> Any:
    """Return what a name stands for; `forms` says in errors what it can be.

    Raises:
        UsageError: there is no such module, file or attribute.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon:
        module_name, _, attribute = spec.rpartition(".")
    folder = "" if not module_name.endswith(".py") else str(Path(module_name).parent.resolve())
    if folder:
        module_name = _stem(spec, Path(module_name), forms)
    found: Any = _imported(spec, module_name, folder, forms)
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = nearest(part, [name for name in dir(found) if not name.startswith("_")])
            raise UsageError(f'"{spec}": module "{module_name}" has no "{attribute}".{hint} {forms}')
        found = getattr(found, part)
    return found


def _stem(spec: str, file: Path, forms: str) -> str:
    """Return the module name of a file. It is imported with its folder on the path, as when it is run: its classes are
    `name.Class`."""
    if not file.is_file():
        raise UsageError(f'"{spec}": there is no file "{file}". {forms}')
    return file.stem


def _imported(spec: str, name: str, folder: str, forms: str) -> ModuleType:
    """Import a module from a folder, by default the working one, as `python file.py` and `python -m` do."""
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f'"{spec}": importing "{name}" failed: {error}.') from error
        raise UsageError(f'"{spec}": there is no module "{name}" and no such file. {forms}') from error
    except ShardlibError:
        raise
    except (SyntaxError, SystemExit) as error:
        raise UsageError(f'"{spec}": importing "{name}" failed: {type(error).__name__}: {error}.') from error
    except ValueError as error:
        raise UsageError(f'"{spec}" names nothing. {forms}') from error
