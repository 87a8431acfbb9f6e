"""A logger of a job: on the ranks that are asked for, with the rank in each line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardlib.booster._plugins import _of_job
from shardlib.errors import LaunchError, nearest

__all__ = ["DistributedLogger", "get_dist_logger"]

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_FORMAT = "[%(asctime)s] %(levelname)s rank %(rank)s: %(message)s"


class DistributedLogger:
    """Python's logging, where given ranks write a line.

    It writes to stderr by a logger below "shardlib", which does not propagate to the root logger. `get_dist_logger`
    returns one for each name.

    Args:
        name: the name of Python's logger, below "shardlib".

    >>> get_dist_logger("docs") is get_dist_logger("docs")
    True
    >>> get_dist_logger("docs").debug("nobody reads this", ranks=[])
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._logger = logging.getLogger(f"shardlib.{name}")
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        if not self._logger.handlers:
            self._add(_ToStderr())

    def info(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Write a line.

        Args:
            message: the message, of any type.
            ranks: the ranks that write it, such as [0]; by default every rank that calls this.
        """
        self._log(logging.INFO, message, ranks)

    def warning(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Log a message as `info` does, as a warning."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Log a message as `info` does, for debugging."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Log a message as `info` does, as an error. Raises nothing."""
        self._log(logging.ERROR, message, ranks)

    def set_level(self, level: str) -> None:
        """Write lines of this level and above: "DEBUG", "INFO", "WARNING" or "ERROR"."""
        self._logger.setLevel(_level(level))

    def log_to_file(self, path: str | os.PathLike[str], mode: str = "a", level: str = "INFO", suffix: str = "") -> None:
        """Write to a file too, one for each rank: `rank_0.log` and so on.

        Args:
            path: the folder of the files; created if needed.
            mode: "a" to append to an existing file, "w" to replace it.
            level: the least level that is written.
            suffix: put into the file's name, `rank_0_suffix.log`.
        """
        number, folder = _level(level), Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"rank_{_of_job('RANK', 0)}{'_' + suffix if suffix else ''}.log"
        handler = logging.FileHandler(file, mode=mode, encoding="utf-8")
        handler.setLevel(number)
        self._add(handler)

    def close(self) -> None:
        """Close the files, and write to stderr alone."""
        for handler in [each for each in self._logger.handlers if isinstance(each, logging.FileHandler)]:
            self._logger.removeHandler(handler)
            handler.close()

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter(_FORMAT, defaults={"rank": "?"}))
        self._logger.addHandler(handler)

    def _log(self, level: int, message: Any, ranks: Sequence[int] | None) -> None:
        rank = _of_job("RANK", 0)
        if ranks is None or rank in ranks:
            size = dist.get_world_size() if dist.is_initialized() else 1
            self._logger.log(level, "%s", message, extra={"rank": f"{rank} of {size}"})


class _ToStderr(logging.StreamHandler[Any]):
    """To what `sys.stderr` is when a line is written, not when the logger was made."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr


def _level(name: str) -> int:
    if name not in _LEVELS:
        raise LaunchError(f"level={name!r} was given; give one of {', '.join(_LEVELS)}.{nearest(str(name), _LEVELS)}")
    return int(getattr(logging, name))


_MADE: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = "trainer") -> DistributedLogger:
    """Return the logger of a name, the same one each time.

    >>> logger = get_dist_logger()
    >>> logger.info("an epoch has ended", ranks=[])
    """
    if not isinstance(name, str) or not name or name.startswith("."):
        raise LaunchError(f'A logger was asked for by the name {name!r}; give a word such as "train".')
    if name not in _MADE:
        _MADE[name] = DistributedLogger(name)
    return _MADE[name]
