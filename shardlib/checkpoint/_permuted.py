"""Tensors whose dims have another order in files: a kernel of flax is `in out`, a Linear's weight `out in`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

import torch

from shardlib.checkpoint._manifest import Saved
from shardlib.errors import CheckpointError
from shardlib.layout._boxes import Box
from shardlib.rules.patterns import NameIndex, compile_pattern

__all__ = ["Header", "Permuted", "Reading", "Transpose", "permutations", "permuted"]

Transpose = Mapping[str, Sequence[int]]
Header = tuple[torch.dtype, tuple[int, ...]]


class Reading(Protocol):
    """Slices of the tensors of open files."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def open(self, file: str) -> None: ...
    def headers(self, file: str) -> Mapping[str, Header]: ...
    def read(self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], part: Box) -> torch.Tensor: ...


class Permuted:
    """The same files with permuted dims of some tensors; shapes and parts are given in the permuted order."""

    def __init__(self, readers: Reading, dims: Mapping[str, tuple[int, ...]]) -> None:
        self._readers, self._dims = readers, dims

    def __enter__(self) -> Self:
        self._readers.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._readers.__exit__(*exc)

    def open(self, file: str) -> None:
        self._readers.open(file)

    def headers(self, file: str) -> Mapping[str, Header]:
        found = self._readers.headers(file)
        return {
            name: (dtype, tuple(shape[dim] for dim in self._dims.get(name, range(len(shape)))))
            for name, (dtype, shape) in found.items()
        }

    def read(self, file: str, name: str, dtype: torch.dtype, shape: tuple[int, ...], part: Box) -> torch.Tensor:
        dims = self._dims.get(name)
        if dims is None:
            return self._readers.read(file, name, dtype, shape, part)
        there = [dims.index(dim) for dim in range(len(dims))]  # for each dim of the file its index here
        box = Box(tuple(part.offsets[at] for at in there), tuple(part.sizes[at] for at in there))
        return self._readers.read(file, name, dtype, tuple(shape[at] for at in there), box).permute(dims)


def permuted(saved: Saved, key: str, dims: Sequence[int]) -> Saved:
    """Return a tensor that files call `key`, in another order of dims.

    >>> from shardlib.checkpoint._manifest import Piece
    >>> permuted(Saved((2, 3), torch.float32, (Piece(0, Box((0, 1), (2, 2))),)), "w", (1, 0)).pieces[0].box
    Box(offsets=(1, 0), sizes=(2, 2))
    """

    def turned(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    pieces = tuple(replace(p, box=Box(turned(p.box.offsets), turned(p.box.sizes))) for p in saved.pieces)
    return replace(saved, shape=turned(saved.shape), pieces=pieces, key=key)


def permutations(
    transpose: Transpose, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, tuple[int, ...]]:
    """Return the order of dims for each tensor that a pattern matches.

    Raises:
        CheckpointError: a pattern that matches nothing, dims that are not an order of a tensor's, two orders for one.
        RuleError: a pattern that cannot be read.

    >>> permutations({"kernel": (1, 0)}, {"dense.kernel": (2, 3), "dense.bias": (3,)}, Path("run"))
    {'dense.kernel': (1, 0)}
    """
    if not isinstance(transpose, Mapping):
        raise CheckpointError(
            f'transpose= was given as {transpose!r}; give patterns of names with orders of dims: {{"kernel": (1, 0)}}.'
        )
    names, found = NameIndex(shapes), dict[str, tuple[int, ...]]()
    for pattern, dims in transpose.items():
        matched = names.select(compile_pattern(pattern))
        if not matched:
            raise CheckpointError(
                f'transpose= names "{pattern}", which matches none of the {len(shapes)} tensors of "{folder}", such as '
                f'"{next(iter(shapes), "")}". Patterns are of the names in the checkpoint.'
            )
        for name in matched:
            if sorted(dims) != list(range(len(shapes[name]))):
                raise CheckpointError(
                    f'transpose= gives "{name}" by "{pattern}" the dims {tuple(dims)}; it has shape {shapes[name]} in '
                    f'"{folder}". Give each of its {len(shapes[name])} dims once, or a narrower pattern.'
                )
            if found.setdefault(name, tuple(dims)) != tuple(dims):
                raise CheckpointError(f'transpose= gives "{name}" two orders of dims: {found[name]} and {tuple(dims)}.')
    return found
