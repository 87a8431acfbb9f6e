"""Log messages of the library, SHARDLIB_LOG, and the progress of long work."""

from __future__ import annotations

import io
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import nn

import shardlib as sl
from shardlib import _progress
from shardlib._log import erase_bar, log, set_up
from shardlib._progress import Progress

_SCRIPT = """
import torch, shardlib as sl
model = sl.shard_model(torch.nn.Linear(4, 4), "tp=1", {"**": None})
sl.save("run", model)
"""


def _run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SCRIPT]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def test_nothing_is_printed_unless_it_is_asked_for(tmp_path: Path):
    silent = _run(tmp_path)
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")
    said = _run(tmp_path, SHARDLIB_LOG="info", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    assert "[shardlib rank 0] shard_model: Linear on tp=1 took " in said.stderr
    assert f'saving "{tmp_path}/run": write took ' in said.stderr and "write ..." not in said.stderr


def test_messages_go_to_the_logger(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="shardlib"):
        sl.shard_model(nn.Linear(4, 4), "tp=1", {"**": None})
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO"] * 2
    assert caplog.messages[0] == "shard_model: plan of Linear ..."


# --- progress, by a clock of the test's own; what rich draws in between, by a thread, shows the same ---


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return not super().isatty()  # which raises where it is closed


class _Gone(_Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(_progress, "clock", made)
    return made


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Let stderr be a terminal; called inside of a test, before which pytest sets stderr itself."""
    made = _Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return made


def _timers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Timer]:
    """Collect timers, which then do nothing by themselves."""
    made: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            made.append(self)

        def join(self, timeout: float | None = None) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", Timer)
    return made


_REMOVED = "\n\r\x1b[1A\x1b[2K"  # one line up, which is erased
_CURSOR = "\x1b[?25"


def test_a_bar_appears_after_two_seconds_and_is_removed_at_the_end(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    terminal, timers = _terminal(monkeypatch), _timers(monkeypatch)
    with Progress('saving "[b]x"', unit="bytes", total=3_000_000_000) as progress:
        progress.advance(750_000_000)
        clock.now += 2.5
        assert [timer.interval for timer in timers] == [2.0] and terminal.getvalue() == ""
        timers[0].function()
        assert 'saving "[b]x" ' in terminal.getvalue()
        assert "750.0 MB / 3.0 GB, 300.0 MB/s, 0:00:08 left" in terminal.getvalue()
    assert terminal.getvalue().endswith(_REMOVED)
    assert _CURSOR not in terminal.getvalue()


def test_an_error_leaves_no_bar(clock: _Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    terminal, timers = _terminal(monkeypatch), _timers(monkeypatch)
    caplog.set_level(logging.INFO, logger="shardlib")
    with pytest.raises(ZeroDivisionError), Progress("proving", unit="passes") as progress:
        progress.advance()
        clock.now += 3
        timers[0].function()
        assert "proving " in terminal.getvalue() and "0:00:03" in terminal.getvalue()
        raise ZeroDivisionError
    assert terminal.getvalue().endswith(_REMOVED)
    assert _CURSOR not in terminal.getvalue() and caplog.messages == []


def _not_a_terminal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "stderr", io.StringIO())


def _closed(patch: pytest.MonkeyPatch) -> None:
    closed = _Terminal()
    closed.close()
    patch.setattr(sys, "stderr", closed)


@pytest.mark.parametrize(
    "forbid",
    [
        _not_a_terminal,
        _closed,
        lambda patch: patch.setattr(sys, "stderr", None),
        lambda patch: patch.setenv("TERM", "dumb"),
        lambda patch: patch.setenv("RANK", "1"),
        lambda patch: patch.setattr(log, "level", logging.WARNING),
        lambda patch: patch.setattr(threading, "main_thread", lambda: None),
    ],
    ids=["file", "closed", "none", "dumb", "rank", "level", "thread"],
)
def test_where_no_bar_belongs_nothing_is_drawn_and_no_thread_is_started(
    forbid: object, clock: _Clock, monkeypatch: pytest.MonkeyPatch
):
    terminal, timers = _terminal(monkeypatch), _timers(monkeypatch)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    forbid(monkeypatch)  # type: ignore[operator]
    for after in (0.0, 2.0):
        with Progress("saving", unit="bytes", total=10, after=after) as progress:
            progress.advance()
    assert timers == [] and (terminal.closed or terminal.getvalue() == "")
    monkeypatch.undo()


def test_the_log_has_a_line_every_30_seconds_and_at_the_end(clock: _Clock, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="shardlib"), Progress("proving", unit="passes", total=8) as progress:
        for seconds, passes in ((29, 1), (1, 1), (29, 1), (1, 1), (4, 4)):
            clock.now += seconds
            progress.advance(passes)
    assert caplog.messages == [
        "proving: 2/8 passes, 0.0667 passes/s, 0:01:30 left",
        "proving: 4/8 passes, 0.0667 passes/s, 0:01:00 left",
        "proving: 8 passes in 64.00 s, 0.125 passes/s",
    ]


def test_work_of_which_there_was_none_is_not_logged(clock: _Clock, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="shardlib"):
        with Progress("verifying", unit="bytes", total=0):
            pass
        with Progress("verifying", unit="bytes", total=12) as progress:
            progress.advance(12)
    assert caplog.messages == ["verifying: 12 B in 0.00 s"]


def test_work_inside_other_work_adds_a_line_to_its_bar(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    terminal, timers = _terminal(monkeypatch), _timers(monkeypatch)
    with Progress("training", unit="steps", total=4, after=0) as outer:
        with Progress("saving", unit="bytes", total=2_000) as inner:
            inner.advance(1_000)
            clock.now += 2
            timers[0].function()
            _progress._displays[0].refresh()
        both = terminal.getvalue()
        outer.advance(numbers={"Loss": "0.5"})
    drawn = both.splitlines()
    assert "training " in drawn[-2] and "0/4 steps" in drawn[-2]
    assert "saving " in drawn[-1] and "1.0 kB / 2.0 kB, 0.0 MB/s, 0:00:02 left" in drawn[-1]
    after = terminal.getvalue().removeprefix(both)
    assert "1/4 steps, 0.5 steps/s, 0:00:06 left, Loss = 0.5" in after and "saving" not in after.splitlines()[-1]
    assert not after.endswith(_REMOVED)  # a bar that is there from the beginning stays
    assert _progress._displays == []


def test_a_terminal_that_is_closed_meanwhile_does_not_end_the_work(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    terminal, timers = _terminal(monkeypatch), _timers(monkeypatch)
    with Progress("saving", unit="bytes", total=10) as progress:
        timers[0].function()
        assert terminal.getvalue() != ""
        monkeypatch.setattr(sys, "stderr", _Gone())
        progress.advance(10)
    assert progress.done == 10 and _progress._displays == []


def test_a_message_takes_the_place_of_a_bar_on_its_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="shardlib")  # which is put back at the end
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(log, "handlers", [])
    set_up("info")
    terminal.write("saving ━━━")
    log.info("hello")
    assert terminal.getvalue() == "saving ━━━\r\x1b[2K[shardlib rank 0] hello\n"
    terminal.write("proving ━━━")
    erase_bar()
    assert terminal.getvalue().endswith("proving ━━━\r\x1b[2K")


def test_bars_that_nobody_asked_for_are_not_shown(clock: _Clock, monkeypatch: pytest.MonkeyPatch):
    terminal = _terminal(monkeypatch)
    with Progress("Epoch 1 / Train", unit="steps", total=2, after=math.inf) as progress:
        clock.now += 1000
        progress.advance()
    assert terminal.getvalue() == ""
