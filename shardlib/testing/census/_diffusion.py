"""Models of diffusers: tiny ones by the arguments that their constructors have, and noisy samples with their times."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardlib.testing.census._inputs import ROWS, NoInputs
from shardlib.testing.census._shrink import facts

__all__ = ["EXTRAS", "batch_of", "class_of", "names", "small_arguments", "small_model"]

EXTRAS = tuple(f"{kind}{more}" for kind in facts()["diffusion"]["kinds"] for more in ("", ", all"))
_HEAD, _WIDTH, _NARROWEST = 16, 64, 16  # the sizes of a head, and of widths; lists of widths keep their ratios
_DROPOUT = re.compile(r".*drop(out|_rate|_prob|_path)?.*")


def names() -> Iterator[str]:
    """Iterate over the names of the models in the packages of diffusers that `census.toml` lists."""
    diffusers = importlib.import_module("diffusers")
    packages = tuple(f"diffusers.models.{package}." for package in facts()["diffusion"]["packages"])
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and cls.__module__.startswith(packages):
            yield name


def class_of(name: str) -> type[nn.Module]:
    """Return a class of diffusers."""
    return getattr(importlib.import_module("diffusers"), name)  # type: ignore[no-any-return]


def small_model(cls: type[nn.Module]) -> nn.Module:
    """Build a model with tiny arguments."""
    return cls(**small_arguments(cls))


def small_arguments(cls: type[nn.Module]) -> dict[str, Any]:
    """Return the arguments of a constructor that make a model tiny: those that differ from their defaults.

    Args:
        cls: a class whose arguments have defaults; it may have settings of its own in `census.toml`.
    """
    parameters = inspect.signature(cls.__init__).parameters
    fields = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    made = {name: _small(name, value, fields) for name, value in fields.items()}
    changed = {name: value for name, value in made.items() if value is not fields[name]}
    return {**changed, **facts()["diffusion"]["settings"].get(cls.__name__, {})}


def _small(name: str, value: Any, fields: Mapping[str, Any]) -> Any:
    if isinstance(value, float):
        return 0.0 if _DROPOUT.fullmatch(name) and value else value
    rule = _first("sizes", name)
    if type(value) is int:
        return min(value, rule) if isinstance(rule, int) and value > 0 else value
    if not isinstance(value, list | tuple) or not value or not all(type(each) is int for each in value):
        return value
    if rule == "positions":
        return type(value)(_even_parts(value, _HEAD * sum(value) // _head_of(fields, value)))
    if not isinstance(rule, int):
        return value
    if rule == _WIDTH:
        return type(value)(_NARROWEST * max(1, min(4, round(each / min(value)))) for each in value)
    return type(value)(min(each, rule) for each in value)


def _first(table: str, name: str) -> Any:
    """Return the value of the first pattern of a table that matches a name; None where none does."""
    patterns = facts()["diffusion"][table].items()
    return next((value for pattern, value in patterns if re.fullmatch(pattern, name)), None)


def _head_of(fields: Mapping[str, Any], positions: list[int] | tuple[int, ...]) -> int:
    """Return the width of a head that the parts of its positions fill, in full or in part."""
    found = (fields.get(name) for name in ("attention_head_dim", "head_dim"))
    return next((each for each in found if type(each) is int), sum(positions))


def _even_parts(parts: list[int] | tuple[int, ...], total: int) -> list[int]:
    """Return even parts with an even sum, about as they were, each at least two.

    >>> _even_parts((16, 56, 56), 16)
    [4, 6, 6]
    """
    made = [max(2, 2 * math.floor(part * total / sum(parts) / 2)) for part in parts]
    return [made[0] + total - sum(made), *made[1:]]


def batch_of(model: nn.Module, extra: str, step: int) -> dict[str, Any]:
    """Return arguments by name for a model: its main input, and what else its forward requires or `census.toml` gives.

    Args:
        model: a model of diffusers.
        extra: the kind of the main input, and "all" for every other argument that there are values for.
        step: the seed.

    Raises:
        NoInputs: a required argument has no values.
    """
    kind, _, more = extra.partition(", ")
    draw = torch.Generator().manual_seed(step)
    main, *others = inspect.signature(model.forward).parameters.values()
    config: Mapping[str, Any] = model.config  # type: ignore[assignment]
    made = {main.name: _made(facts()["diffusion"]["kinds"][kind], config, draw)}
    for p in others:
        given = _first("inputs", p.name)
        required = p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
        if given is None and required:
            raise NoInputs(f'its forward requires "{p.name}", for which the census has no values')
        if required or (given is not None and more and config.get(given.get("when", ""), "when" not in given)):
            made[p.name] = _made(given, config, draw)
    return made


def _made(given: Mapping[str, Any], config: Mapping[str, Any], draw: torch.Generator) -> Any:
    """Return an argument of `census.toml`: a tensor if it has a shape, else its values."""
    values = given["values"]
    if "shape" not in given:
        return values
    shape = [_size(dim, config) for dim in given["shape"]]
    if values == "normal":
        return torch.randn(shape, generator=draw)
    if values in ("ones", "zeros"):
        return torch.full(shape, int(values == "ones"))
    ids = torch.randint(1, 8, shape, generator=draw)
    return ids.float() if values == "times" else ids


def _size(dim: int | str, config: Mapping[str, Any]) -> int:
    """Return the size of a dim: a number, the rows, or the first of several fields that a configuration has."""
    if isinstance(dim, int):
        return dim
    if dim == "rows":
        return ROWS
    found = (config.get(field) for field in dim.split(" | "))
    value = next((each for each in found if each), _WIDTH)
    return len(value) if isinstance(value, list | tuple) else int(value)
