"""A folder of checkpoints, one for each step that was saved: the newest, and no more than are wanted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch import nn

from shardlib.checkpoint._files import remove, rename
from shardlib.checkpoint._load import Loaded, load
from shardlib.checkpoint._manifest import MANIFEST
from shardlib.checkpoint._paths import located
from shardlib.checkpoint._peers import peers
from shardlib.checkpoint._save import Saving, save, wait_for_saving
from shardlib.errors import CheckpointError

__all__ = ["Checkpoints"]

_STEP = re.compile(r"\.?step-(\d{6,})(?:\.previous)?")


class Checkpoints:
    """Checkpoints in a folder: `step-000120/` and so on.

    Args:
        folder: the folder of the checkpoints; created by the first save.
        keep_last: the number of checkpoints to keep; older ones are removed once a newer one is complete. None keeps
            all.
        options: arguments of `save` for every save, such as weights="huggingface".

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoints = Checkpoints(folder, keep_last=2)
        ...     for step in (10, 20, 30):
        ...         _ = checkpoints.save(step, model)
        ...     checkpoints.steps(), checkpoints.load(model).path.name
        ([20, 30], 'step-000030')
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep_last: int | None = None, **options: Any) -> None:
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise CheckpointError(f"keep_last={keep_last!r} was given; give a positive number of checkpoints, or None.")
        self.folder, self.keep_last, self.options = Path(folder).absolute(), keep_last, options

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which need not exist."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        found = {int(match[1]) for name in names if (match := _STEP.fullmatch(name))}
        return sorted(step for step in found if (located(self.path(step)) / MANIFEST).is_file())

    def latest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        steps = self.steps()
        return located(self.path(steps[-1])) if steps else None

    def save(self, step: int, model: nn.Module | None = None, *args: Any, **options: Any) -> Saving:
        """Save a checkpoint for a step, then remove all but the last `keep_last`. Collective.

        With `background=True`, older ones are removed when the next save or load begins, after this one is complete.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step={step!r} was given; give a number of steps from zero up.")
        wait_for_saving()
        self._remove_older()
        saving = save(self.path(step), model, *args, **{**self.options, **options})
        if saving.done():
            self._remove_older()
        return saving

    def load(self, model: nn.Module | None = None, *args: Any, step: int | None = None, **options: Any) -> Loaded:
        """Load the newest checkpoint, or that of a step. Collective.

        A damaged one is refused, by its name; name the step before it to go on from there.
        """
        wait_for_saving()
        everyone = peers(f'loading from "{self.folder}"', options.get("timeout", 1800))
        steps = everyone.first("find checkpoints", self.steps)
        if not steps:
            raise CheckpointError(f'There is no checkpoint in "{self.folder}". Save one first.')
        if step is not None and step not in steps:
            raise CheckpointError(
                f'There is no checkpoint of step {step!r} in "{self.folder}"; there are {", ".join(map(str, steps))}.'
            )
        return load(self.path(steps[-1] if step is None else step), model, *args, **options)

    def _remove_older(self) -> None:
        if self.keep_last is None:
            return
        everyone = peers(f'removing old checkpoints of "{self.folder}"', self.options.get("timeout", 1800))
        everyone.run("remove", self._remove if everyone.rank == 0 else lambda: None)

    def _remove(self) -> None:
        assert self.keep_last is not None
        for step in self.steps()[: -self.keep_last]:
            gone = self.folder / f".removed-{step:06d}"
            remove(gone)
            rename(located(self.path(step)), gone)  # so that half of it is never taken for a checkpoint
            remove(gone)
