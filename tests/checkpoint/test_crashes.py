"""Whatever stops a save, and whenever: the checkpoint before it is whole, or the new one is; and saving goes on."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardlib import checkpoint
from shardlib.checkpoint import _files
from shardlib.errors import CheckpointError
from tests.checkpoint.faults import KINDS, Crash, FileSystem


@pytest.fixture(autouse=True)
def _no_real_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not what is tested, and thousands of syncs take minutes."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


class Trained:
    """A model and an optimizer that are filled with one number."""

    def __init__(self, value: float) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=value)
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()
        self.fill(value)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in [*self.model.state_dict().values(), *self._state()]:
                tensor.fill_(value)

    def _state(self) -> list[torch.Tensor]:
        return [t for held in self.optimizer.state.values() for t in held.values()]

    def save(self, path: Path, **options: Any) -> None:
        checkpoint.save(path, self.model, self.optimizer, extra={"lr": self.optimizer.param_groups[0]["lr"]}, **options)

    def value(self) -> float:
        """The one number, everywhere."""
        values = {float(v) for t in [*self.model.state_dict().values(), *self._state()] for v in t.flatten()}
        values.add(float(self.optimizer.param_groups[0]["lr"]))
        assert len(values) == 1, f"a mixture: {values}"
        return values.pop()


def _loaded(path: Path) -> float:
    found = Trained(9.0)
    extra = checkpoint.load(path, found.model, found.optimizer).extra
    assert extra == {"lr": found.value()}
    return found.value()


def _operations(folder: Path, *, replacing: bool, **options: Any) -> list[str]:
    """What a save does to files when nothing fails."""
    path = folder / "counted"
    if replacing:
        Trained(1.0).save(path, **options)
    with FileSystem().installed() as system:
        Trained(2.0).save(path, **options)
    return system.done


@pytest.mark.covering
@pytest.mark.parametrize("weights", ["pieces", "huggingface"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replacing", [True, False])
def test_at_every_operation(tmp_path: Path, kind: str, replacing: bool, weights: str):
    operations = _operations(tmp_path, replacing=replacing, weights=weights)
    assert {"mkdir", "write", "fsync", "replace"} <= set(operations) and len(operations) > 20
    outcomes = set()
    for number, operation in enumerate(operations):
        path = tmp_path / f"{number}" / "checkpoint"
        path.parent.mkdir()
        if replacing:
            Trained(1.0).save(path)
        expected = CheckpointError if "error" in kind else Crash
        with FileSystem(number, kind).installed(), suppress(expected):
            Trained(2.0).save(path, weights=weights)
            outcomes.add("saved all the same")
        outcomes.add(_after(path, replacing, f"{kind} at operation {number}, {operation}"))
        Trained(3.0).save(path, weights=weights)
        assert _loaded(path) == 3.0
        assert [entry.name for entry in path.parent.iterdir()] == ["checkpoint"], "something was left lying about"
    assert {1.0 if replacing else None, 2.0} <= outcomes


def _after(path: Path, replacing: bool, when: str) -> float | None:
    """What is found after the fault: the old checkpoint or the new one, whole; or nothing, if there was no old one."""
    try:
        value = _loaded(path)
    except CheckpointError as error:
        assert not replacing and "there is nothing at" in str(error), f"{when}: {error}"
        return None
    assert value in (1.0, 2.0), when
    return value


def test_an_error_says_what_was_done_and_leaves_no_files(tmp_path: Path):
    with FileSystem(5).installed(), pytest.raises(CheckpointError) as caught:
        Trained(1.0).save(tmp_path / "checkpoint")
    assert str(caught.value).startswith(
        f'Saving "{tmp_path / "checkpoint"}" failed: [Errno 28] No space left on device'
    )
    assert list(tmp_path.iterdir()) == []


def _full(_path: Path, _mode: str) -> Any:
    return open("/dev/full", "wb")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real thing: Linux has a device that is always full."""
    if not os.path.exists("/dev/full"):
        return
    Trained(1.0).save(tmp_path / "checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr(_files, "open", _full, raising=False)
        with pytest.raises(CheckpointError, match="No space left on device"):
            Trained(2.0).save(tmp_path / "checkpoint")
    assert _loaded(tmp_path / "checkpoint") == 1.0


def test_a_folder_that_nobody_can_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tests may run as root, who can write to read-only folders: a file where a folder should be stops root too."""
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        Trained(1.0).save(tmp_path / "file" / "checkpoint")

    def read_only(path: Any, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "mkdir", read_only)
    with pytest.raises(CheckpointError, match=r"failed: \[Errno 30\] Read-only file system: '.*checkpoint.writing'"):
        Trained(1.0).save(tmp_path / "checkpoint")


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter-1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint of shardlib"):
        Trained(1.0).save(tmp_path / "thesis")
    (tmp_path / "file").write_text("more work")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint of shardlib"):
        Trained(1.0).save(tmp_path / "file")
    assert (tmp_path / "thesis" / "chapter-1.txt").read_text() == "years of work"
    assert (tmp_path / "file").read_text() == "more work"
