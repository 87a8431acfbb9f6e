"""Places of a JAX program in what its author wrote: a module of torch, or a line of a function."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from jax.extend import source_info_util

__all__ = ["NOWHERE", "Locate", "Place", "folded", "in_module", "on_line", "unnumbered"]


@dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
        names: the names that JAX's name stack has there.
        module: the dotted name of a module of torch; in a function of JAX, its names of `jax.named_scope`.
        op: the op of torch, or the primitive of JAX; "" outside of ops.
        line: a source line, as in "gpt.py:57 in Block.__call__"; "" in a module of torch.
        code: its text.
        backward: whether it computes a gradient.
    """

    names: str = ""
    module: str = ""
    op: str = ""
    line: str = ""
    code: str = ""
    backward: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """The same value for the places of repeated blocks."""
        where = (unnumbered(self.line), self.code) if self.line else (self.op,)
        return (*where, folded(self.module), "backward" if self.backward else "")


NOWHERE = Place()
PARAMETERS = "parameters"  # what no line computes

Locate = Callable[[Any, Place], Place]


def folded(name: str) -> str:
    """Return a name with its numbers replaced: repeated blocks have one.

    >>> folded("blocks.12.up")
    'blocks.*.up'
    """
    return re.sub(r"\d+", "*", name)


def unnumbered(line: str) -> str:
    """Return a line without its number, which any change of the file above it would move.

    >>> unnumbered("gpt.py:57 in Block.__call__")
    'gpt.py in Block.__call__'
    """
    return re.sub(r":\d+ in ", " in ", line, count=1)


def in_module(eqn: Any, outer: Place) -> Place:
    """Locate an equation of a compiled model, whose names are "module|op"."""
    names = _names(eqn, outer)
    module, bar, op = names.split("/")[0].partition("|")
    return Place(names, "" if module == "(root)" else module, op) if bar else Place(names)


def on_line(function: Any) -> Locate:
    """Return what locates equations of a function on the innermost lines of its author.

    These are lines of files that are not installed; if there are none, those of the function's own package.
    """
    own = (getattr(function, "__module__", None) or "").partition(".")[0]

    def locate(eqn: Any, outer: Place) -> Place:
        names = _names(eqn, outer)
        line, code = _line(eqn.source_info.traceback, own) or (outer.line or PARAMETERS, outer.code)
        module = "/".join(filter(_NAME.fullmatch, (_TRANSFORMED.sub("", n).rstrip(")") for n in names.split("/"))))
        backward = outer.backward or "transpose(" in names
        return Place(names, module, eqn.primitive.name, line, code, backward)

    return locate


_TRANSFORMED = re.compile(r"^(?:\w+\()+")  # transpose(jvp(name))
_NAME = re.compile(r"[\w.~]+")  # and no formula of an einsum
_FRAME = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::\d+)? \((?P<function>.+)\)")
_DEEPEST = 64  # frames


def _names(eqn: Any, outer: Place) -> str:
    return "/".join(filter(None, (outer.names, str(eqn.source_info.name_stack))))


@functools.lru_cache(maxsize=4096)
def _line(traceback: Any, own: str) -> tuple[str, str] | None:
    """Return the line of a traceback, with its number and function, and its text."""
    info = source_info_util.SourceInfo(traceback, source_info_util.new_name_stack())
    found = map(_FRAME.fullmatch, reversed(source_info_util.summarize(info, _DEEPEST).splitlines()))
    inside = itertools.takewhile(lambda frame: not frame["file"].startswith(_OURS), filter(None, found))
    frames = [(_installed_package(frame["file"]), frame) for frame in inside]
    wanted = ([frame for package, frame in frames if package == each] for each in ("", own))
    frame = next((those[0] for those in (*wanted, [frame for _, frame in frames]) if those), None)
    if frame is None:
        return None
    file, number, function = frame["file"], int(frame["line"]), frame["function"].replace("<locals>.", "")
    return f"{_relative(file)}:{number} in {function}", linecache.getline(file, number).strip()


_OURS = f"{Path(__file__).parents[1]}{os.sep}"


def _installed_package(file: str) -> str:
    """Return the installed package that a file belongs to, or ""."""
    parts = PurePath(file).parts
    folder = next((name for name in ("site-packages", "dist-packages") if name in parts), None)
    return "" if folder is None else parts[parts.index(folder) + 1].removesuffix(".py")


def _relative(file: str) -> str:
    """Return the name of a file below the folder that it is imported from: the same on every machine."""
    path = PurePath(file)
    folders = (PurePath(folder or Path.cwd()) for folder in sys.path)
    longest = max(filter(path.is_relative_to, folders), key=lambda folder: len(folder.parts), default=None)
    return path.name if longest is None else path.relative_to(longest).as_posix()
