"""Changes to torch last as long as a sharded model lives, and disturb no other program."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from shardlib.engine._torch import hold_patches, patch, patches, unpatch
from tests.house.source import ROOT


def test_after_the_last_sharded_model_torch_is_what_it_was():
    """And DDP, FSDP2, DTensor and recomputation have the numbers beside a sharded model that they have alone."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.engine.untouched"]
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert len(report) == 8 and not any(report.values()), report


def test_changes_last_as_long_as_one_holds_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(patches, "_holders", set())  # models of other tests may live
    monkeypatch.setattr(patches, "_undo", {})
    made: list[str] = []

    def change(name: str):
        made.append(name)
        return lambda: made.remove(name)

    first, second = hold_patches(), hold_patches()
    patch("a", lambda: change("a"))
    patch("a", lambda: change("a"))
    patch("b", lambda: change("b"))
    patch("c", lambda: change("c"))
    unpatch("c")
    assert made == ["a", "b"]
    patch("a", lambda: change("a"), anew=True)
    assert made == ["b", "a"]
    first()
    first()
    assert made == ["b", "a"]
    second()
    assert made == []
    owner = type("Owner", (), {})()
    hold_patches(owner)
    patch("a", lambda: change("a"))
    assert made == ["a"]
    del owner
    assert made == []


def test_a_change_waits_for_one_that_another_thread_undoes(monkeypatch: pytest.MonkeyPatch):
    """As where the garbage collector ends the last model in a thread, while the next model is sharded."""
    monkeypatch.setattr(patches, "_holders", set())
    monkeypatch.setattr(patches, "_undo", {})
    made: list[str] = []
    undoing, go_on = threading.Event(), threading.Event()

    def change():
        made.append("a")

        def undo():
            undoing.set()
            go_on.wait()
            made.clear()

        return undo

    release = hold_patches()
    patch("a", change)
    thread = threading.Thread(target=release)
    thread.start()
    undoing.wait()
    threading.Timer(0.1, go_on.set).start()
    release = hold_patches()
    patch("a", change)
    assert made == ["a"]
    thread.join()
    assert made == ["a"]
    release()
    assert made == []
