"""What the tensors of a Hugging Face file are in the model that reads them.

Files on the hub keep the names of the versions that wrote them, and some have a tensor for each expert where the model
has one for all. transformers says how they become the model's, tensor by tensor and in whole: renamed, stacked, joined
along a dim. Here the same is said as places, so that a rank can read just the slices that it holds.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardlib.errors import CheckpointError

__all__ = ["Found", "find"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """A tensor of the model as files have it.

    Attributes:
        shape: of all of it.
        parts: what files call each part, and where it begins, dim by dim.
        stacked: whether the parts lack the first dim, in which each of them has one place.
    """

    shape: Shape
    parts: tuple[tuple[str, Shape], ...]
    stacked: bool = False


def find(model: nn.Module | None, shapes: Mapping[str, Shape]) -> dict[str, Found]:
    """Tensors by the names that a model has for them.

    Args:
        model: one of transformers', or any other, for which names are what they are.
        shapes: of the tensors in files, by the files' names.

    Raises:
        CheckpointError: parts that do not make one tensor.
    """
    renamings, converters = _of_transformers(model)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for key, shape in shapes.items():
        part = _placed(key, shape, renamings, converters)
        parts[part.name].append(part)
    return {name: _joined(name, several) for name, several in parts.items()}


@dataclass(frozen=True)
class _Part:
    """Where a tensor of a file belongs: in which tensor of the model, at which place of a stack, which of those that
    are joined along a dim."""

    name: str
    key: str
    shape: Shape
    place: int | None = None
    turn: int = 0
    dim: int | None = None


def _of_transformers(model: nn.Module | None) -> tuple[list[Any], list[Any]]:
    """The renamings and conversions that transformers (from version 5 on) has for a model of its own."""
    if model is None or not any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        return [], []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        return [], []
    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    return renamings, [one for one in mapping if isinstance(one, WeightConverter) and _dims(one) is not None]


def _dims(converter: Any) -> tuple[bool, int | None] | None:
    """Whether parts are stacked, and along which dim they are joined; None of a conversion that does something else."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    stacked = steps[:1] == [("MergeModulelist", 0)]
    rest = steps[1:] if stacked else steps
    if len(converter.target_patterns) != 1 or len(rest) > 1 or (rest and rest[0][0] != "Concatenate"):
        return None
    return stacked, rest[0][1] if rest else None


def _placed(key: str, shape: Shape, renamings: list[Any], converters: list[Any]) -> _Part:
    renamed = key
    for one in renamings:
        renamed = one.rename_source_key(renamed)[0]
    for one in converters:
        name, pattern = one.rename_source_key(renamed)
        if pattern is None:
            continue
        stacked, dim = _dims(one) or (False, None)
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), renamed) if stacked else None
        if stacked and (number is None or not number.groups()):
            continue
        turn = list(one.source_patterns).index(pattern)
        return _Part(name, key, shape, int(number[1]) if number is not None else None, turn, dim)
    return _Part(renamed, key, shape)


def _joined(name: str, parts: list[_Part]) -> Found:
    first = parts[0]
    if len(parts) == 1 and first.place is None:
        return Found(first.shape, ((first.key, (0,) * len(first.shape)),))
    stacked = first.place is not None
    by_place = {(part.place or 0, part.turn): part for part in parts}
    places, turns = (sorted(set(values)) for values in zip(*by_place, strict=True))
    complete = set(by_place) == set(itertools.product(places, turns)) and len(by_place) == len(parts)
    shapes = {turn: {by_place[p, turn].shape for p in places if (p, turn) in by_place} for turn in turns}
    if not complete or places != list(range(len(places))) or any(len(found) > 1 for found in shapes.values()):
        raise CheckpointError(
            f'"{name}" is made of {len(parts)} tensors of the checkpoint, such as "{first.key}", which do not make '
            "one: some are missing, there twice, or of another shape. Use another checkpoint."
        )
    lead = (1,) if stacked else ()
    sizes = {turn: (*lead, *by_place[0, turn].shape) for turn in turns}
    dim = first.dim or 0
    ends = [0, *itertools.accumulate(sizes[turn][dim] for turn in turns)]
    begins = dict(zip(turns, ends, strict=False))
    shape = list(sizes[turns[0]])
    shape[dim] = ends[-1] if first.dim is not None else shape[dim]
    shape[0] = len(places) if stacked else shape[0]
    return Found(tuple(shape), tuple(_starts(by_place, begins, len(shape), first.dim, stacked)), stacked)


def _starts(
    parts: Mapping[tuple[int, int], _Part], begins: Mapping[int, int], ndim: int, dim: int | None, stacked: bool
) -> Iterable[tuple[str, Shape]]:
    for (place, turn), part in sorted(parts.items(), key=lambda item: item[0]):
        at = [0] * ndim
        if dim is not None:
            at[dim] = begins[turn]
        if stacked:
            at[0] = place
        yield part.key, tuple(at)
