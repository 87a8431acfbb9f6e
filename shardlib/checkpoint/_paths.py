"""Paths of folders beside a checkpoint while it is replaced, and the choice of the folder to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardlib.checkpoint._files import new_folder, remove, rename
from shardlib.checkpoint._keep import keep_others
from shardlib.checkpoint._manifest import MANIFEST
from shardlib.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "begin",
    "begin_file",
    "check_replaceable",
    "claimed",
    "commit",
    "commit_file",
    "followed",
    "give_up",
    "given",
    "located",
    "writing",
]


def given(path: object, call: str) -> Path:
    """Return the path that a user gave, as an absolute one.

    Raises:
        CheckpointError: it is not a path, or a URL.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"{call} was given a {type(path).__name__} as path. Give the path first: "
            + ("Checkpoints(folder)." if call == "Checkpoints" else f"{call}(path, model).")
        )
    if "://" in os.fspath(path):
        raise CheckpointError(f'{call} was given "{path}". Give a path in a file system that all ranks see, not a URL.')
    return Path(path).absolute()


def check_replaceable(path: Path) -> None:
    """Refuse a folder that cannot be replaced by renaming without harm to this process.

    Raises:
        CheckpointError: it is the working directory, or holds it.
    """
    if Path(os.path.realpath(path)) in (Path.cwd(), *Path.cwd().parents):
        raise CheckpointError(
            f'"{path}" is the working directory, or holds it, and would be replaced. Save to a folder in it.'
        )


def followed(path: Path) -> Path:
    """Return the path that a link points to, or the path itself."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def writing(path: Path) -> Path:
    """Return the path at which a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.writing")


def _previous(path: Path) -> Path:
    """Return the path of the checkpoint that is being replaced, between two renames."""
    return path.with_name(f".{path.name}.previous")


def located(path: Path) -> Path:
    """Return the folder to read: the path itself, or the folder that a crash between two renames left."""
    target = followed(path)
    return path if os.path.lexists(target) or not (_previous(target) / MANIFEST).is_file() else _previous(target)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the right to write to a path, which one job at a time has; remove what was written if it fails.

    The right is a lock of the system on a file beside the path. It ends with the process, however that ends. On a file
    system without locks every job has it.

    Raises:
        CheckpointError: another job has it.
    """
    _check_parent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    descriptor = _locked(lock, path)
    try:
        yield
    except CheckpointError:
        give_up(path)
        raise
    finally:
        if descriptor is not None:
            try:
                with suppress(OSError):
                    lock.unlink()
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes that were forked meanwhile have it open too
                os.close(descriptor)


def _locked(lock: Path, path: Path) -> int | None:
    """Return the descriptor of a locked file; None where there are no locks."""
    if fcntl is None:
        return None
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f'another job is saving to "{path}" at this moment. Give each job a path of its own.'
            ) from None
        except OSError:
            os.close(descriptor)
            lock.unlink(missing_ok=True)
            return None
        os.close(descriptor)  # the job that had locked it has removed it


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
    remove(writing(path))
    new_folder(writing(path))


def _check_parent(path: Path) -> None:
    if path.parent.exists() and not path.parent.is_dir():
        raise CheckpointError(f'"{path.parent}" is not a folder. Save to a path in a folder.')


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def commit(path: Path) -> None:
    """Move the written checkpoint to its path, with the files of others in the folder that it replaces. Whenever this
    stops, `located` finds the old checkpoint or the new one.

    Raises:
        CheckpointError: a file of others has the name of a new one.
    """
    if path.is_dir():
        keep_others(path, writing(path))
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
