"""Where a checkpoint is saved to: links, two jobs at one path, files of others in a folder that is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardlib import checkpoint
from shardlib.checkpoint import _paths, _save
from shardlib.checkpoint._manifest import MANIFEST
from shardlib.errors import CheckpointError
from shardlib.testing import shared_pool
from tests.checkpoint.faults import Crash, FileSystem


def filled(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_at(path: Path) -> float:
    model = filled(9.0)
    checkpoint.load(path, model, verify="all" if path.is_dir() else "read")
    (value,) = {float(v) for parameter in model.parameters() for v in parameter.detach().flatten()}
    return value


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["pieces", "huggingface", "file"])
@pytest.mark.parametrize("background", [False, True])
def test_a_link_stays_one_and_what_it_points_to_is_replaced(tmp_path: Path, weights: str, background: bool):
    folder, link = tmp_path / "disk" / "step-10", tmp_path / "latest"
    folder.parent.mkdir()
    link.symlink_to(Path("disk") / "step-10")  # to nothing yet
    for value in (1.0, 2.0, 3.0):
        saved = checkpoint.save(link, filled(value), weights=weights, background=background).wait()
        assert saved == link and link.is_symlink()
        assert value_at(link) == value_at(folder) == value
    assert sorted(os.listdir(tmp_path)) == ["disk", "latest"] and os.listdir(folder.parent) == ["step-10"]


def test_a_link_that_an_older_save_left_beside_is_removed(tmp_path: Path):
    folder, left = tmp_path / "step-10", tmp_path / ".step-10.previous"
    left.symlink_to(tmp_path / "elsewhere")
    for value in (1.0, 2.0):
        checkpoint.save(folder, filled(value))
        assert value_at(folder) == value
    assert os.listdir(tmp_path) == ["step-10"]


def test_a_link_is_read_while_what_it_points_to_is_replaced(tmp_path: Path):
    (tmp_path / "latest").symlink_to(tmp_path / "step-10")
    checkpoint.save(tmp_path / "step-10", filled(1.0))
    (tmp_path / "step-10").rename(tmp_path / ".step-10.previous")  # as a save does, between two renames
    assert value_at(tmp_path / "latest") == 1.0


# --- two jobs -------------------------------------------------------------------------------------------------------


def _in_the_midst(monkeypatch: pytest.MonkeyPatch, name: str, meanwhile: Callable[[], None]) -> None:
    """Call it once, before the first save comes to the function of that name."""
    real = getattr(_save, name)

    def call(*args: Any) -> Any:
        monkeypatch.setattr(_save, name, real)
        meanwhile()
        return real(*args)

    monkeypatch.setattr(_save, name, call)


def _told(path: Path, value: float) -> str:
    try:
        checkpoint.save(path, filled(value))
    except CheckpointError as error:
        return str(error)
    return "saved"


def _told_in_another_process(path: Path, value: float) -> str:
    return shared_pool(1).run(_told, path, value)[0]


@pytest.mark.parametrize(
    ("moment", "replacing", "tell"),
    [
        ("write_tensors", False, _told_in_another_process),
        ("write_tensors", True, _told),
        ("write_bytes", False, _told),
        ("write_bytes", True, _told),
    ],
)
def test_of_two_jobs_that_save_to_one_folder_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, replacing: bool, tell: Callable[[Path, float], str]
):
    path, told = tmp_path / "new" / "checkpoint", list[str]()
    if replacing:
        checkpoint.save(path, filled(0.0))
    _in_the_midst(monkeypatch, moment, lambda: told.append(tell(path, 2.0)))
    checkpoint.save(path, filled(1.0))
    assert told == [
        f'Saving "{path}" failed: another job is saving to "{path}" at this moment. Give each job a path of its own.'
    ]
    assert value_at(path) == 1.0 and os.listdir(path.parent) == ["checkpoint"]
    checkpoint.save(path, filled(3.0))
    assert value_at(path) == 3.0


def test_a_job_that_failed_or_was_killed_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "checkpoint"

    def fails(*_args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_save, "write_tensors", fails)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(path, filled(1.0))
    assert os.listdir(tmp_path) == []
    (tmp_path / ".checkpoint.lock").touch()  # what a killed job leaves
    _paths.writing(path).mkdir()
    checkpoint.save(path, filled(2.0))
    assert value_at(path) == 2.0 and os.listdir(tmp_path) == ["checkpoint"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_args: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_paths.fcntl, "flock", no_locks)
    checkpoint.save(tmp_path / "checkpoint", filled(1.0))
    assert value_at(tmp_path / "checkpoint") == 1.0 and os.listdir(tmp_path) == ["checkpoint"]


# --- files of others ------------------------------------------------------------------------------------------------


def _add_files(folder: Path) -> dict[str, str]:
    """Add files as users do, and return what is in them."""
    texts = {"notes.txt": "good", "tokenizer/vocab.json": "{}", "values/mine.bin": "1", "adapter.safetensors": "2"}
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "to-nothing").symlink_to("nowhere")
    return texts


@pytest.mark.parametrize("links", [True, False])
def test_files_of_others_stay_when_a_checkpoint_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
):
    def no_links(*_args: Any, **_options: Any) -> None:
        raise OSError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path, new = tmp_path / "checkpoint", tmp_path / "fresh"
    checkpoint.save(path, filled(1.0), weights="huggingface", shard_mb=1e-6)  # other names, and an index
    texts = _add_files(path)
    checkpoint.save(new, filled(2.0), extra={"values": torch.ones(1)})
    for value in (2.0, 3.0):
        checkpoint.save(path, filled(value), extra={"values": torch.ones(1)})
        assert value_at(path) == value
        assert {name: (path / name).read_text() for name in texts} == texts
        assert os.readlink(path / "to-nothing") == "nowhere"
        assert _names(path) == _names(new) | set(texts) | {"to-nothing"}
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "fresh"]


def _names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def test_files_of_others_beside_a_damaged_manifest_stay(tmp_path: Path):
    checkpoint.save(tmp_path / "checkpoint", filled(1.0))
    (tmp_path / "checkpoint" / "notes.txt").write_text("good")
    (tmp_path / "checkpoint" / MANIFEST).write_text("{")
    checkpoint.save(tmp_path / "checkpoint", filled(2.0))
    assert value_at(tmp_path / "checkpoint") == 2.0
    assert (tmp_path / "checkpoint" / "notes.txt").read_text() == "good"


def test_a_file_of_others_with_the_name_of_a_new_one_stops_the_save(tmp_path: Path):
    path = tmp_path / "checkpoint"
    checkpoint.save(path, filled(1.0))
    (path / "model.safetensors").write_text("mine")
    with pytest.raises(CheckpointError, match=r'checkpoint/model.safetensors" is not part of the checkpoint there'):
        checkpoint.save(path, filled(2.0), weights="huggingface")
    assert value_at(path) == 1.0 and (path / "model.safetensors").read_text() == "mine"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_files_of_others_stay_whatever_stops_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    number, ended = 0, False
    while not ended:
        path = tmp_path / f"{number}" / "checkpoint"
        checkpoint.save(path, filled(1.0))
        (path / "notes.txt").write_text("good")
        try:
            with FileSystem(number, "crash").installed() as system:
                checkpoint.save(path, filled(2.0))
            ended = number >= len(system.done)
        except Crash:
            pass
        assert value_at(path) in (1.0, 2.0)
        checkpoint.save(path, filled(3.0))
        assert value_at(path) == 3.0 and (path / "notes.txt").read_text() == "good", number
        number += 1
    assert number > 20
