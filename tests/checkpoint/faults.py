"""A file system that stops working at a chosen moment."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardlib.checkpoint import _files

KINDS = ("error", "errors from then on", "crash", "power loss")


class Crash(BaseException):
    """The process ends: nothing that it would have done after this is done."""


class FileSystem:
    """Counts what is done to files, and lets the operation with a number fail.

    Attributes:
        fail_at: number of the operation, or None.
        kind: "error": it fails and all others work; "errors from then on"; "crash": so do they, by a crash; "power
            loss": a crash after which files that were not synced are empty.
        done: the operations so far.
    """

    def __init__(self, fail_at: int | None = None, kind: str = "error") -> None:
        self.fail_at, self.kind, self.done = fail_at, kind, list[str]()
        self.unsynced: dict[int, int] = {}  # by number of the file itself: names change, and descriptors are reused

    def reach(self, what: str, half: Callable[[], Any] = lambda: None) -> None:
        """Say that an operation begins; where it is to fail, half of it may happen."""
        number = len(self.done)
        self.done.append(what)
        if self.fail_at is None or number < self.fail_at or (number > self.fail_at and self.kind == "error"):
            return
        if number == self.fail_at:
            half()
        if self.kind == "power loss":
            for descriptor in self.unsynced.values():
                os.ftruncate(descriptor, 0)
        if self.kind in ("crash", "power loss"):
            raise Crash(what)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

    @contextmanager
    def installed(self) -> Iterator[FileSystem]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "replace", "fsync", "rmdir", "unlink"):
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            patch.setattr(_files, "open", self._open, raising=False)
            try:
                yield self
            finally:
                for file in list(self.unsynced):
                    self._synced(file)

    def _synced(self, file: int) -> None:
        if file in self.unsynced:
            os.close(self.unsynced.pop(file))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reach(name)
            if name == "fsync":
                self._synced(os.fstat(args[0]).st_ino)
            return real(*args, **kwargs)

        return call

    def _open(self, path: Any, mode: str) -> Any:
        if "x" not in mode:
            return builtins.open(path, mode)
        self.reach("open")
        file = builtins.open(path, mode, buffering=0)  # noqa: SIM115
        self.unsynced[os.fstat(file.fileno()).st_ino] = os.dup(file.fileno())
        return _File(self, file)


class _File:
    def __init__(self, system: FileSystem, file: Any) -> None:
        self._system, self._file = system, file

    def write(self, data: Any) -> None:
        self._system.reach("write", half=lambda: self._file.write(bytes(data)[: len(data) // 2]))
        self._file.write(data)

    def flush(self) -> None:
        self._system.reach("flush")

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
