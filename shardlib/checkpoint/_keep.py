"""Files of others in the folder of a checkpoint, such as notes or a tokenizer: a save that replaces it keeps them."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from shardlib.checkpoint._files import sync_folder
from shardlib.checkpoint._folder import Folder
from shardlib.checkpoint._manifest import FILE, MANIFEST, Manifest
from shardlib.errors import CheckpointError

__all__ = ["keep_others"]

_INDEX = re.compile(r"model\.safetensors\.index(\.[A-Za-z0-9_-]+)?\.json")
_CONFIG = ("config.json", "generation_config.json")  # ours or another's: the newer one is right


def keep_others(old: Path, new: Path) -> None:
    """Link or copy what is not part of the checkpoint in a folder to a new folder, which is not in place yet.

    The old folder is left as it is. So whatever stops a save, the files are where they were.

    Raises:
        CheckpointError: a file of others has the name of a new one.
    """
    _keep(old, new, "", _of_checkpoint(old))


def _of_checkpoint(folder: Path) -> Callable[[str], bool]:
    """Return a function that says whether a file is part of the checkpoint in a folder, by its path there."""
    try:
        with Folder(folder) as held:
            listed = {file.path for file in Manifest.load(held.read(MANIFEST).decode()).files}
    except (CheckpointError, UnicodeError, OSError):  # damaged: what could be ours is
        return lambda name: name == MANIFEST or bool(_INDEX.fullmatch(name) or FILE.fullmatch(name))
    return lambda name: name in listed or name == MANIFEST or bool(_INDEX.fullmatch(name))


def _keep(old: Path, new: Path, within: str, ours: Callable[[str], bool]) -> None:
    kept = False
    for entry in sorted(os.scandir(old), key=lambda entry: entry.name):
        name, target = within + entry.name, new / entry.name
        if entry.is_dir(follow_symlinks=False):
            _keep(Path(entry.path), target, f"{name}/", ours)
        elif not ours(name) and not (name in _CONFIG and target.exists()):
            if os.path.lexists(target):
                raise CheckpointError(
                    f'"{entry.path}" is not part of the checkpoint there, and a file of the new one has its name. Move '
                    "it to another folder."
                )
            new.mkdir(parents=True, exist_ok=True)
            _link_or_copy(entry.path, target)
            kept = True
    if kept:
        sync_folder(new)


def _link_or_copy(source: str, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
