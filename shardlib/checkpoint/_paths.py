"""Paths of folders beside a checkpoint while it is replaced, and the choice of the folder to read."""

from __future__ import annotations

import os
from pathlib import Path

from shardlib.checkpoint._files import new_folder, remove, rename
from shardlib.checkpoint._manifest import MANIFEST
from shardlib.errors import CheckpointError

__all__ = ["begin", "begin_file", "commit", "commit_file", "give_up", "located", "writing"]


def writing(path: Path) -> Path:
    """Return the path at which a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.writing")


def _previous(path: Path) -> Path:
    """Return the path of the checkpoint that is being replaced, between two renames."""
    return path.with_name(f".{path.name}.previous")


def located(path: Path) -> Path:
    """Return the folder to read: the path itself, or the folder that a crash between two renames left."""
    return path if os.path.lexists(path) or not (_previous(path) / MANIFEST).is_file() else _previous(path)


def begin(path: Path) -> None:
    """Create the folder to write to, after removing what an earlier crash has left.

    Raises:
        CheckpointError: the path exists and is not a checkpoint.
    """
    if located(path) != path:
        rename(_previous(path), path)
    if os.path.lexists(path) and not (path / MANIFEST).is_file() and not _is_empty(path):
        raise CheckpointError(
            f'"{path}" exists and is not a checkpoint of shardlib ({MANIFEST} is not in it), so it is not replaced. '
            "Save to a new path, or remove it first."
        )
    _check_parent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(_previous(path))
    remove(writing(path))
    new_folder(writing(path))


def begin_file(path: Path) -> None:
    """Prepare to write a checkpoint of one file, which may replace another.

    Raises:
        CheckpointError: the path is a folder.
    """
    if path.is_dir():
        raise CheckpointError(f'"{path}" is a folder, and one file is to be written. Give the path of a file.')
    _check_parent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(writing(path))
    new_folder(writing(path))


def _check_parent(path: Path) -> None:
    if path.parent.exists() and not path.parent.is_dir():
        raise CheckpointError(f'"{path.parent}" is not a folder. Save to a path in a folder.')


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def commit(path: Path) -> None:
    """Move the written checkpoint to its path. Whenever this stops, `located` finds the old checkpoint or the new
    one."""
    if path.is_dir():
        rename(path, _previous(path))
    try:
        rename(writing(path), path)
    except OSError:
        if (_previous(path) / MANIFEST).is_file() and not os.path.lexists(path):
            rename(_previous(path), path)
        raise
    remove(_previous(path))


def commit_file(path: Path, name: str) -> None:
    """Move one written file to its path, by one rename, and remove the others."""
    rename(writing(path) / name, path)
    remove(writing(path))


def give_up(path: Path) -> None:
    """Remove the files written so far, as far as the system allows."""
    try:
        remove(writing(path))
    except OSError:
        return
