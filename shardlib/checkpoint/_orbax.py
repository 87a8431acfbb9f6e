"""Checkpoints of orbax, as flax, t5x and MaxText write them: read by slices, without JAX.

orbax keeps a tree of arrays in the formats of tensorstore, one array for each path, and says in `_METADATA` what the
paths are (its documentation has a "checkpoint format guide"; tried with orbax-checkpoint 0.12.8, with and without
OCDBT, zarr and zarr3).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from shardlib.checkpoint._folder import Folder
from shardlib.errors import CheckpointError
from shardlib.layout._boxes import Box

__all__ = ["METADATA", "OrbaxReaders", "is_orbax", "located"]

METADATA = "_METADATA"
_UNFINISHED = ".orbax-checkpoint-tmp"
_OF_A_STEP = "_CHECKPOINT_METADATA"
_NO_ARRAYS = ("None", "string", "Dict", "List")


def is_orbax(folder: Path) -> bool:
    """Return whether a folder holds a tree of arrays of orbax."""
    return (folder / METADATA).is_file()


def located(path: Path) -> Path:
    """Return the folder of the arrays: the path itself, or the one item of a step of `CheckpointManager`.

    Raises:
        CheckpointError: a step of several items, a folder of steps, or a step that orbax did not finish.
    """
    if _UNFINISHED in path.name:
        raise CheckpointError(f'"{path}" was not finished when it was saved. Use another checkpoint.')
    if is_orbax(path) or not path.is_dir():
        return path
    inner = sorted(entry for entry in path.iterdir() if is_orbax(entry))
    if len(inner) > 1:
        raise CheckpointError(
            f'"{path}" is a step of orbax with {len(inner)} trees of arrays: '
            + ", ".join(f'"{entry.name}"' for entry in inner)
            + ". Give the path of one of them."
        )
    if inner:
        return inner[0]
    steps = sorted(entry.name for entry in path.iterdir() if (entry / _OF_A_STEP).is_file())
    if steps:
        raise CheckpointError(
            f'"{path}" is a folder of {len(steps)} checkpoints of orbax: {", ".join(steps[-8:])}. Give the path of one '
            "of them."
        )
    return path


class OrbaxReaders:
    """The arrays of one checkpoint, opened when they are asked for; slices of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = _metadata(folder)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def open(self, file: str) -> None:
        """Do nothing: arrays are opened by name, when they are read."""

    def headers(self, file: str) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of every array by its path, keys joined with dots."""
        names = [name for entry in self._metadata["tree_metadata"].values() if (name := _name(entry)) is not None]
        pending = {name: self._opening(name) for name in names}
        return {name: self._header(name, opening) for name, opening in pending.items()}

    def read(self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], part: Box) -> torch.Tensor:
        """Read a part of an array."""
        if name not in self._open:
            found = self._header(name, self._opening(name))
            if found != (dtype, shape):
                raise CheckpointError(f'"{self._folder}" changed while it was read: "{name}" is {found} now.')
        try:
            return _tensor(self._open[name][part.slices].read().result())
        except ValueError as error:
            raise self._damaged(name, error) from error

    def _opening(self, name: str) -> Any:
        spec = {
            "driver": "zarr3" if self._metadata.get("use_zarr3") else "zarr",
            "kvstore": _kvstore(self._folder, name, ocdbt=self._metadata.get("use_ocdbt", True)),
        }
        return _tensorstore(self._folder).open(spec, open=True, read=True)

    def _header(self, name: str, opening: Any) -> tuple[torch.dtype, tuple[int, ...]]:
        try:
            store = self._open[name] = opening.result()
        except ValueError as error:
            raise self._damaged(name, error) from error
        dtype = getattr(torch, store.dtype.name, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f'"{self._folder}" holds "{name}" as {store.dtype.name}, which torch has not.')
        return dtype, tuple(store.shape)

    def _damaged(self, name: str, error: Exception) -> CheckpointError:
        first = str(error).splitlines()[0][:300]
        return CheckpointError(
            f'"{self._folder}" cannot be read as orbax\'s for "{name}": {first}. It is damaged; use another checkpoint.'
        )


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        with Folder(folder) as held:
            found = json.loads(held.read(METADATA))
        names = [_name(entry) for entry in found["tree_metadata"].values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f'"{folder / METADATA}" cannot be read as what orbax writes: {type(error).__name__}: {str(error)[:200]}. '
            "Use another checkpoint."
        ) from error
    if wrong := [name for name in names if name is not None and ("\0" in name or ".." in name.split("/"))]:
        raise CheckpointError(f'"{folder / METADATA}" names an array {wrong[0][:80]!r}, which is not in its folder.')
    return found


def _name(entry: Any) -> str | None:
    """Return a leaf's path with dots, or None if it is not an array."""
    kind = entry["value_metadata"]["value_type"]
    return None if kind in _NO_ARRAYS else ".".join(str(part["key"]) for part in entry["key_metadata"])


def _kvstore(folder: Path, name: str, *, ocdbt: bool) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{folder}/"}
    return {"driver": "ocdbt", "base": base, "path": f"{name}/"} if ocdbt else {**base, "path": f"{folder}/{name}/"}


def _tensorstore(folder: Path) -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise CheckpointError(
            f'"{folder}" is a checkpoint of orbax, and reading it needs tensorstore: pip install shardlib[orbax].'
        ) from error
    return tensorstore


def _tensor(values: Any) -> torch.Tensor:
    """Convert an array, whose dtype may come from ml_dtypes, to a tensor."""
    if values.dtype.isbuiltin == 1:
        return torch.from_numpy(values)
    bits = torch.from_numpy(values.view(f"i{values.dtype.itemsize}"))
    return bits.view(getattr(torch, values.dtype.name))
