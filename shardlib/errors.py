"""One exception family. A message says what was given, what was expected, and what to do next."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar, cast

__all__ = [
    "CheckpointError",
    "DeviceCountError",
    "InputError",
    "InputTypeError",
    "LaunchError",
    "LayoutError",
    "LostRankError",
    "MeshError",
    "PlanError",
    "RuleError",
    "ShardingError",
    "ShardlibError",
    "StageError",
    "VersionError",
    "by_rank",
    "check_flags",
    "hide_frames",
    "nearest",
    "printable",
    "refuse",
    "short_traceback",
    "warn",
]

F = TypeVar("F", bound=Callable[..., Any])

_INTERNAL = "shardlib", "torch", "contextlib", "importlib"  # packages whose frames are not the user's


# C0 and C1, and characters that change the direction of the text after them.
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")


class ShardlibError(Exception):
    """Base of every error that shardlib raises about what a user gave it, or about ranks that are gone.

    Control characters in its message, which may come from a file or from another rank, are escaped: a terminal would
    obey them.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))


class LaunchError(ShardlibError):
    """A job that cannot be started as asked: a missing variable, a wrong number, a config, ranks that did not meet."""


class MeshError(ShardlibError):
    """An invalid mesh: an unknown axis, a size that does not fit the number of processes."""


class LayoutError(ShardlibError):
    """A layout that cannot be read, or does not fit the tensor or the mesh."""


class RuleError(ShardlibError):
    """A rule, or a layout file, that is ambiguous or wrong for the model."""


class PlanError(ShardlibError, ValueError):
    """A plan that cannot be computed, read or carried out."""


class TooLargeError(PlanError):
    """A plan that holds more memory than a device has."""


class DeviceCountError(PlanError, IndexError):
    """Fewer devices than parts of a model."""


class ShardingError(ShardlibError):
    """A model or optimizer in a state in which it cannot be sharded or stepped."""


class InputError(ShardlibError, ValueError):
    """An argument of a sharded model does not fit its mesh: a device, a batch that ranks disagree on."""


class InputTypeError(InputError, TypeError):
    """An argument is of another type than those that are taken."""


class CheckpointError(ShardlibError):
    """Saved values that do not fit the model they are loaded into."""


class LostRankError(ShardlibError):
    """A rank has ended, or did not answer in time, while others were waiting for it.

    Attributes:
        ranks: the ranks that were lost first; empty if all answered again after a timeout.
        phase: the phase in which this rank noticed: "sharding", "forward", "backward" or "step".
    """

    def __init__(self, message: str, ranks: Iterable[int] = (), phase: str = "") -> None:
        super().__init__(message)
        self.ranks, self.phase = tuple(ranks), phase


class VersionError(ShardlibError, ImportError):
    """A torch that is too old for this shardlib, or that lacks a private name which shardlib uses."""


class StageError(ShardlibError):
    """A stage of a pipeline has raised; every rank raises this, and the one that failed has the cause.

    Attributes:
        rank: the rank that failed first.
        stage, microbatch: where it failed; None before the first microbatch.
    """

    def __init__(self, message: str, rank: int = 0, stage: int | None = None, microbatch: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.stage, self.microbatch = rank, stage, microbatch


def printable(text: str) -> str:
    """Return a text whose control characters, but for newlines and tabs, are escaped.

    >>> print(printable("blocks.\\x1b[2J"))
    blocks.\\x1b[2J
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def by_rank(texts: Iterable[tuple[int, object]]) -> str:
    """Return a line for each text, with the ranks that have it, given in pairs of rank and text.

    >>> print(by_rank([(0, "dp=4"), (1, "dp=2,tp=2"), (2, "dp=4")]))
      rank 0, 2: dp=4
      rank 1: dp=2,tp=2
    """
    ranks_of: dict[object, list[int]] = {}
    for rank, text in texts:
        ranks_of.setdefault(text, []).append(rank)
    return "\n".join(f"  rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items())


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence that suggests the closest candidate, or an empty string.

    >>> nearest("atn.qkv", ["attn.qkv", "mlp.up"])
    ' Did you mean "attn.qkv"?'
    >>> nearest("zzz", ["attn.qkv"])
    ''
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return f' Did you mean "{by_lower[close[0]]}"?' if close else ""


def check_flags(call: str, error: type[ShardlibError], **flags: object) -> None:
    """Check that keywords that are on or off are given as bools: "no" would be on.

    Raises:
        ShardlibError: the given error, for the first that is none.

    >>> check_flags("save", CheckpointError, background=True, random=False)
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise error(f"{call}({name}={value!r}) was given; give True or False.")


def refuse(
    call: str, name: str, value: Any, default: Any, reason: str, *, error: type[ShardlibError] = PlanError
) -> None:
    """Refuse a value other than the default for a keyword that has no meaning here.

    Raises:
        PlanError: another value; or the given error.

    >>> refuse("Lamb", "amsgrad", False, False, "no paper has such an average.")
    """
    if value is not default and value != default:
        raise error(f"{call}({name}={value!r}): {reason} (Leave it out, or give {default!r}.)")


def short_traceback(function: F) -> F:
    """Decorate a public function, so that the traceback of a `ShardlibError` goes from its caller to the message.

    The frames of shardlib and torch inside the function are left out, and frames of the user's own code, such as a
    transform that it calls, stay. All frames stay if the logger "shardlib" is at level debug (SHARDLIB_LOG=debug).

    >>> @short_traceback
    ... def double(text):
    ...     refuse("double", "text", text, "", "it is not empty.")
    >>> double("ab")
    Traceback (most recent call last):
    shardlib.errors.PlanError: double(text='ab'): it is not empty. (Leave it out, or give ''.)
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)  # inner frames are left out: SHARDLIB_LOG=debug shows them
        except ShardlibError as error:
            hide_frames(error)
            raise

    return cast(F, call)


def hide_frames(error: ShardlibError) -> None:
    """Leave out the frames of shardlib and torch below the one that caught an error, unless the log is at debug."""
    if logging.getLogger("shardlib").isEnabledFor(logging.DEBUG):
        return
    entry = error.__traceback__
    while entry is not None:
        while entry.tb_next is not None and _is_internal(entry.tb_next.tb_frame):
            entry.tb_next = entry.tb_next.tb_next
        entry = entry.tb_next


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called shardlib, whatever frames of shardlib and torch are in between.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("No rule names the axis.")
    >>> str(caught[0].message)
    'No rule names the axis.'
    """
    frame = inspect.currentframe()
    assert frame is not None  # as in CPython
    while _is_internal(frame) and frame.f_back is not None:
        frame = frame.f_back
    seen = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, seen)


def _is_internal(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _INTERNAL
