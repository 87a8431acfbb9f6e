"""Keywords that users bring along: each one acts, or is refused with the reason and with how to say it here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from shardlib.errors import PlanError, nearest, refuse

__all__ = ["Options", "keyword", "recipe", "refused", "refused_keywords"]

T = TypeVar("T", bound=type)


def keyword(*, default: Any) -> Any:
    """Return the field of a keyword that several recipes share, after their own."""
    return field(default=default, kw_only=True)


def refused(reason: str, *, default: Any) -> Any:
    """Return the field of a keyword without a meaning here: other values than its default raise, with the reason."""
    return field(default=default, kw_only=True, metadata={"refused": reason})


class Options:
    """A set of keywords, which prints as the call that makes it."""

    def __repr__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


@dataclass_transform(frozen_default=True, field_specifiers=(field, keyword, refused))
def recipe(cls: T) -> T:
    """Decorate a class as a frozen dataclass whose keywords are checked when it is made.

    Raises, where it is made:
        PlanError: an unknown keyword, with the nearest known one; a keyword that means nothing here and was changed.
    """
    made: Any = dataclass(frozen=True, repr=False, eq=False)(cls)
    build = made.__init__

    @functools.wraps(build)
    def init(self: Any, *args: Any, **given: Any) -> None:
        known = [f.name for f in fields(made)]
        for name in given:
            if name not in known:
                raise PlanError(
                    f'{cls.__name__} has no keyword "{name}"; it has {", ".join(known)}.{nearest(name, known)}'
                )
        build(self, *args, **given)
        for f in fields(made):
            if reason := f.metadata.get("refused"):
                refuse(cls.__name__, f.name, getattr(self, f.name), f.default, reason)

    made.__init__ = init
    return made


def refused_keywords(cls: type) -> Mapping[str, str]:
    """Return the keywords of a class that have no meaning here, each with the reason."""
    return {f.name: f.metadata["refused"] for f in fields(cls) if "refused" in f.metadata}
