"""Keywords of ColossalAI's classes. Each one takes effect, or asks for speed or memory and changes no number, or is
refused with the reason and with what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform

from shardlib.booster._logger import get_dist_logger
from shardlib.errors import InputError, PlanError, nearest, refuse

__all__ = [
    "REFUSED_ARGUMENTS",
    "REFUSED_METHODS",
    "NotThere",
    "Options",
    "keyword",
    "met",
    "met_keywords",
    "recipe",
    "refuse_argument",
    "refuse_method",
    "refused",
    "refused_keywords",
    "say_once",
]

T = TypeVar("T", bound=type)


_QUANTIZED = (
    "weights that bitsandbytes has packed have no dims that a layout could shard, and only its GPU kernels multiply "
    'with them. Keep frozen weights small by precision="bf16" and by stage 3 of ZeRO.'
)
_UNSHARDED = "files always have unsharded tensors."

REFUSED_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "save_model": {
        "gather_dtensor": _UNSHARDED,
        "prefix": "one file has the name that you give; prefix needs shard=True.",
    },
    "save_optimizer": {
        "gather_dtensor": _UNSHARDED,
        "prefix": "only load_optimizer reads these files; choose another folder.",
    },
    "enable_lora": {"bnb_quantization_config": _QUANTIZED, "quantize": _QUANTIZED},
}
"""The arguments without a meaning here, by method of a booster, each with the reason."""


REFUSED_METHODS: Mapping[str, str] = {
    "MixedPrecision.configure": "precision is set when the model is sharded; call "
    "Booster(mixed_precision=...).boost(model, optimizer, criterion).",
}
"""The methods without a meaning here, each with the reason."""


def refuse_method(name: str) -> NoReturn:
    """Refuse a call of `REFUSED_METHODS`.

    Raises:
        PlanError: always.
    """
    raise PlanError(f"{name} is not offered: {REFUSED_METHODS[name]}")


def refuse_argument(method: str, name: str, value: Any, default: Any) -> None:
    """Refuse another value than the default for an argument of `REFUSED_ARGUMENTS`.

    Raises:
        PlanError: another value.
    """
    refuse(method, name, value, default, REFUSED_ARGUMENTS[method][name])


def keyword(*, default: Any) -> Any:
    """Return the field of a keyword that several recipes share, after their own."""
    return field(default=default, kw_only=True)


def refused(reason: str, *, default: Any) -> Any:
    """Return the field of a keyword without a meaning here: other values than its default raise, with the reason."""
    return field(default=default, kw_only=True, metadata={"refused": reason})


def met(how: str, *, default: Any) -> Any:
    """Return the field of a request for speed or memory that changes no number here: another value than its default is
    said once, with what is done instead."""
    return field(default=default, kw_only=True, metadata={"met": how})


@functools.cache
def say_once(text: str) -> None:
    """Log a sentence on the first rank, once in a process."""
    get_dist_logger().info(text, ranks=[0])


class NotThere(InputError, AttributeError):
    """An attribute that ColossalAI has and shardlib does not; `hasattr` sees that it is not there."""


class Options:
    """A set of keywords, which prints as the call that makes it."""

    def __repr__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


@dataclass_transform(frozen_default=True, field_specifiers=(field, keyword, met, refused))
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
            if (how := f.metadata.get("met")) and getattr(self, f.name) != f.default:
                say_once(f"{cls.__name__}({f.name}={getattr(self, f.name)!r}): {how}")

    made.__init__ = init
    return made


def refused_keywords(cls: type) -> Mapping[str, str]:
    """Return the keywords of a class that have no meaning here, each with the reason."""
    return {f.name: f.metadata["refused"] for f in fields(cls) if "refused" in f.metadata}


def met_keywords(cls: type) -> Mapping[str, str]:
    """Return the requests for speed or memory of a class, each with what is done in either case."""
    return {f.name: f.metadata["met"] for f in fields(cls) if "met" in f.metadata}
