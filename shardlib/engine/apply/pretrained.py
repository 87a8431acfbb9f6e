"""Conversion of the tensors in Hugging Face files to those of the model that reads them.

Files on the hub keep the tensor names of the version that wrote them. Some have a tensor for each expert where the
model has one for all. transformers defines the conversion in terms of full tensors: it renames, stacks, and
concatenates along a dim. This module expresses the same conversion as positions of parts, so that a rank can read only
its slices.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardlib.engine.undo import Undo
from shardlib.errors import CheckpointError

__all__ = ["Found", "find", "generate_together"]

Shape = tuple[int, ...]
# transformers sets this attribute on models that its own FSDP shards. `generate` reads it.
_FORWARD_COMMUNICATES = "_is_fsdp_managed_module"
_Converter = tuple[Any, bool, int | None]  # with what `_dims` returns


@dataclass(frozen=True)
class Found:
    """A tensor of the model as files have it.

    Attributes:
        shape: the shape of the full tensor.
        parts: the name of each part in the files, and the index where it begins, dim by dim.
        stacked: whether the parts lack the first dim, in which each of them has one index.
    """

    shape: Shape
    parts: tuple[tuple[str, Shape], ...]
    stacked: bool = False


def generate_together(model: nn.Module, undo: Undo) -> None:
    """Let `generate` of transformers go on on each rank until all ranks have ended, as `synced_gpus=True` does.

    It is for models whose forward waits for other data ranks: a rank that ends earlier would leave them waiting.
    """
    mixin: Any = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    for module in model.modules() if mixin is not None else ():
        if isinstance(module, mixin) and not hasattr(module, _FORWARD_COMMUNICATES):
            setattr(module, _FORWARD_COMMUNICATES, True)
            undo.callback(delattr, module, _FORWARD_COMMUNICATES)


def find(model: nn.Module | None, shapes: Mapping[str, Shape]) -> dict[str, Found]:
    """Return tensors by the names that a model has for them.

    Args:
        model: a model of transformers; any other model has the names of the files.
        shapes: the shapes of the tensors in files, by the files' names.

    Raises:
        CheckpointError: the parts of a tensor do not make one tensor.
    """
    renamings, converters = _of_transformers(model)
    parts: dict[str, list[_Part]] = defaultdict(list)
    for key, shape in shapes.items():
        part = _placed(key, shape, renamings, converters)
        parts[part.name].append(part)
    return {name: _joined(name, several) for name, several in parts.items()}


@dataclass(frozen=True)
class _Part:
    """The position of a file's tensor in a tensor of the model.

    Attributes:
        name: the tensor of the model.
        key: the name in the file.
        shape: the shape in the file.
        index: the index in a stack; None if it is not stacked.
        order: the position among the tensors that are concatenated.
        dim: the dim that they are concatenated along.
    """

    name: str
    key: str
    shape: Shape
    index: int | None = None
    order: int = 0
    dim: int | None = None


def _of_transformers(model: nn.Module | None) -> tuple[list[Any], list[_Converter]]:
    """Return the renamings and conversions that transformers (from version 5 on) defines for one of its models."""
    if not any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        return [], []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        return [], []
    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [(one, _dims(one)) for one in mapping if isinstance(one, WeightConverter)]
    return renamings, [(one, *dims) for one, dims in converters if dims is not None]


def _dims(converter: Any) -> tuple[bool, int | None] | None:
    """Return whether parts are stacked, and the dim that they are concatenated along; None for any other conversion."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    stacked = steps[:1] == [("MergeModulelist", 0)]
    rest = steps[1:] if stacked else steps
    if len(converter.target_patterns) != 1 or len(rest) > 1 or (rest and rest[0][0] != "Concatenate"):
        return None
    return stacked, rest[0][1] if rest else None


def _placed(key: str, shape: Shape, renamings: list[Any], converters: list[_Converter]) -> _Part:
    renamed = key
    for one in renamings:
        renamed = one.rename_source_key(renamed)[0]
    for one, stacked, dim in converters:
        name, pattern = one.rename_source_key(renamed)
        if pattern is None:
            continue
        number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), renamed) if stacked else None
        if stacked and (number is None or not number.groups()):
            continue
        turn = list(one.source_patterns).index(pattern)
        return _Part(name, key, shape, int(number[1]) if number is not None else None, turn, dim)
    return _Part(renamed, key, shape)


def _joined(name: str, parts: list[_Part]) -> Found:
    first = parts[0]
    if len(parts) == 1 and first.index is None:
        return Found(first.shape, ((first.key, (0,) * len(first.shape)),))
    stacked = first.index is not None
    by_place = {(part.index or 0, part.order): part for part in parts}
    places, turns = (sorted(set(values)) for values in zip(*by_place, strict=True))
    complete = set(by_place) == set(itertools.product(places, turns)) and len(by_place) == len(parts)
    shapes = {turn: {by_place[p, turn].shape for p in places if (p, turn) in by_place} for turn in turns}
    if not complete or places != list(range(len(places))) or any(len(found) > 1 for found in shapes.values()):
        raise CheckpointError(
            f'"{name}" is made of {len(parts)} tensors of the checkpoint, such as "{first.key}", which cannot be '
            "joined: some are missing, there twice, or of another shape. Use another checkpoint."
        )
    lead = (1,) if stacked else ()
    sizes = {turn: (*lead, *by_place[0, turn].shape) for turn in turns}
    dim = first.dim or 0
    ends = [0, *itertools.accumulate(sizes[turn][dim] for turn in turns)]
    begins = dict(zip(turns, ends, strict=False))
    shape = list(sizes[turns[0]])
    shape[dim] = ends[-1] if first.dim is not None else shape[dim]
    shape[0] = len(places) if stacked else shape[0]
    starts: list[tuple[str, Shape]] = []
    for (place, turn), part in sorted(by_place.items(), key=lambda item: item[0]):
        at = [0] * len(shape)
        at[dim] = begins[turn]
        at[0] = place if stacked else at[0]
        starts.append((part.key, tuple(at)))
    return Found(tuple(shape), tuple(starts), stacked)
