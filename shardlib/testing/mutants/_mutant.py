"""A mistake that is planted for the time of a proof."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import nn

from shardlib.testing import models
from shardlib.testing.equivalence import twins

__all__ = ["Mutant", "after_sharding", "replaced", "transformer"]

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """One real mistake.

    Attributes:
        name: short, for the table.
        mistake: the mistake, in a line.
        evidence: a report of this mistake.
        module: a regular expression for the module that the report has to name.
        case: the arguments of `equivalent`.
        planted: put into effect on every rank while the case runs; the same case without it is right.
        mistaken: for a mistake in the user's own code: what `equivalent` is given in place of `case`.
    """

    name: str
    mistake: str
    evidence: str
    module: str
    case: Callable[[], Arguments]
    planted: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    mistaken: Callable[[], Arguments] | None = None

    def arguments(self, *, planted: bool) -> Arguments:
        return (self.mistaken if planted and self.mistaken is not None else self.case)()


def transformer(mesh: str, *, sequence: bool = False, steps: int = 2, **sizes: Any) -> Arguments:
    """Return the arguments of `equivalent` for a small transformer and its usual rules."""
    extra = {
        key: sizes.pop(key)
        for key in ("accumulate", "clip", "options", "rng", "before_step", "transforms")
        if key in sizes
    }
    model = models.Transformer(**sizes)
    options = extra.pop("options", {})
    return {
        "model": _Factory(sizes),
        "batch": models.batch_for(model),
        "mesh": mesh,
        "rules": models.rules_for(model, sequence=sequence),
        "steps": steps,
        **extra,
        **options,
    }


@dataclass(frozen=True)
class _Factory:
    sizes: dict[str, Any]

    def __call__(self) -> nn.Module:
        return models.Transformer(**self.sizes)


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a plant that replaces `owner.name` by `make` of the original."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def after_sharding(spoil: Callable[[nn.Module], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a plant that spoils the sharded model as soon as it is made."""

    @contextmanager
    def planted() -> Iterator[None]:
        make = twins._sharded

        def sharded(*args: Any, **kwargs: Any) -> nn.Module:
            model = make(*args, **kwargs)
            spoil(model)
            return model

        with mock.patch.object(twins, "_sharded", sharded):
            yield

    return planted
