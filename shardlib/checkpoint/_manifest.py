"""The manifest: what a checkpoint consists of, as one JSON file that is written last and checked when it is read."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlib.checkpoint._files import DTYPES, dtype_name
from shardlib.checkpoint._folder import LARGEST
from shardlib.errors import CheckpointError
from shardlib.layout._boxes import Box, tiles

__all__ = ["FILE", "MANIFEST", "SECTIONS", "File", "Manifest", "NewerFormatError", "Piece", "Saved"]

MANIFEST = "shardlib.json"
VERSION = 1
SECTIONS = ("model", "optimizer", "values")
_BEGIN = re.compile(r'\{"shardlib_checkpoint":([0-9]{1,9})[,}]')
FILE = re.compile(r"(optimizer/|values/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


class NewerFormatError(CheckpointError):
    """A manifest in a format that this shardlib does not know yet."""


@dataclass(frozen=True)
class File:
    """A file of tensors: its path in the checkpoint, its size, and its CRC-32 (None if it was not computed)."""

    path: str
    nbytes: int
    crc32: str | None


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: in which file, by its number, and which box.

    In files of others it may have a name of its own (`key`), and lack the first dim, in which it then has one place.
    """

    file: int
    box: Box
    key: str | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Saved:
    """A tensor of a checkpoint; `key` is what files call it, where that is not its name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    key: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        files: in the order in which pieces number them.
        tensors: section ("model", "optimizer", "values") -> name -> tensor.
        tied: groups of names of the model that are one tensor, saved under the first.
        about: origin of the checkpoint: versions, mesh, transforms, number of ranks.
        state: all that is not tensors: optimizer groups, scheduler, random states, as `_values` encodes it.
    """

    files: tuple[File, ...]
    tensors: Mapping[str, Mapping[str, Saved]]
    tied: tuple[tuple[str, ...], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        """Serialize the manifest. The checksum is that of `body` in its shortest form.

        Raises:
            CheckpointError: it is too large to be read again.
        """
        body = _canonical(
            {
                "files": [[file.path, file.nbytes, file.crc32] for file in self.files],
                "tensors": {
                    section: {name: _dump_saved(name, saved) for name, saved in named.items()}
                    for section, named in self.tensors.items()
                },
                "tied": self.tied,
                "about": self.about,
                "state": self.state,
            }
        )
        text = f'{{"shardlib_checkpoint":{VERSION},"crc32":"{_crc(body)}",\n"body":{body}}}\n'
        if len(text) > LARGEST:
            raise CheckpointError(
                f"the manifest has {len(text)} bytes, and at most {LARGEST} are read. Give large values as tensors."
            )
        return text

    @classmethod
    def load(cls, text: str) -> Manifest:
        """Read the text of a manifest. Whatever the text is, the worst that comes of it is the error.

        Raises:
            CheckpointError: a short fact: what is wrong with it.
        """
        try:
            return _read(text)
        except RecursionError:
            raise CheckpointError("its JSON is nested too deeply") from None
        except (ValueError, OverflowError, UnicodeError) as error:
            raise CheckpointError(f"it is not the JSON that was written ({str(error)[:200]})") from None


def _canonical(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _dump_saved(name: str, saved: Saved) -> list[Any]:
    pieces = [[piece.file, piece.box.offsets, piece.box.sizes] for piece in saved.pieces]
    return [dtype_name(saved.dtype, name), saved.shape, pieces]


# --- reading --------------------------------------------------------------------------------------------------------


def _read(text: str) -> Manifest:
    if (begin := _BEGIN.match(text)) and int(begin[1]) > VERSION:  # whatever follows
        raise NewerFormatError(
            f"it was written by a newer shardlib, in format {begin[1]}, and this one reads format {VERSION}"
        )
    top = json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_no_constant)
    top = _of(top, dict, "the file")
    if (version := top.get("shardlib_checkpoint")) != VERSION or isinstance(version, bool):
        raise CheckpointError(f"it is of version {str(version)[:40]}, and this shardlib reads version {VERSION}")
    body = _of(top.get("body"), dict, "body")
    if _crc(_canonical(body)) != top.get("crc32"):
        raise CheckpointError("its checksum is not that of its content: it was damaged or edited")
    files = tuple(_file(entry) for entry in _of(body.get("files"), list, "files"))
    if len({file.path for file in files}) != len(files):
        raise CheckpointError("it lists a file twice")
    tensors = _of(body.get("tensors"), dict, "tensors")
    if unknown := sorted(set(tensors) - set(SECTIONS)):
        raise CheckpointError(f"it has tensors of an unknown section {unknown[0][:40]!r}")
    return Manifest(
        files,
        {section: _section(section, tensors.get(section, {}), files) for section in SECTIONS},
        tuple(_names(group) for group in _of(body.get("tied"), list, "tied")),
        _of(body.get("about"), dict, "about"),
        _of(body.get("state"), dict, "state"),
    )


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CheckpointError("a key stands in it twice")
    return found


def _no_constant(text: str) -> Any:
    raise CheckpointError(f"it has the number {text}, which JSON has not")


def _of(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(f"{what} should be a {kind.__name__}, and is a {type(value).__name__}")
    return value


def _list_of(value: Any, length: int, what: str) -> list[Any]:
    if len(_of(value, list, what)) != length:
        raise CheckpointError(f"{what} should have {length} entries, and has {len(value)}")
    return value


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    for size in _of(value, list, what):
        if not 0 <= _of(size, int, what) < 1 << 62:
            raise CheckpointError(f"{what} holds {str(size)[:40]}, which is not a size")
    return tuple(value)


def _names(group: Any) -> tuple[str, ...]:
    return tuple(_of(name, str, "a tied name") for name in _of(group, list, "a group of tied names"))


def _file(entry: Any) -> File:
    path, nbytes, crc = _list_of(entry, 3, "a file")
    if not FILE.fullmatch(_of(path, str, "the path of a file")) or ".." in path:
        raise CheckpointError(f"it names a file {path[:80]!r}, which is not one that shardlib writes")
    if not 0 <= _of(nbytes, int, "the size of a file") < 1 << 62:
        raise CheckpointError(f"file {path!r} is said to have {str(nbytes)[:40]} bytes")
    if not re.fullmatch("[0-9a-f]{8}", _of(crc, str, "the checksum of a file")):
        raise CheckpointError(f"file {path!r} has a checksum that is none")
    return File(path, nbytes, crc)


def _section(section: str, named: Any, files: tuple[File, ...]) -> dict[str, Saved]:
    load: Callable[[str, Any], Saved] = lambda name, entry: _saved(f"{section} tensor {name[:200]!r}", entry, files)  # noqa: E731
    return {name: load(name, entry) for name, entry in _of(named, dict, section).items()}


def _saved(what: str, entry: Any, files: tuple[File, ...]) -> Saved:
    dtype, shape, pieces = _list_of(entry, 3, what)
    if _of(dtype, str, f"the dtype of {what}") not in DTYPES:
        raise CheckpointError(f"{what} has an unknown dtype {dtype[:40]!r}")
    shape = _sizes(shape, f"the shape of {what}")
    found = tuple(_piece(what, piece, len(shape), len(files)) for piece in _of(pieces, list, f"the shards of {what}"))
    if problem := tiles([piece.box for piece in found], shape):
        raise CheckpointError(f"{what}: {problem}")
    for piece in found:
        if piece.box.numel * DTYPES[dtype].itemsize > files[piece.file].nbytes:
            raise CheckpointError(f"{what}: a shard is larger than its file")
    if math.prod(shape) and not found:
        raise CheckpointError(f"{what} has no shards")
    return Saved(shape, DTYPES[dtype], found)


def _piece(what: str, entry: Any, ndim: int, files: int) -> Piece:
    file, offsets, sizes = _list_of(entry, 3, f"a shard of {what}")
    if not 0 <= _of(file, int, f"the file of a shard of {what}") < files:
        raise CheckpointError(f"{what}: a shard is in file {str(file)[:40]} of {files}")
    at, extents = _sizes(offsets, f"a shard of {what}"), _sizes(sizes, f"a shard of {what}")
    if len(at) != ndim or len(extents) != ndim:
        raise CheckpointError(f"{what}: a shard has not as many dims as the tensor")
    return Piece(file, Box(at, extents))
