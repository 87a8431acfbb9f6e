"""A folder that is held open while it is read, so that a folder that replaces it is never mixed with it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from shardlib.errors import CheckpointError

__all__ = ["LARGEST", "Folder"]

LARGEST = 1 << 30  # bytes of a file that is read whole

_BY_DESCRIPTOR = {os.open, os.stat} <= os.supports_dir_fd and os.path.isdir("/dev/fd")


class Folder:
    """An open folder. Its files are those of this folder, whatever is renamed to its path meanwhile.

    The identity of a file (inode, time, size) is noted when the file is first opened. So a file that is written anew,
    or renamed into the folder, is found. Where the system cannot open files relative to a folder, paths are used.

    Attributes:
        path: the path of the folder when it was opened.

    Raises:
        CheckpointError: there is no folder at the path any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._noted: dict[str, tuple[int, ...]] = {}
        self._descriptor: int | None = None
        try:
            if _BY_DESCRIPTOR:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            self._device_and_inode = _device_and_inode(os.stat(path if self._descriptor is None else self._descriptor))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f"{self.was_replaced()} (If this rank does not see the folder that rank 0 found: give a path that all "
                "ranks share.)"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading.

        Raises:
            CheckpointError: it is missing, is not a regular file, or is not the file that had this name before.
        """
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for a writer
        try:
            descriptor = os.open(self._relative(name), flags, dir_fd=self._descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(
                f'"{self.path / name}" is missing. The checkpoint is damaged; use another one.'
            ) from error
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f'"{self.path / name}" is not a regular file. Use another checkpoint.')
            if self._noted.setdefault(name, _which(status)) != _which(status):
                raise self.was_replaced()
            yield file

    def read(self, name: str) -> bytes:
        """Read a manifest or an index, whole.

        Raises:
            CheckpointError: as `open` does; or it is too large, which is found before it is read.
        """
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST:
                raise CheckpointError(
                    f'"{self.path / name}" has {size} bytes, and such a file has at most {LARGEST}. Use another '
                    "checkpoint."
                )
            return file.read(LARGEST)

    def address(self, file: BinaryIO, name: str) -> str:
        """Return a path at which others open an open file of this folder."""
        return str(self.path / name) if self._descriptor is None else f"/dev/fd/{file.fileno()}"

    def is_elsewhere(self) -> bool:
        """Return whether another folder, or none, is at the path now."""
        try:
            return _device_and_inode(os.stat(self.path)) != self._device_and_inode
        except OSError:
            return True

    def has_changed(self) -> bool:
        """Return whether another file has the name of one that was opened. Files that were removed stay open."""
        return any(self._now(name) not in (None, noted) for name, noted in self._noted.items())

    def was_replaced(self) -> CheckpointError:
        """Return the error of a folder that was replaced while it was read."""
        return CheckpointError(f'"{self.path}" was replaced while it was read. Load it again.')

    def _relative(self, name: str) -> str:
        return str(self.path / name) if self._descriptor is None else name

    def _now(self, name: str) -> tuple[int, ...] | None:
        try:
            return _which(os.stat(self._relative(name), dir_fd=self._descriptor))
        except OSError:
            return None


def _which(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _device_and_inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
