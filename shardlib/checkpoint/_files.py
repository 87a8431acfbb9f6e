"""Files: safetensors written one tensor at a time with checksums, and read by slices.

We write the format ourselves, because a whole model never is in memory at once, and because the checksum is then taken
from what is written. Reading is safetensors' own.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from shardlib.checkpoint._folder import Folder
from shardlib.errors import CheckpointError
from shardlib.layout._boxes import Box

__all__ = [
    "DTYPES",
    "Entry",
    "Readers",
    "bytes_of",
    "check_name",
    "checksum",
    "dtype_name",
    "new_folder",
    "remove",
    "rename",
    "sync_folder",
    "write_bytes",
    "write_tensors",
]

# What safetensors calls them.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_LARGEST_HEADER = 100_000_000  # that safetensors reads
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")
_CHUNK = 1 << 24


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the safetensors name of a dtype.

    Raises:
        CheckpointError: it has no name for it.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f'"{where}" has dtype {dtype}, which safetensors cannot hold; convert it to another one.')
    return _NAMES[dtype]


def check_name(name: str) -> None:
    """Check that a safetensors file can hold a tensor of this name.

    Raises:
        CheckpointError: the format uses the name itself, or UTF-8 cannot encode it.
    """
    if name == _METADATA:
        raise CheckpointError(
            f'a tensor is called "{_METADATA}", which safetensors keeps for itself; give the parameter another name.'
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"a tensor is called {name!a}, which is not Unicode text (it has half of a surrogate pair), and "
            "safetensors cannot hold it; give it another name."
        ) from None


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its name there, the part of the global tensor that it is, and the function that returns its
    values."""

    name: str
    dtype: torch.dtype
    box: Box
    values: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def write_tensors(path: Path, entries: Sequence[Entry], advance: Callable[[int], None]) -> dict[str, Any]:
    """Write entries as one safetensors file and sync it to disk; return its size and checksum.

    `advance` is called with the number of bytes of tensors after each write. Entries are asked for their values in the
    order of the file, each once. The header also says where each part begins in its tensor, as
    `torch.distributed.checkpoint.HuggingFaceStorageReader` expects it.
    """
    with open(path, "xb") as file:
        writer = _Writer(file)
        writer.write(_header(entries), lambda header_bytes: None)
        for entry in entries:
            writer.write_tensor(entry.values().detach(), entry, advance)
        writer.finish()
    return {"bytes": writer.size, "crc32": f"{writer.crc:08x}"}


def _header(entries: Iterable[Entry]) -> bytes:
    header: dict[str, Any] = {}
    at, offsets = 0, {}
    for entry in entries:
        shape, end = list(entry.box.sizes), at + entry.nbytes
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": shape, "data_offsets": [at, end]}
        offsets[entry.name] = {"saved_offsets": list(entry.box.offsets)}
        at = end
    header[_METADATA] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise CheckpointError(
            f"a file would have a header of {len(text)} bytes for {len(offsets)} tensors, and safetensors reads at "
            f"most {_LARGEST_HEADER}. Give a smaller shard_mb."
        )
    return len(text).to_bytes(8, "little") + text


class _Writer:
    def __init__(self, file: Any) -> None:
        self.file, self.size, self.crc = file, 0, 0

    def write(self, data: Any, advance: Callable[[int], None]) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            self.file.write(chunk)
            self.crc = zlib.crc32(chunk, self.crc)
            advance(len(chunk))
        self.size += len(view)

    def write_tensor(self, values: torch.Tensor, entry: Entry, advance: Callable[[int], None]) -> None:
        assert tuple(values.shape) == entry.box.sizes and values.dtype == entry.dtype, entry.name
        if values.numel():
            self.write(bytes_of(values).numpy().data, advance)

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values in host memory, also of a view that conjugates or negates others."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1).view(torch.uint8)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file and sync it to disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def new_folder(path: Path) -> None:
    os.mkdir(path)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder and sync the change to disk."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a folder with its contents, or a link to one, if it exists."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def checksum(file: BinaryIO, advance: Callable[[int], None]) -> str:
    """Return the CRC-32 of an open file, as text; `advance` is called with the number of bytes after each read."""
    crc = 0
    while chunk := file.read(_CHUNK):
        crc = zlib.crc32(chunk, crc)
        advance(len(chunk))
    return f"{crc:08x}"


class Readers:
    """Open safetensors files of one checkpoint; slices of their tensors."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def open(self, file: str) -> None:
        """Open a file now, so that later reads are not affected by a replacement of the file."""
        self._handle(file)

    def read(self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], part: Box) -> torch.Tensor:
        """Read a part of a tensor in a file, which must have that dtype and shape."""
        handle = self._handle(file)
        try:
            source = handle.get_slice(name)
            found = DTYPES.get(source.get_dtype()), tuple(source.get_shape())
            if found != (dtype, shape):
                raise CheckpointError(
                    f'"{self._folder.path / file}" holds "{name}" as {found[0]} of shape {found[1]}, but should hold '
                    f"{dtype} of shape {shape}. The file is not the one that was saved; use another checkpoint."
                )
            return source[part.slices] if part.sizes else handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f'"{self._folder.path / file}" cannot be read as safetensors for "{name}": {error}. The file is '
                "damaged; use another checkpoint."
            ) from error

    def headers(self, file: str) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of every tensor of a file."""
        handle = self._handle(file)
        try:
            found = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  it is not a mapping
            return {name: (DTYPES[s.get_dtype()], tuple(s.get_shape())) for name, s in found.items()}
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise self._unreadable(file, error) from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            with self._folder.open(file) as opened:
                self._check_header(file, opened)
                try:
                    handle = safe_open(self._folder.address(opened, file), framework="pt")
                    self._open[file] = self._stack.enter_context(handle)
                except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                    raise self._unreadable(file, error) from error
        return self._open[file]

    def _check_header(self, name: str, file: BinaryIO) -> None:
        """Check the length of the header, before it is read, against the file and the limit of safetensors."""
        size, begin = os.fstat(file.fileno()).st_size, file.read(8)
        length = int.from_bytes(begin, "little")
        if size < 8 or length > size - 8 or length > _LARGEST_HEADER:
            raise CheckpointError(
                f'"{self._folder.path / name}" cannot be read as safetensors: by its first bytes it has a header of '
                f"{length} bytes; the file has {size}, and a header at most {_LARGEST_HEADER}. "
                + (
                    "It looks like what torch.save writes. Pickled files are never read; convert it to safetensors."
                    if begin.startswith(_PICKLES)
                    else "It is another kind of file, or damaged."
                )
            )

    def _unreadable(self, file: str, error: Exception) -> CheckpointError:
        return CheckpointError(f'"{self._folder.path / file}" cannot be read as safetensors: {error}. It is damaged.')
