"""Materialisation of models on `meta`, one module or one slice at a time; no rank ever holds the full model.

From a checkpoint, each rank reads only its slices. With an initialiser, the tensors of one module are allocated in
full, initialised and sharded before those of the next module. If random numbers are exact, the initialiser of split
tensors runs on DTensors, so that each rank allocates only its local shards.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from shardlib.engine._torch import as_kind, registered_tensors
from shardlib.engine.apply import pretrained
from shardlib.engine.feature.randomness import random_states, set_random_states
from shardlib.engine.ops import ShardlibGatherWarning
from shardlib.engine.ops.redistribute import to_full_tensor
from shardlib.engine.ranks import agree
from shardlib.errors import CheckpointError, ShardingError, nearest

__all__ = ["SOURCES", "Source", "Values", "checkpoints", "initial_values"]

Init = str | Path | Mapping[str, torch.Tensor] | Callable[[nn.Module], Any]
# Returns uninitialised memory for the tensor of that name: a full tensor or a DTensor.
Make = Callable[[str, torch.Tensor], torch.Tensor]
# Returns this rank's shard of the tensor of that name, from a full tensor or anything that can be sliced like one.
ShardOf = Callable[[str, Any], torch.Tensor]

RESET = "reset_parameters"


@dataclass(frozen=True)
class Values:
    """A source that makes full tensors one after another, of those that it is given by name: each is sharded before
    the next one is asked for."""

    of: Callable[[Mapping[str, torch.Tensor]], Iterator[tuple[str, torch.Tensor]]]


SOURCES: list[Callable[[nn.Module, Mapping[str, torch.Tensor]], tuple[Any, ...] | None]] = []
"""Functions that know where the values of tensors on `meta` come from, if `init` does not say it."""


class Source(ExitStack):
    """A source of tensors by name: a state dict, a safetensors file, or a folder of files with an index.

    Files may use other names, and parts of tensors, that transformers can convert to the model's. Use it in `with`,
    which closes them.
    """

    def __init__(self, init: str | Path | Mapping[str, torch.Tensor], model: nn.Module) -> None:
        self._model, self._described = model, _described(init)
        super().__init__()
        self._opened: dict[Path, tuple[int, ...]] = {}
        self.tensors: dict[str, Callable[[], Any]] = (
            {name: partial(init.__getitem__, name) for name in init}
            if isinstance(init, Mapping)
            else dict(self._open(Path(init)))
        )

    def refuse_another(self) -> None:
        """Raise `CheckpointError` if another file has replaced one of the open files."""
        if any(_which(file) != which for file, which in self._opened.items()):
            raise CheckpointError(f"The checkpoint {self._described} was replaced while it was read. Load it again.")

    def _open(self, path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
        slices: dict[str, Callable[[], Any]] = {}
        for file in _files(path):
            self._opened[file] = _which(file)
            handle = self.enter_context(safe_open(str(file), framework="pt"))
            slices |= {name: partial(handle.get_slice, name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        shapes = {name: tuple(get().get_shape()) for name, get in slices.items()}
        for name, found in pretrained.find(self._model, shapes).items():
            one = len(found.parts) == 1 and not found.stacked
            yield name, slices[found.parts[0][0]] if one else partial(_Joined, found, slices)


class _Joined:
    """A tensor of the model that files have in parts; slicing it reads only the requested slices of the parts."""

    def __init__(self, found: pretrained.Found, slices: Mapping[str, Callable[[], Any]]) -> None:
        self._found = found
        self._parts = [(slices[key](), begin) for key, begin in found.parts]

    def get_shape(self) -> list[int]:
        return list(self._found.shape)

    def __getitem__(self, chosen: tuple[slice, ...]) -> torch.Tensor:
        made = None
        for part, begin in self._parts:
            shape = (*((1,) if self._found.stacked else ()), *part.get_shape())
            ends = [at + size for at, size in zip(begin, shape, strict=True)]
            shared = [slice(max(c.start, at), min(c.stop, end)) for c, at, end in zip(chosen, begin, ends, strict=True)]
            if any(one.stop <= one.start for one in shared):
                continue
            inside = _counted_from(begin, shared)
            values = part[inside[1:]].unsqueeze(0) if self._found.stacked else part[inside]
            if made is None:
                made = torch.empty([c.stop - c.start for c in chosen], dtype=values.dtype)
            made[_counted_from([c.start for c in chosen], shared)] = values
        return torch.empty([c.stop - c.start for c in chosen]) if made is None else made


def _counted_from(starts: Sequence[int], slices: Sequence[slice]) -> tuple[slice, ...]:
    return tuple(slice(one.start - at, one.stop - at) for at, one in zip(starts, slices, strict=True))


def initial_values(
    model: nn.Module, init: Init | tuple[Init, ...] | None, shard_of: ShardOf, make: Make | None
) -> dict[str, torch.Tensor]:
    """Return this rank's shard of every tensor of `model` that is on `meta`, by its first name.

    Args:
        model: its meta tensors are filled temporarily, module by module, and put back.
        init: as in `shard_model`; each of several fills the tensors that those before it left out. None gives a model
            that was built in a `LazyInitContext` the values of the checkpoint that `from_pretrained` was called for
            there, and the others that it would have had.
        shard_of: takes a name and something sliceable of global shape, or a result of `make`; returns the local shard.
        make: returns the memory that an initialiser writes to, from a name and a meta tensor; None for full tensors. If
            the initialiser raises on it, it runs again on full tensors, from the same random state.

    Raises:
        ShardingError: there is no `init`, or it left some tensors without values; the error names them.
        CheckpointError: a checkpoint cannot be read, or has a tensor of another shape.
    """
    missing = {name: tensor for name, tensor in agree.named_tensors(model).items() if tensor.is_meta}
    values: dict[str, torch.Tensor] = {}
    if init is None:
        init = next((found for find in SOURCES if (found := find(model, missing)) is not None), None)
    for source in init if isinstance(init, tuple) else () if init is None else (init,):
        for name in values:
            missing.pop(name, None)
        if isinstance(source, Values):
            values |= {name: shard_of(name, full).to(missing[name].dtype) for name, full in source.of(missing)}
        elif callable(source) or source == RESET:
            values |= _from_initialiser(model, source, missing, shard_of, make)
        else:
            values |= _from_checkpoint(source, missing, shard_of, model)
    left = [name for name in missing if name not in values]
    if left:
        raise ShardingError(_no_values(left, len(missing), init))
    return values


def _from_checkpoint(
    init: Any, missing: Mapping[str, torch.Tensor], shard_of: ShardOf, model: nn.Module
) -> dict[str, torch.Tensor]:
    values = {}
    with Source(init, model) as source:
        found = [name for name in missing if name in source.tensors]
        if not found and missing:
            example = next(iter(missing))
            raise CheckpointError(
                f'The checkpoint {_described(init)} holds none of the {len(missing)} tensors of the model, such as "'
                f'{example}"; it holds {len(source.tensors)} others.{nearest(example, source.tensors)} '
                "Load a checkpoint of this model, with its parameter names."
            )
        try:
            for name in found:
                full = source.tensors[name]()
                _check_shape(name, missing[name], full, init)
                values[name] = shard_of(name, full).to(missing[name].dtype)
        finally:
            source.refuse_another()
    return values


def checkpoints(init: Any) -> dict[str, int]:
    """Return a checksum of the metadata of each checkpoint in an `init`.

    The metadata are the index, and shardlib's manifest, which has checksums of all values.
    """
    sources = init if isinstance(init, tuple) else (init,)
    paths = [Path(source) for source in sources if isinstance(source, str | os.PathLike) and source != RESET]
    return {str(path): _beside(path if path.is_dir() else path.parent) for path in paths}


def _beside(folder: Path) -> int:
    mark = 0
    for file in sorted({*folder.glob("*.safetensors.index.json"), *folder.glob("shardlib.json")}):
        mark = zlib.crc32(file.read_bytes(), mark)
    return mark


def _which(file: Path) -> tuple[int, ...]:
    """Return an identity of a file that changes if another file replaces it; () if there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _check_shape(name: str, expected: torch.Tensor, full: Any, init: Any) -> None:
    shape = tuple(full.get_shape() if hasattr(full, "get_shape") else full.shape)
    if shape != tuple(expected.shape):
        raise CheckpointError(
            f'The checkpoint {_described(init)} has "{name}" with shape {shape}; the model has it with global shape '
            f"{tuple(expected.shape)}. Load a checkpoint of the same model configuration."
        )


def _from_initialiser(
    model: nn.Module, init: Any, missing: Mapping[str, torch.Tensor], shard_of: ShardOf, make: Make | None
) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}
    by_id = {id(tensor): name for name, tensor in missing.items()}
    for module in model.modules():
        found = [(key, by_id[id(tensor)]) for _, key, tensor in registered_tensors(module) if id(tensor) in by_id]
        if own := {key: name for key, name in found if name not in values}:
            values |= _initialise_in_parts(module, init, own, shard_of, make)
    return values


def _initialise_in_parts(
    module: nn.Module, init: Any, own: Mapping[str, str], shard_of: ShardOf, make: Make | None
) -> dict[str, torch.Tensor]:
    """Initialise a module's local shards, if the initialiser supports it; else full tensors. All ranks do the same."""
    if make is not None:
        states = random_states()
        try:
            with warnings.catch_warnings():
                # Gathering costs little here. If warnings are errors, a warning would stop only the rank that warns.
                warnings.simplefilter("ignore", ShardlibGatherWarning)
                return _initialise(module, init, own, shard_of, make)
        except Exception:
            set_random_states(states)
    return _initialise(module, init, own, shard_of)


def _initialise(
    module: nn.Module, init: Any, own: Mapping[str, str], shard_of: ShardOf, make: Make | None = None
) -> dict[str, torch.Tensor]:
    """Give one module's meta tensors real memory, run the initialiser, shard the values, put the meta tensors back."""
    before = registered_tensors(module)
    try:
        for registry, key, tensor in before:
            if tensor.is_meta:
                if make is not None and key in own:
                    real = make(own[key], tensor)
                else:
                    real = tensor.new_empty(tensor.shape, device="cpu")
                registry[key] = as_kind(real.fill_(_mark(tensor.dtype)), tensor)
        if init != RESET:
            init(module)
        elif callable(reset := getattr(module, RESET, None)):
            reset()
        made = {key: tensor for _, key, tensor in registered_tensors(module) if key in own}
        return {own[key]: shard_of(own[key], t.detach()) for key, t in made.items() if not _is_unfilled(t)}
    finally:
        for registry, key, tensor in before:
            registry[key] = tensor


# Memory is filled with this value before an initialiser runs, so that tensors that it leaves out are found.
def _mark(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _is_unfilled(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.dtype is torch.bool:
        return tensor.is_meta
    mark = _mark(tensor.dtype)
    same = torch.isnan(tensor) if mark != mark else tensor == mark
    return tensor.numel() > 0 and bool(to_full_tensor(same.all()))


def _files(path: Path) -> list[Path]:
    """Return the safetensors files of a path: the file itself, or those of the index in a folder."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        path = indices[0] if indices else path / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(
            f'No checkpoint at "{path}". Give a .safetensors file, its .index.json, or a folder that holds '
            '"model.safetensors" or an index.'
        )
    if path.suffix != ".json":
        return [path]
    names = json.loads(path.read_text())["weight_map"].values()
    return sorted({path.parent / name for name in names})


def _described(init: Any) -> str:
    return f"with {len(init)} tensors" if isinstance(init, Mapping) else f'"{init}"'


def _no_values(left: list[str], total: int, init: Any) -> str:
    listed = ", ".join(f'"{name}"' for name in left[:5]) + (", ..." if len(left) > 5 else "")
    if init is None:
        return (
            f"{total} tensors of the model are on the meta device and have no values ({listed}). Say where they come "
            'from: shard_model(..., init="checkpoint.safetensors"), init=a function that initialises one module, or '
            'init="reset_parameters".'
        )
    return (
        f"init= gave no values to {len(left)} of {total} tensors on the meta device: {listed}. Buffers that are not "
        "saved are not in a checkpoint: add a function that computes them, init=(checkpoint, function)."
    )
