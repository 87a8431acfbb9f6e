"""Log lines of the progress of long work, without times."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_logged() -> Iterator[list[str]]:
    """Collect the line that each work logs at its end, such as "proving: 2 passes"; on a rank, where caplog is not."""
    lines: list[str] = []
    log, handler = logging.getLogger("shardlib"), logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        if found := re.fullmatch(r"(.+ in|compiling .+ took) \d+\.\d\d s(, .+/s)?", record.getMessage()):
            lines.append(found[1].rpartition(" ")[0])

    handler.emit = emit  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
