"""A logger of a job: on the ranks that are asked for, with the rank in each line."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch.distributed as dist

from shardlib import booster
from shardlib.booster._plugins import _of_job
from shardlib.errors import LaunchError

__all__ = ["DistributedLogger", "get_dist_logger"]


class DistributedLogger(booster.DistributedLogger):
    """Python's logging, where given ranks write a line.

    It writes to stderr by a logger below "shardlib", which does not propagate to the root logger. `get_dist_logger`
    returns one for each name.

    Args:
        name: the name of Python's logger, below "shardlib".

    >>> get_dist_logger("docs") is get_dist_logger("docs")
    True
    >>> get_dist_logger("docs").debug("nobody reads this", ranks=[])
    """

    _error = LaunchError
    _form = logging.Formatter("[%(asctime)s] %(levelname)s rank %(rank)s: %(message)s", defaults={"rank": "?"})

    def __init__(self, name: str) -> None:
        self.name = name
        self._logger = logging.getLogger(f"shardlib.{name}")
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)
        if not self._logger.handlers:
            self._add(_ToStderr())

    @property
    def rank(self) -> int:
        """This rank's number among all, which a launcher says before the job has been joined."""
        return _of_job("RANK", 0)

    def _facts(self) -> dict[str, Any]:
        size = dist.get_world_size() if dist.is_initialized() else 1
        return {"rank": f"{self.rank} of {size}"}


class _ToStderr(logging.StreamHandler[Any]):
    """To what `sys.stderr` is when a line is written, not when the logger was made."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stderr


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
