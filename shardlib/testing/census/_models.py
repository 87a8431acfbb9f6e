"""The models of the census: every architecture of an installed library, tiny, and one batch for each."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardlib.errors import InputError
from shardlib.testing.census import _diffusion
from shardlib.testing.census._inputs import batch_of
from shardlib.testing.census._shrink import facts, shrunk
from shardlib.testing.census._vision import families, images, small_model

__all__ = ["LIBRARIES", "MOST_PARAMETERS", "Entry", "Library", "TooLarge", "batch", "build", "entries"]

MOST_PARAMETERS = 13_000_000


class TooLarge(Exception):
    """A model that the shrinker does not make tiny."""


@dataclass(frozen=True)
class Entry:
    """One architecture.

    Attributes:
        library: the library's name.
        name: the architecture's name in it.
        cls: the class that is proved.
        labels: the kind of labels that its forward takes; "" for none.
        share: what divides the widths of its configuration; 0 for the sizes of `census.toml`.
        experts: how a mixture of experts of transformers computes them.
    """

    library: str
    name: str
    cls: str
    labels: str = ""
    share: int = 0
    experts: str = "eager"  # the grouped product of CPUs takes no float64


@dataclass(frozen=True)
class Library:
    """A library that the census knows.

    Attributes:
        entries: returns its architectures.
        make: builds the tiny model of one.
        batch: returns the batch of a step, of a model, the kind of its labels, which inputs it takes, and a seed.
        extras: the choices of inputs, in the order in which they are tried.
        shares: the ways to make a model tiny, in the order in which they are tried; see `Entry.share`.
    """

    entries: Callable[[], Iterable[Entry]]
    make: Callable[[Entry], nn.Module]
    batch: Callable[[nn.Module, str, str, int], dict[str, Any]]
    extras: tuple[str, ...]
    shares: tuple[int, ...] = (0,)


def entries(library: str) -> list[Entry]:
    """Return every architecture of an installed library, by name.

    Raises:
        InputError: a library that the census does not know, or that is not installed.
    """
    if library not in LIBRARIES:
        raise InputError(f'The census was given library "{library}"; it knows {", ".join(LIBRARIES)}.')
    try:
        return sorted(LIBRARIES[library].entries(), key=lambda entry: entry.name)
    except ImportError as error:
        raise InputError(f"The census of {library} needs it: {error}.") from error


def _transformers() -> Iterator[Entry]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tables = [(head, getattr(auto, head["mapping"], {})) for head in facts()["heads"]]
    others = [getattr(auto, name) for name in dir(auto) if name.startswith("MODEL_") and name.endswith("_NAMES")]
    for name in sorted({model_type for table in others for model_type in table}):
        head, table = next(((h, t) for h, t in tables if name in t), ({"labels": ""}, None))
        found = table[name] if table else next(t[name] for t in others if name in t)
        yield Entry("transformers", name, found if isinstance(found, str) else found[0], head["labels"])


def _transformer(entry: Entry) -> nn.Module:
    cls = getattr(importlib.import_module("transformers"), entry.cls)
    return cls(_config(entry, cls))  # type: ignore[no-any-return]


def _vision(library: str) -> Library:
    return Library(
        entries=lambda: [Entry(library, family, name) for family, name in families(library)],
        make=lambda entry: small_model(library, entry.cls),
        batch=lambda model, labels, extra, step: dict(images(model, extra, step)),
        extras=("", "larger", "usual"),
    )


LIBRARIES: dict[str, Library] = {
    "transformers": Library(_transformers, _transformer, batch_of, ("", "all", "transposed"), (0, 8, 4)),
    "timm": _vision("timm"),
    "torchvision": _vision("torchvision"),
    "diffusers": Library(
        entries=lambda: [Entry("diffusers", name, name) for name in _diffusion.names()],
        make=lambda entry: _diffusion.small_model(_diffusion.class_of(entry.cls)),
        batch=lambda model, labels, extra, step: _diffusion.batch_of(model, extra, step),
        extras=_diffusion.EXTRAS,
    ),
}


def build(entry: Entry) -> nn.Module:
    """Build the tiny model of an entry, in training mode, from the current seed.

    Raises:
        TooLarge: more than `MOST_PARAMETERS` parameters are left.
    """
    _quiet()
    made = _made(entry)
    _stop_dropping(made)
    with torch.no_grad():
        for parameter in made.parameters():  # away from where they start (0 and 1), which hides mistakes
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return made.train()  # type: ignore[no-any-return]


def _stop_dropping(model: nn.Module) -> None:
    """Set every rate of dropout to zero, also those that no argument or configuration sets."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and re.search("Drop|StochasticDepth", type(module).__name__))
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)


def _made(entry: Entry) -> nn.Module:
    make = functools.partial(LIBRARIES[entry.library].make, entry)
    _check_size(make)
    return make()


def _check_size(make: Callable[[], nn.Module]) -> None:
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in make().parameters())
    except Exception:  # some classes read values while they are built; they are built once more, with values
        return
    if count > MOST_PARAMETERS:
        raise TooLarge(f"{count:,} parameters are left after shrinking")


def _config(entry: Entry, model: Any) -> Any:
    transformers = importlib.import_module("transformers")
    cls = transformers.CONFIG_MAPPING[entry.name]
    part: Any = getattr(model, "config_class", None)
    if part in getattr(cls, "sub_configs", {}).values():  # a decoder of a composite model
        cls = part
    return cls(**shrunk(cls(), entry.share), experts_implementation=entry.experts)


def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def batch(entry: Entry, labels: str, extra: str, step: int) -> dict[str, Any]:
    """Return the global batch of one step."""
    return LIBRARIES[entry.library].batch(_skeleton(entry), labels, extra, step)


@functools.lru_cache(1)
def _skeleton(entry: Entry) -> nn.Module:
    return build(entry)
