"""Refusal to save one kind of a booster's checkpoints over another kind."""

from __future__ import annotations

import os
from pathlib import Path

from shardlib.checkpoint._folder import Folder
from shardlib.checkpoint._manifest import MANIFEST, Manifest
from shardlib.checkpoint._save import wait_for_saving
from shardlib.errors import CheckpointError

__all__ = ["refuse_to_replace"]

_KINDS = ("model", "optimizer", "lr_scheduler")


def refuse_to_replace(path: str | os.PathLike[str], kind: str) -> None:
    """Refuse to save over a checkpoint of another kind, which would be replaced.

    Raises:
        CheckpointError: the path has a checkpoint of another kind.
    """
    wait_for_saving()
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        return
    with Folder(folder) as held:
        manifest = Manifest.load(held.read(MANIFEST).decode())
    contents = {"model": manifest.tensors["model"], **{name: name in manifest.state for name in _KINDS[1:]}}
    others = [name for name, there in contents.items() if there and name != kind]
    if others:
        raise CheckpointError(
            f'"{folder}" holds the checkpoint of a {others[0]}, and that of a {kind} would replace it. Give each a '
            f'folder of its own, such as "{folder / kind}".'
        )
