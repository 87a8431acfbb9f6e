"""Logging: messages go to the logger "shardlib", which shows none unless the user or SHARDLIB_LOG configures it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from shardlib.errors import InputError, nearest

__all__ = ["erase_bar", "is_first_rank", "is_terminal", "log", "set_up", "timed"]

_VARIABLE = "SHARDLIB_LOG"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_ERASE_LINE = "\r\x1b[2K"

log = logging.getLogger("shardlib")
log.addHandler(logging.NullHandler())


class _OfRank(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr, each line with the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[shardlib rank %(rank)s] %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = os.environ.get("RANK", "0")
        return True

    def format(self, record: logging.LogRecord) -> str:
        """Put the message in the place of a progress bar, which its process draws again below."""
        return (_ERASE_LINE if is_terminal(self.stream) else "") + super().format(record)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that can erase a line."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    except ValueError:  # it is closed
        return False


def is_first_rank() -> bool:
    """Return whether this is rank 0, or a process without ranks: the one that tells a person what all ranks know."""
    dist = sys.modules.get("torch.distributed")
    joined = dist is not None and dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if dist is not None and joined else int(os.environ.get("RANK", "0"))) == 0


def erase_bar() -> None:
    """Erase the progress bar of a process that was killed, if stderr is a terminal."""
    if is_terminal(sys.stderr):
        sys.stderr.write(_ERASE_LINE)
        sys.stderr.flush()


def set_up(level: str | None) -> None:
    """Write the messages of a level and above to stderr; None changes nothing.

    Raises:
        InputError: no such level.

    >>> set_up("loud")
    Traceback (most recent call last):
    shardlib.errors.InputError: SHARDLIB_LOG="loud" is not a level. Give debug, info, warning or error.
    """
    if level is None:
        return
    if level.lower() not in _LEVELS:
        raise InputError(
            f'{_VARIABLE}="{level}" is not a level. Give debug, info, warning or error.{nearest(level, _LEVELS)}'
        )
    log.setLevel(_LEVELS[level.lower()])
    log.handlers = [each for each in log.handlers if not isinstance(each, _OfRank)] + [_OfRank()]


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Log that something begins, at level debug, and how long it took, at level info."""
    if not log.isEnabledFor(logging.INFO):
        yield
        return
    log.debug("%s ...", what)
    start = time.perf_counter()
    yield
    log.info("%s took %.2f s", what, time.perf_counter() - start)


set_up(os.environ.get(_VARIABLE) or None)
