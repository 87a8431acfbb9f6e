"""A folder of checkpoints, one for each saved step: the newest one is found, and old ones are removed."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from shardlib.checkpoint._files import remove, rename
from shardlib.checkpoint._load import Loaded, load
from shardlib.checkpoint._manifest import MANIFEST
from shardlib.checkpoint._paths import claimed, given, located, writing
from shardlib.checkpoint._peers import Peers
from shardlib.checkpoint._save import Saving, check_options, peers_after_saving, save
from shardlib.errors import CheckpointError, warn

__all__ = ["Checkpoints"]

_STEP = re.compile(r"\.?step-(\d{6,})(?:\.previous)?")


class Checkpoints:
    """Checkpoints in a folder: `step-000120/` and so on.

    The newest checkpoint is the one with the largest step. A run may go back, by `load(step=10)`, and save step 20
    while there is a checkpoint of step 30. That one is of the run that was left: once the new one is complete, it is
    renamed to `left-000030`, with a warning. It is no longer the newest one then, and it is not removed.

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
        check_options("Checkpoints", options, "keep_last")
        self.folder, self.keep_last, self.options = given(folder, "Checkpoints"), keep_last, options
        self._saving: tuple[int, Saving] | None = None

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
        Another option of `save` given here goes before that of the constructor.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step={step!r} was given; give a number of steps from zero up.")
        options = {**self.options, **options}
        everyone = self._after_saving("save", options)
        self._tidy(everyone)
        saving = save(self.path(step), model, *args, **options)
        self._saving = step, saving
        if not options.get("background"):
            self._tidy(everyone)
        return saving

    @overload
    def load(
        self,
        model: nn.Module | None = None,
        *args: Any,
        step: int | None = None,
        missing_ok: Literal[False] = False,
        **options: Any,
    ) -> Loaded: ...

    @overload
    def load(
        self, model: nn.Module | None = None, *args: Any, step: int | None = None, missing_ok: bool, **options: Any
    ) -> Loaded | None: ...

    def load(
        self,
        model: nn.Module | None = None,
        *args: Any,
        step: int | None = None,
        missing_ok: bool = False,
        **options: Any,
    ) -> Loaded | None:
        """Load the newest checkpoint, or that of a step. Collective.

        A damaged one is refused, by its name; name the step before it to go on from there.

        With `missing_ok=True` it returns None if there is no checkpoint yet. Rank 0 looks, for all ranks: ranks that
        look by `latest()` may disagree, where machines see a new file of a shared folder at different times.
        """
        everyone = self._after_saving("load", options)
        self._tidy(everyone)
        steps = everyone.first("find checkpoints", self.steps)
        if not steps and missing_ok and step is None:
            return None
        if not steps:
            raise CheckpointError(f'There is no checkpoint in "{self.folder}". Save one first.')
        if step is not None and step not in steps:
            raise CheckpointError(
                f'There is no checkpoint of step {step!r} in "{self.folder}"; there are {", ".join(map(str, steps))}.'
            )
        return load(self.path(steps[-1] if step is None else step), model, *args, **options)

    def _after_saving(self, call: str, options: Mapping[str, Any]) -> Peers:
        timeout = options.get("timeout", self.options.get("timeout"))
        saving, self._saving = self._saving, None
        everyone = peers_after_saving(f"Checkpoints.{call}", f'looking into "{self.folder}"', timeout)
        self._saving = saving  # it has not failed
        return everyone

    def _tidy(self, everyone: Peers) -> None:
        """After a save that is complete, set aside checkpoints of a run that was left, and remove old ones."""
        saved, self._saving = self._saving, None
        if saved is None or saved[1].failed:
            return
        step = saved[0]
        left = everyone.first("remove old checkpoints", lambda: self._tidied(step))
        if left:
            warn(
                f"Step {step} was saved, and there were checkpoints of later steps, of a run that was left. They are "
                f"called {', '.join(left)} now, and are not loaded as the newest. Remove what you do not need."
            )

    def _tidied(self, saved: int) -> list[str]:
        """Tidy the folder after a step was saved, and return the names of what was set aside."""
        left = [self._set_aside(step) for step in self.steps() if step > saved]
        for unfinished in self.folder.glob(".removed-*"):
            remove(unfinished)
        for unfinished in self.folder.glob(".step-*.writing"):  # of a job that has crashed, unless one has the lock
            path = self.folder / unfinished.name[1 : -len(".writing")]
            with suppress(CheckpointError), claimed(path):
                remove(writing(path))
        if self.keep_last is not None:
            for step in self.steps()[: -self.keep_last]:
                gone = self.folder / f".removed-{step:06d}"
                rename(located(self.path(step)), gone)  # so that half of it is never taken for a checkpoint
                remove(gone)
        return left

    def _set_aside(self, step: int) -> str:
        name = next(n for n in _names_of_left(step) if not os.path.lexists(self.folder / n))
        rename(located(self.path(step)), self.folder / name)
        return name


def _names_of_left(step: int) -> Iterator[str]:
    return (f"left-{step:06d}" + (f"-{n}" if n else "") for n in itertools.count())
