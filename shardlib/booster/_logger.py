"""`get_dist_logger`: Python's logging on the ranks that a call names."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardlib.errors import InputError, ShardlibError, nearest

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class DistributedLogger:
    """A logger whose messages come from all ranks, or from those that are named. `get_dist_logger` returns them.

    It is `logging.getLogger(name)` underneath. Where a program has configured no handler, messages from INFO on go to
    stderr.

    Args:
        name: the name of the logger.
    """

    _error: type[ShardlibError] = InputError
    _form = logging.Formatter("%(name)s - %(levelname)s: %(message)s")

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        if not self._logger.hasHandlers():
            self._add(logging.StreamHandler(sys.stderr))
            self._logger.propagate = False
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.INFO)

    @property
    def rank(self) -> int:
        """This rank's number among all; 0 before a job has been joined."""
        return dist.get_rank() if dist.is_initialized() else 0

    def set_level(self, level: str) -> None:
        """Drop messages below a level: "DEBUG", "INFO", "WARNING" or "ERROR"."""
        self._logger.setLevel(self._checked(level))

    def log_to_file(
        self, path: str | os.PathLike[str], mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Also write messages to a file of this rank.

        Args:
            path: a folder, which is made if need be; the file in it is `rank_<rank>.log`, or
                `rank_<rank>_<suffix>.log`.
            mode: "a" appends, "w" overwrites.
            level: the lowest level that is written.
            suffix: a word in the file's name; an empty one is none.
        """
        lowest, folder = self._checked(level), Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self.rank}_{suffix}.log" if suffix else f"rank_{self.rank}.log"
        handler = logging.FileHandler(folder / name, mode, encoding="utf-8")
        handler.setLevel(lowest)
        self._add(handler)

    def close(self) -> None:
        """Close the files; messages go on to other handlers."""
        for handler in [each for each in self._logger.handlers if isinstance(each, logging.FileHandler)]:
            self._logger.removeHandler(handler)
            handler.close()

    def debug(self, message: Any, ranks: Iterable[int] | None = None) -> None:
        """Log a message, of any type, on some ranks, by default on every rank that calls it."""
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: Any, ranks: Iterable[int] | None = None) -> None:
        """Log a message as `debug` does, as information."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: Any, ranks: Iterable[int] | None = None) -> None:
        """Log a message as `debug` does, as a warning."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: Any, ranks: Iterable[int] | None = None) -> None:
        """Log a message as `debug` does, as an error. Raises nothing."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: Any, ranks: Iterable[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, "%s", message, stacklevel=3, extra=self._facts())

    def _facts(self) -> dict[str, Any]:
        """Return what the form of a line names beside the message."""
        return {}

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(self._form)
        self._logger.addHandler(handler)

    def _checked(self, level: str) -> str:
        if level not in _LEVELS:
            listed = ", ".join(_LEVELS)
            raise self._error(f"level={level!r} was given; give one of {listed}.{nearest(str(level), _LEVELS)}")
        return level


@functools.cache
def get_dist_logger(name: str = "shardlib") -> DistributedLogger:
    """Return the logger of a name, always the same one.

    >>> import logging
    >>> logger = get_dist_logger("training")
    >>> logger.info("epoch 1", ranks=[0])  # on stderr, or where handlers of `logging` write
    >>> logger is get_dist_logger("training"), logging.getLogger("training").level == logging.INFO
    (True, True)
    """
    return DistributedLogger(name)


def disable_existing_loggers(include: Iterable[str] | None = None, exclude: Iterable[str] = ("shardlib",)) -> None:
    """Let loggers that exist by now drop what is below WARNING.

    Args:
        include: the names of these loggers; by default all.
        exclude: without `include`, the names of loggers that stay as they are.
    """
    kept, named = set(exclude), None if include is None else set(include)
    for name in list(logging.Logger.manager.loggerDict):
        if name in named if named is not None else name not in kept:
            logging.getLogger(name).setLevel(logging.WARNING)
