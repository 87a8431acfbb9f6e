"""`get_dist_logger`: a logger of Python's that knows ranks."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from shardlib.errors import InputError, nearest

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORM = "%(name)s - %(levelname)s: %(message)s"


class DistributedLogger:
    """A logger whose messages come from all ranks, or from those that are named. `get_dist_logger` returns them.

    It is `logging.getLogger(name)` underneath. Where a program has configured no handler, messages from INFO on go to
    stderr.

    Args:
        name: the name of the logger.
    """

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
        self._logger.setLevel(_checked(level))

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write messages to a file of this rank.

        Args:
            path: a folder, which is made if need be; the file in it is `rank_<rank>.log`, or
                `rank_<rank>_<suffix>.log`.
            mode: "a" appends, "w" overwrites.
            level: the lowest level that is written.
            suffix: a word in the file's name.
        """
        folder, end = Path(path), "" if suffix is None else f"_{suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank_{self.rank}{end}.log", mode)
        handler.setLevel(_checked(level))
        self._add(handler)

    def debug(self, message: str, ranks: Iterable[int] | None = None) -> None:
        """Log a message on some ranks, by default on all."""
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: str, ranks: Iterable[int] | None = None) -> None:
        """Log a message on some ranks, by default on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Iterable[int] | None = None) -> None:
        """Log a message on some ranks, by default on all."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Iterable[int] | None = None) -> None:
        """Log a message on some ranks, by default on all."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Iterable[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, "%s", message, stacklevel=3)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter(_FORM))
        self._logger.addHandler(handler)


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


def _checked(level: str) -> str:
    if level not in _LEVELS:
        raise InputError(f"level={level!r} was given; give one of {', '.join(_LEVELS)}.{nearest(str(level), _LEVELS)}")
    return level
