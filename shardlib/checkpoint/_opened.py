"""An opened checkpoint, of shardlib or of another library: its tensors, and the pieces of each in its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from shardlib._plan.moves import renamed
from shardlib._progress import Progress
from shardlib.checkpoint import _orbax, _paths
from shardlib.checkpoint._files import Readers, checksum
from shardlib.checkpoint._folder import Folder
from shardlib.checkpoint._manifest import MANIFEST, File, Manifest, NewerFormatError, Piece, Saved
from shardlib.checkpoint._peers import described
from shardlib.checkpoint._permuted import Permuted, Reading, Transpose, permutations
from shardlib.checkpoint._save import HF_INDEX, shardlib_version
from shardlib.engine.apply import pretrained
from shardlib.errors import CheckpointError, PlanError, nearest
from shardlib.layout._boxes import Box, full_box

__all__ = ["Names", "Opened", "Transpose", "found", "opened", "renaming"]

T = TypeVar("T")
_Header = tuple[int, torch.dtype, tuple[int, ...]]
Names = Callable[[str], str | None] | Mapping[str, str | None] | None


@dataclass(frozen=True)
class Opened:
    """A checkpoint, ours or foreign, before any tensor is read.

    Attributes:
        held: the folder of the checkpoint, open.
        manifest: the contents of the checkpoint.
        foreign: whether others wrote it.
        orbax: whether that was orbax.
        dims: permutations of dims that differ from the model's, by the files' names.
    """

    held: Folder
    manifest: Manifest
    foreign: bool
    orbax: bool = False
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The path of the folder."""
        return self.held.path

    @cached_property
    def _first_of_tied(self) -> dict[str, str]:
        return {name: group[0] for group in self.manifest.tied for name in group}

    def names_of(self, names: Iterable[str]) -> list[str]:
        """Return the checkpoint's names for a tensor with these names; several if it was not tied when saved."""
        asked = dict.fromkeys(self._first_of_tied.get(name, name) for name in names)
        return [name for name in asked if name in self.manifest.tensors["model"]]

    def readers(self) -> Reading:
        readers = _orbax.OrbaxReaders(self.folder) if self.orbax else Readers(self.held)
        return Permuted(readers, self.dims) if self.dims else readers

    def reading(self, work: Callable[[], T]) -> T:
        """Run a phase of reading.

        All files are of the folder that is held open. A checkpoint of ours is read from there even where another one
        is at its path by now. Ranks open a foreign one each by itself, so it has to be at its path still.

        Raises:
            CheckpointError: another checkpoint replaced it meanwhile; or the work raised.
        """
        try:
            result = work()
        except (CheckpointError, OSError) as error:
            if self.held.has_changed() or self.held.is_elsewhere():
                raise self.held.was_replaced() from error
            raise
        if self.held.has_changed() or (self.foreign and self.held.is_elsewhere()):
            raise self.held.was_replaced()
        return result

    def check_all(self, files: Sequence[File], *, checksums: bool) -> None:
        """Raise unless each file has the size that it had, and the checksum."""
        nbytes = sum(file.nbytes for file in files if checksums and file.crc32 is not None)
        with Progress(f'verifying "{self.folder.name}"', unit="bytes", total=nbytes) as progress:
            for file in files:
                self._check(file, progress.advance, checksums=checksums)

    def _check(self, file: File, advance: Callable[[int], None], *, checksums: bool) -> None:
        path = self.folder / file.path
        with self.held.open(file.path) as opened:
            if (size := os.fstat(opened.fileno()).st_size) != file.nbytes:
                raise CheckpointError(
                    f'"{path}" has {size} bytes, and had {file.nbytes} when it was saved. It is damaged; use another '
                    "checkpoint."
                )
            if checksums and file.crc32 is not None and checksum(opened, advance) != file.crc32:
                raise CheckpointError(
                    f'"{path}" is not what was saved: its checksum differs. It is damaged; use another checkpoint.'
                )

    def read_piece(self, readers: Reading, name: str, saved: Saved, n: int, part: Box) -> torch.Tensor:
        """Read a part of the n-th piece of a tensor, relative to the start of the piece."""
        piece = saved.pieces[n]
        file, key = self.manifest.files[piece.file].path, piece.key or saved.key or name
        if not piece.stacked:
            return readers.read(file, key, saved.dtype, piece.box.sizes, part)
        inner = Box(part.offsets[1:], part.sizes[1:])
        return readers.read(file, key, saved.dtype, piece.box.sizes[1:], inner).unsqueeze(0)

    def read(self, readers: Reading, name: str, saved: Saved, box: Box) -> torch.Tensor:
        """Read a part of a tensor from all pieces that overlap it."""
        values = torch.empty(box.sizes, dtype=saved.dtype)
        for n, piece in enumerate(saved.pieces):
            if (common := box.meet(piece.box)) is not None:
                values[common.within(box).slices] = self.read_piece(readers, name, saved, n, common.within(piece.box))
        return values


def found(path: Path) -> list[str | None]:
    """Find the folder to read, and the text of its manifest if it has one. Runs on rank 0. A file is given by its
    folder and name."""
    for _ in range(3):  # one that is being replaced is at the path, then beside it, then at the path again
        folder = _paths.located(path)
        if (text := _manifest_in(folder)) is not None:
            return [str(folder), text]
    folder = _orbax.located(path)
    if not folder.exists():
        raise CheckpointError(f'there is nothing at "{path}".{_neighbours(path)}')
    if folder.name == MANIFEST:
        raise CheckpointError(f'"{folder}" is the manifest of a checkpoint. Give its folder, "{folder.parent}".')
    if not folder.is_dir() or _orbax.is_orbax(folder):
        return [str(folder), None]
    if _foreign_files(folder):
        if any(name.name.startswith("pieces-") for name in folder.glob("*.safetensors")):
            raise CheckpointError(
                f'"{folder}" has files of a checkpoint but no {MANIFEST}, which lists the tensors of these files. Use '
                "another checkpoint."
            )
        return [str(folder), None]
    raise CheckpointError(
        f'"{folder}" is not a checkpoint: it holds neither {MANIFEST}, nor safetensors files with their index, nor '
        f"what orbax writes.{_instead(folder)}"
    )


def _instead(folder: Path) -> str:
    """Return a sentence about what a folder that is not a checkpoint does hold."""
    if inside := sorted(entry.name for entry in folder.iterdir() if (entry / MANIFEST).is_file()):
        return f" It holds {len(inside)} checkpoints, {', '.join(inside[-4:])}: give the path of one."
    if _pickles(folder):
        return " Pickled files (.bin, .pt, .distcp) are never read; convert them to safetensors first."
    return ""


def _manifest_in(path: Path) -> str | None:
    try:
        with Folder(path) as folder:
            return folder.read(MANIFEST).decode()
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):  # it is missing
            return None
        raise
    except UnicodeError as error:
        raise CheckpointError(f'"{path / MANIFEST}" is damaged: {error}. Use another checkpoint.') from error


def _neighbours(path: Path) -> str:
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return nearest(path.name, names)


def _pickles(folder: Path) -> bool:
    return any(
        file.suffix in (".bin", ".pt", ".pth", ".distcp") or file.name == ".metadata" for file in folder.iterdir()
    )


def _foreign_files(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    return indices or sorted(folder.glob("*.safetensors"))


def opened(
    keep: ExitStack,
    path: Path,
    text: str | None,
    model: nn.Module | None,
    names: Names,
    transpose: Transpose | None,
) -> Opened:
    """Open what `found` returned, with the model's names for tensors, and dims in its order.

    The stack keeps the folder open. Its manifest must be the one that rank 0 found: so all ranks read the same values.
    """
    held = keep.enter_context(Folder(path if text is not None or path.is_dir() else path.parent))
    if text is None:
        return _open_foreign(held, path, model, renaming(names), transpose)
    if names is not None or transpose is not None:
        raise CheckpointError(
            f'"{path}" was saved by shardlib, with the names and dims of its model; names= and transpose= are for '
            "checkpoints of others. Leave them out."
        )
    opened = Opened(held, Manifest((), {}), foreign=False)
    if opened.reading(lambda: held.read(MANIFEST)) != text.encode():
        raise held.was_replaced()
    try:
        return replace(opened, manifest=Manifest.load(text))
    except NewerFormatError as error:
        raise CheckpointError(
            f'"{path}" cannot be read: {error}. Update shardlib ({shardlib_version()} is installed), or load a '
            "checkpoint of this version."
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f'"{path / MANIFEST}" is damaged: {error}. Use another checkpoint.') from None


def renaming(names: Names) -> Callable[[str], str | None] | None:
    try:
        return None if names is None else renamed(names)
    except PlanError as error:
        raise CheckpointError(
            f"names= was given as {type(names).__name__}; give a function from a name in the checkpoint to the "
            'model\'s, or a mapping: names={"params.dense.kernel": "dense.weight"}.'
        ) from error


def _open_foreign(
    held: Folder,
    path: Path,
    model: nn.Module | None,
    called: Callable[[str], str | None] | None,
    transpose: Transpose | None,
) -> Opened:
    """Open files without a manifest, as if they had one."""
    folder, orbax = held.path, _orbax.is_orbax(path)
    files, headers = Opened(held, Manifest((), {}), foreign=True, orbax=orbax).reading(
        lambda: _headers_of(held, [_orbax.METADATA] if orbax else _names_of_files(held, path), orbax=orbax)
    )
    dims = permutations(transpose or {}, {key: shape for key, (_, _, shape) in headers.items()}, folder)
    for key, order in dims.items():
        n, dtype, shape = headers[key]
        headers[key] = n, dtype, tuple(shape[dim] for dim in order)
    tensors = _as_the_model_has_them(headers, model) if called is None else _renamed(folder, headers, called)
    if orbax:
        _refuse_kernels(folder, tensors, dims)
    if model is not None:
        tensors = _with_prefix(tensors, model)
    manifest = Manifest(tuple(files), {"model": tensors, "optimizer": {}, "values": {}})
    return Opened(held, manifest, foreign=True, orbax=orbax, dims=dims)


def _headers_of(held: Folder, names: Sequence[str], *, orbax: bool) -> tuple[list[File], dict[str, _Header]]:
    """Return the files, and of every tensor in them: the number of its file, its dtype and shape."""
    files, headers = [], dict[str, _Header]()
    for name in names:
        with held.open(name) as file:
            files.append(File(name, os.fstat(file.fileno()).st_size, None))
    with Opened(held, Manifest((), {}), foreign=True, orbax=orbax).readers() as readers:
        for n, name in enumerate(names):
            for key, (dtype, shape) in readers.headers(name).items():
                if key in headers:
                    raise CheckpointError(f'"{held.path}" has the tensor "{key}" twice. Use another checkpoint.')
                headers[key] = n, dtype, shape
    return files, headers


def _renamed(
    folder: Path,
    headers: Mapping[str, _Header],
    called: Callable[[str], str | None],
) -> dict[str, Saved]:
    tensors: dict[str, Saved] = {}
    for key, (n, dtype, shape) in headers.items():
        if (name := called(key)) is None:
            continue
        if not isinstance(name, str):
            raise CheckpointError(f'names= calls "{key}" {name!r}; give a name, or None to leave the tensor out.')
        if name in tensors:
            raise CheckpointError(f'names= calls two tensors of "{folder}" "{name}", one of them "{key}".')
        tensors[name] = Saved(shape, dtype, (Piece(n, full_box(shape)),), key)
    return tensors


def _refuse_kernels(folder: Path, tensors: Mapping[str, Saved], dims: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a flax kernel under the name of torch's weight: a square one would fit, but transposed."""
    swapped = [
        f'"{saved.key}" {saved.shape} as "{name}"'
        for name, saved in tensors.items()
        if saved.key is not None and saved.key not in dims and len(saved.shape) > 1
        if saved.key.rpartition(".")[2] == "kernel" and name.rpartition(".")[2] == "weight"
    ]
    if swapped:
        raise CheckpointError(
            f'names= calls {len(swapped)} kernels of "{folder}" weights, {", ".join(swapped[:3])}'
            f"{', ...' if len(swapped) > 3 else ''}; flax has the inputs of a layer first, torch the outputs. Say how "
            'dims stand: transpose={"kernel": (1, 0)} turns them round, (0, 1) takes them as they are.'
        )


def _as_the_model_has_them(headers: Mapping[str, _Header], model: nn.Module | None) -> dict[str, Saved]:
    """Rename tensors of files as in the model, and join the parts of one tensor."""
    tensors = {}
    for name, found in pretrained.find(model, {key: shape for key, (_, _, shape) in headers.items()}).items():
        pieces, dtypes = [], set()
        for key, begin in found.parts:
            n, dtype, shape = headers[key]
            pieces.append(Piece(n, Box(begin, ((1,) if found.stacked else ()) + shape), key, found.stacked))
            dtypes.add(dtype)
        if len(dtypes) > 1:
            raise CheckpointError(f'"{name}" is made of tensors of {len(dtypes)} dtypes. Use another checkpoint.')
        tensors[name] = Saved(found.shape, dtypes.pop(), tuple(pieces))
    return tensors


def _names_of_files(held: Folder, path: Path) -> list[str]:
    if not path.is_dir() and path.suffix != ".json":
        return [path.name]
    index = path if not path.is_dir() else next(iter(path.glob("*.safetensors.index.json")), None)
    if index is None:
        files = [file.name for file in _foreign_files(path)]
        if len(files) > 1 and "model.safetensors" not in files:
            raise CheckpointError(f'"{path}" has {len(files)} safetensors files and no index (such as {HF_INDEX}).')
        return ["model.safetensors"] if "model.safetensors" in files else files
    try:
        named = json.loads(held.read(index.name))["weight_map"]
        names = sorted(set(named.values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file is named by something that is not text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f'"{index}" cannot be read as the index of a checkpoint: {described(error)}.') from error
    for name in names:
        if not name or Path(name).name != name or name.startswith(".") or "\\" in name or "\0" in name:
            raise CheckpointError(f'"{index}" names a file {name[:80]!r}, which is not in its folder.')
    return names


def _with_prefix(tensors: dict[str, Saved], model: nn.Module) -> dict[str, Saved]:
    """Add or remove the prefix that Hugging Face gives to a base model inside a model with a head."""
    prefix = getattr(model, "base_model_prefix", None)
    wanted = set(model.state_dict(keep_vars=True))
    if not isinstance(prefix, str) or not prefix or wanted & set(tensors):
        return tensors
    added = {f"{prefix}.{name}": saved for name, saved in tensors.items()}
    cut = {name.removeprefix(f"{prefix}."): saved for name, saved in tensors.items()}
    return max((tensors, added, cut), key=lambda named: len(wanted & set(named)))
