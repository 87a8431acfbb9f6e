"""`shardlib migrate`: scripts for ColossalAI, fairscale or an earlier shardlib, with their imports rewritten."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardlib.cli.rewrite import Rewritten, rewrite
from shardlib.cli.usage import UsageError

__all__ = ["migrate"]

_BOM = b"\xef\xbb\xbf"


class _File(NamedTuple):
    path: Path
    before: str
    after: Rewritten
    bom: bool

    @property
    def changes(self) -> bool:
        return self.before != self.after.text


def migrate(options: argparse.Namespace) -> int:
    """Print what changes in scripts, or write them, and list what is left to do; return 1 if something is."""
    paths = [path for given in options.paths for path in _scripts(given)]
    files = [_read(path) for path in {path.resolve(): path for path in paths}.values()]  # each once, behind links
    if options.write:
        for file in files:
            if file.changes:
                _write(file)
        # The lines that are left are those of the files as they are now.
        files = [
            file._replace(after=dataclasses.replace(file.after, remarks=rewrite(file.after.text).remarks))
            for file in files
        ]
    if options.json:
        print(json.dumps({"files": [_as_json(file) for file in files]}, indent=2))
    else:
        _print(files, written=options.write)
    return int(any(remark.left for file in files for remark in file.after.remarks))


def _scripts(given: str) -> Iterator[Path]:
    path = Path(given)
    if path.is_file():
        yield path
    elif not path.is_dir():
        raise UsageError(f'There is no file or folder "{given}" (looked for from {Path.cwd()}).')
    else:
        found = False
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if _is_searched(Path(folder, name)))
            for name in sorted(names):
                if name.endswith(".py") and Path(folder, name).is_file():  # and no link that leads nowhere
                    found = True
                    yield Path(folder, name)
        if not found:
            raise UsageError(f'The folder "{given}" has no Python files.')


def _is_searched(folder: Path) -> bool:
    return not folder.name.startswith(".") and not (folder / "pyvenv.cfg").exists()


def _read(path: Path) -> _File:
    try:
        data = path.read_bytes()
        source = data.removeprefix(_BOM).decode()
        return _File(path, source, rewrite(source), data.startswith(_BOM))
    except OSError as error:
        raise UsageError(f'"{path}" cannot be read: {error.strerror}.') from error
    except UnicodeDecodeError as error:
        raise UsageError(f'"{path}" is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}.') from error
    except SyntaxError as error:
        raise UsageError(f'"{path}" is not Python that can be read: line {error.lineno}: {error.msg}.') from error
    except ValueError as error:  # a null byte, before Python 3.12
        raise UsageError(f'"{path}" is not Python that can be read: {error}.') from error


def _write(file: _File) -> None:
    """Replace a file in one moment: it is never half written, and keeps its permissions. A link stays a link."""
    target = file.path.resolve()
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise UsageError(f'"{file.path}" cannot be written: {error.strerror}.') from error
    try:
        with open(handle, "wb") as out:
            out.write(_BOM * file.bom + file.after.text.encode())
        shutil.copymode(target, name)
        os.replace(name, target)
    except OSError as error:
        os.unlink(name)
        raise UsageError(f'"{file.path}" cannot be written: {error.strerror}.') from error


def _print(files: list[_File], *, written: bool) -> None:
    """Print the diff to stdout, so that it can be kept as a patch, and all else to stderr."""
    for file in files:
        if not written:
            sys.stdout.writelines(_diff(file))
    sys.stdout.flush()
    for file in files:
        for remark in file.after.remarks:
            note = "" if remark.left else "note: "
            print(f"{file.path}:{remark.line}: {note}{remark.name}: {remark.advice}", file=sys.stderr)
    print(f"shardlib: {_summary(files, written=written)}", file=sys.stderr)


def _summary(files: list[_File], *, written: bool) -> str:
    changed = sum(file.changes for file in files)
    left = sum(remark.left for file in files for remark in file.after.remarks)
    if not any(file.after.found for file in files):
        where = f'"{files[0].path}" has' if len(files) == 1 else f"{len(files)} files have"
        said = f"{where} nothing of ColossalAI or fairscale, and no former name of shardlib."
    else:
        does = (
            ("was written" if changed == 1 else "were written")
            if written
            else ("changes" if changed == 1 else "change")
        )
        said = f"{changed} of {len(files)} files {does}." if len(files) > 1 else f'"{files[0].path}" {does}.'
        if not changed:
            said = "Nothing changes."
    if left:
        said += f" {left} {'line is' if left == 1 else 'lines are'} left to you."
    return said


def _diff(file: _File) -> Iterator[str]:
    before, after = (list(io.StringIO(text)) for text in (file.before, file.after.text))  # lines end as in git
    for line in difflib.unified_diff(before, after, str(file.path), str(file.path)):
        yield line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n"


def _as_json(file: _File) -> dict[str, object]:
    remarks = [dataclasses.asdict(remark) for remark in file.after.remarks]
    return {"file": str(file.path), "changes": file.changes, "remarks": remarks}
