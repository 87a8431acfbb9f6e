"""Models on `meta` become real one module, or one slice, at a time; no rank ever holds the whole model.

From a checkpoint, each rank reads only the slices that the plan gives it. From an initialiser, one module's own tensors
are made whole, initialised and cut before the next module's turn. Where random numbers are exact, split tensors are
initialised in parts: the initialiser runs on DTensors, of which each rank has its shard.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from shardlib.engine import lazy, pretrained
from shardlib.engine._torch import own_tensors
from shardlib.engine.ops import ShardlibGatherWarning
from shardlib.engine.plain import plain
from shardlib.errors import CheckpointError, ShardingError, nearest

__all__ = ["Source", "checkpoints", "initial_values"]

Init = str | Path | Mapping[str, torch.Tensor] | Callable[[nn.Module], Any]
# What makes a tensor without values for the tensor of that name, whole or in parts.
Make = Callable[[str, torch.Tensor], torch.Tensor]
# What cuts a whole tensor, or anything that can be sliced like one, to this rank's shard of the tensor of that name.
Cut = Callable[[str, Any], torch.Tensor]

RESET = "reset_parameters"
LATER: Any = object()  # what was put on a tape when the model was built


class Source:
    """Where tensors come from by name: a state dict, a safetensors file, or a folder of them with an index.

    Files may have the names, and the parts, that transformers knows how to make the model's.
    """

    def __init__(self, init: str | Path | Mapping[str, torch.Tensor], model: nn.Module | None = None) -> None:
        self._model, self._described = model, _described(init)
        self._stack = ExitStack()
        self._opened: dict[Path, tuple[int, ...]] = {}
        self.tensors: dict[str, Callable[[], Any]] = (
            {name: partial(_itself, tensor) for name, tensor in init.items()}
            if isinstance(init, Mapping)
            else dict(self._open(Path(init)))
        )

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def refuse_another(self) -> None:
        """Raise `CheckpointError` if other files stand by now where those were that are open."""
        if any(_which(file) != which for file, which in self._opened.items()):
            raise CheckpointError(f"The checkpoint {self._described} was replaced while it was read. Load it again.")

    def _open(self, path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
        slices: dict[str, Callable[[], Any]] = {}
        for file in _files(path):
            self._opened[file] = _which(file)
            handle = self._stack.enter_context(safe_open(str(file), framework="pt"))
            slices |= {name: partial(handle.get_slice, name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        shapes = {name: tuple(get().get_shape()) for name, get in slices.items()}
        for name, found in pretrained.find(self._model, shapes).items():
            one = len(found.parts) == 1 and not found.stacked
            yield name, slices[found.parts[0][0]] if one else partial(_Joined, found, slices)


class _Joined:
    """Parts in files that are one tensor of the model: read like a slice of a file, each part as far as it is asked."""

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


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def initial_values(
    model: nn.Module, init: Init | tuple[Init, ...] | None, cut: Cut, make: Make | None = None
) -> dict[str, torch.Tensor]:
    """This rank's shard of every tensor of `model` that is on `meta`, by its first name.

    Args:
        model: its meta tensors are filled for a moment, module by module, and put back.
        init: a checkpoint (safetensors file, folder, or mapping from name to whole tensor), an initialiser called with
            each module that owns such tensors, "reset_parameters" for the method of that name, or several in order:
            each fills what those before it left out. None gives what was built in a `LazyInitContext` the values that
            it would have had; behind those of the checkpoint that `from_pretrained` was called for there.
        cut: takes a name and something sliceable of global shape, or what `make` made, and returns the local shard.
        make: makes the memory that an initialiser writes to, from a name and a meta tensor; by default all of it. Where
            the initialiser raises on that, it is run again on whole tensors, with the random state that it began with.

    Raises:
        ShardingError: no `init`, or tensors that no `init` filled; they are named.
        CheckpointError: a checkpoint that cannot be read, or holds a tensor of another shape.
    """
    missing = _meta_tensors(model)
    values: dict[str, torch.Tensor] = {}
    if init is None and any(map(lazy.is_recorded, missing.values())):
        init = (*filter(None, [pretrained.source_of(model)]), LATER)
    for source in init if isinstance(init, tuple) else () if init is None else (init,):
        for name in values:
            missing.pop(name, None)
        if source is LATER:
            values |= {name: cut(name, whole).to(missing[name].dtype) for name, whole in lazy.values_of(missing)}
        elif callable(source) or source == RESET:
            values |= _from_initialiser(model, source, missing, cut, make)
        else:
            values |= _from_checkpoint(source, missing, cut, model)
    left = [name for name in missing if name not in values]
    if left:
        raise ShardingError(_no_values(left, len(missing), init))
    return values


def _meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_meta}


def _from_checkpoint(
    init: Any, missing: Mapping[str, torch.Tensor], cut: Cut, model: nn.Module
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
                whole = source.tensors[name]()
                _check_shape(name, missing[name], whole, init)
                values[name] = cut(name, whole).to(missing[name].dtype)
        finally:
            source.refuse_another()
    return values


def checkpoints(init: Any) -> dict[str, int]:
    """A checksum of what is written beside each checkpoint of an `init`: its index, and our manifest, which has
    checksums of all values."""
    sources = init if isinstance(init, tuple) else (init,)
    paths = [Path(source) for source in sources if isinstance(source, str | os.PathLike) and source != RESET]
    return {str(path): _beside(path if path.is_dir() else path.parent) for path in paths}


def _beside(folder: Path) -> int:
    mark = 0
    for file in sorted({*folder.glob("*.safetensors.index.json"), *folder.glob("shardlib.json")}):
        mark = zlib.crc32(file.read_bytes(), mark)
    return mark


def _which(file: Path) -> tuple[int, ...]:
    """What tells a file from another that is put in its place; nothing where there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _check_shape(name: str, expected: torch.Tensor, whole: Any, init: Any) -> None:
    shape = tuple(whole.get_shape() if hasattr(whole, "get_shape") else whole.shape)
    if shape != tuple(expected.shape):
        raise CheckpointError(
            f'The checkpoint {_described(init)} has "{name}" with shape {shape}; the model has it with global shape '
            f"{tuple(expected.shape)}. Load a checkpoint of the same model configuration."
        )


def _from_initialiser(
    model: nn.Module, init: Any, missing: Mapping[str, torch.Tensor], cut: Cut, make: Make | None
) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = {}
    by_id = {id(tensor): name for name, tensor in missing.items()}
    for module in model.modules():
        own = {key: by_id[id(t)] for key, t in _own_tensors(module) if id(t) in by_id and by_id[id(t)] not in values}
        if own:
            values |= (
                _initialise_in_parts(module, init, own, cut, make) if make else _initialise(module, init, own, cut)
            )
    return values


def _initialise_in_parts(
    module: nn.Module, init: Any, own: Mapping[str, str], cut: Cut, make: Make
) -> dict[str, torch.Tensor]:
    """On a rank's parts if the initialiser takes them: it does on all ranks or on none."""
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            # Gathering costs little here; and where warnings are errors, it would stop the one rank that warns.
            warnings.simplefilter("ignore", ShardlibGatherWarning)
            return _initialise(module, init, own, cut, make)
    except Exception:
        torch.set_rng_state(state)
        return _initialise(module, init, own, cut)


def _initialise(
    module: nn.Module, init: Any, own: Mapping[str, str], cut: Cut, make: Make | None = None
) -> dict[str, torch.Tensor]:
    """Fill one module's own meta tensors with real memory, run the initialiser on it, cut, and put meta back."""
    meta = dict(_own_tensors(module))
    try:
        for key, tensor in meta.items():
            if tensor.is_meta:
                part = make(own[key], tensor) if make is not None and key in own else _empty(tensor)
                _set_own(module, key, _unfilled(tensor, part))
        _run(init, module)
        made = {key: tensor for key, tensor in _own_tensors(module) if key in own}
        return {own[key]: cut(own[key], t.detach()) for key, t in made.items() if not _is_unfilled(t)}
    finally:
        for key, tensor in meta.items():
            _set_own(module, key, tensor)


def _run(init: Any, module: nn.Module) -> None:
    if init != RESET:
        init(module)
    elif callable(reset := getattr(module, RESET, None)):
        reset()


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(k, t) for held in own_tensors(module) for k, t in held.items() if t is not None]


def _set_own(module: nn.Module, key: str, tensor: torch.Tensor) -> None:
    parameters, buffers = own_tensors(module)
    (parameters if key in parameters else buffers)[key] = tensor


# Memory that an initialiser has not written to holds this value everywhere, so that a forgotten tensor is found.
def _mark(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _unfilled(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    real.fill_(_mark(tensor.dtype))
    return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _is_unfilled(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or tensor.dtype is torch.bool:
        return tensor.is_meta
    mark = torch.full((), _mark(tensor.dtype), dtype=tensor.dtype)
    same = torch.isnan(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor == mark
    return tensor.numel() > 0 and bool(plain(same.all()))


def _files(path: Path) -> list[Path]:
    """The safetensors files behind a path: the file itself, or those of the index in a folder."""
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
