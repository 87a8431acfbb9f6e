"""Progress of long work: a bar on rank 0's terminal, lines in the log; see `Progress`."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from shardlib._log import is_first_rank, is_terminal, log

if TYPE_CHECKING:
    import rich.progress

__all__ = ["Progress"]

SHOWN_AFTER = 2.0  # seconds
LOGGED_EVERY = 30.0  # seconds
_SCALES = (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")

clock = time.monotonic
_displays: list[rich.progress.Progress] = []  # at most one: work inside other work adds a line to its display


class Progress:
    """A block of long work, which counts what is done.

    On a terminal, rank 0 shows a bar once the work has taken a while, and removes it at the end. It shows none in other
    threads than the main one, nor where the level of the logger "shardlib" is above info. Each rank logs a line at the
    end, and one every 30 seconds, at level info; none where there was nothing to do.

    Args:
        what: the work, such as 'saving "step-000120"'.
        unit: "bytes", or a plural, such as "steps".
        total: the amount of all work; None where it is not known, or not yet.
        done: the amount that was done before.
        after: seconds until the bar is shown; infinity shows none. With 0, the bar stays at the end, and what is
            printed meanwhile goes above it.

    >>> with Progress("counting sheep", unit="sheep", total=3) as progress:
    ...     for _ in range(3):
    ...         progress.advance()
    >>> progress.done
    3
    """

    def __init__(
        self, what: str, *, unit: str, total: int | None = None, done: int = 0, after: float = SHOWN_AFTER
    ) -> None:
        self.what, self.unit, self.total, self.done, self._after = what, unit, total, done, after
        self._numbers: Mapping[str, object] = {}
        self._done_before = done
        self._begun, self._log_next = 0.0, 0.0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._end_drawing: Callable[[], None] | None = None

    def advance(self, amount: int = 1, numbers: Mapping[str, object] | None = None) -> None:
        """Add to what is done; `numbers` are shown beside it. Several threads may call it."""
        with self._lock:
            self.done += amount
            if numbers is not None:
                self._numbers = dict(numbers)
            now = clock()
            if now >= self._log_next:
                self._log_next = now + LOGGED_EVERY
                log.info("%s: %s", self.what, self._so_far(now))

    def __enter__(self) -> Self:
        self._begun = clock()
        self._log_next = self._begun + LOGGED_EVERY
        if self._after < math.inf and _may_draw():
            if self._after == 0:
                self._draw()
            else:
                self._timer = threading.Timer(self._after, self._draw)
                self._timer.daemon = True
                self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._end_drawing is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._end_drawing()
        if kind is None and self.done > self._done_before:
            log.info("%s", self._summary())

    def _draw(self) -> None:
        """Show the bar, which rich draws again by a thread of its own."""
        if _displays:
            display = _displays[0]
            self._end_drawing = partial(display.remove_task, display.add_task(self.what, progress=self))
            return
        display = _new_display(stays=self._after == 0)
        display.add_task(self.what, progress=self)
        self._end_drawing = partial(_stop, display)
        _displays.append(display)
        with contextlib.suppress(OSError):
            display.start()

    # --- text ---------------------------------------------------------------------------------------------------------

    def _so_far(self, now: float) -> str:
        """Describe what is done, how fast, and the time left."""
        seconds = now - self._begun
        texts = [str(timedelta(seconds=round(seconds)))]
        if self.total is not None:
            rate = (self.done - self._done_before) / seconds if seconds else 0.0
            texts = [self._amount(self.done, self.total)]
            if rate:
                left = timedelta(seconds=max(round((self.total - self.done) / rate), 0))
                texts += [self._rate(rate), f"{left} left"]
        return ", ".join([*texts, *(f"{name} = {value}" for name, value in self._numbers.items())])

    def _summary(self) -> str:
        seconds, amount = clock() - self._begun, self.done - self._done_before
        rate = f", {self._rate(amount / seconds)}" if seconds else ""
        return f"{self.what}: {self._amount(amount)} in {seconds:.2f} s{rate}"

    def _amount(self, *amounts: int) -> str:
        if self.unit == "bytes":
            return " / ".join(map(_bytes, amounts))
        return f"{'/'.join(map(str, amounts))} {self.unit}"

    def _rate(self, rate: float) -> str:
        return f"{rate / 1e6:.1f} MB/s" if self.unit == "bytes" else f"{rate:.3g} {self.unit}/s"


def _bytes(count: int) -> str:
    scale, name = next((each for each in _SCALES if count >= each[0]), _SCALES[-1])
    return f"{count / scale:.{1 if scale > 1 else 0}f} {name}"


def _may_draw() -> bool:
    """Return whether this is the main thread of rank 0, its stderr is a terminal, and no log level forbids a bar."""
    return (
        threading.current_thread() is threading.main_thread()
        and log.level <= logging.INFO
        and (bool(_displays) or is_terminal(sys.stderr))
        and is_first_rank()
    )


def _stop(display: rich.progress.Progress) -> None:
    _displays.remove(display)
    display.stop()


def _new_display(*, stays: bool) -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task, TextColumn
    from rich.progress_bar import ProgressBar
    from rich.table import Column
    from rich.text import Text

    class Terminal(Console):
        """Leaves the cursor visible: a process that is killed could not show it again."""

        def show_cursor(self, show: bool = True) -> bool:
            return False

    class Bar(ProgressColumn):
        def render(self, task: Task) -> ProgressBar:
            work = task.fields["progress"]
            return ProgressBar(work.total, work.done, width=40, pulse=work.total is None)

    class SoFar(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.fields["progress"]._so_far(clock()))

    return Progress(
        TextColumn("{task.description}", markup=False),
        Bar(),
        SoFar(Column(no_wrap=True)),
        console=Terminal(stderr=True, force_terminal=True),
        transient=not stays,
        # What takes the place of stdout writes to this console, so not where stdout is a file. A bar that appears later
        # takes no stream's place: another thread may be replacing it.
        redirect_stdout=stays and is_terminal(sys.stdout),
        redirect_stderr=stays,
    )
