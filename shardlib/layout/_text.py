"""The text form of a layout: an einops pattern with mesh axes attached.

    layout  = pattern { "+" op "@" axes } [ ":" [dtype] ["host"] ]
    factor  = name [ "=" size ] [ "@" axes [ "?" ] ]
    axes    = axis | "(" axis { "," axis } ")"

The axes are lifted out first; what remains is read by einops' own parser.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from einops import EinopsError
from einops.parsing import ParsedExpression

from shardlib._dtypes import NAMES, is_dtype_name
from shardlib.errors import LayoutError, nearest
from shardlib.layout._dims import Dim, Dims, Factor, spell

__all__ = ["REDUCTIONS", "Memory", "Parts", "read", "write"]

Memory: TypeAlias = Literal["device", "host"]
REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")

_FACTOR = re.compile(r"([^\s()@=?]+)(?:=(\d+))?(?:@([^\s()@=?]+|\([^()@=?]*\)))?(\?)?")
_HOLLOW = re.compile(r"\((?:[^()]*\s)?0*1(?:\s[^()]*)?\)|\(\s*\)")
_PARTIAL = re.compile(r"\s*(\w+)@(\w+|\([^()]*\))\s*")
_GRAMMAR = (
    'Write one word per dim, as in "vocab@tp embed": name@axis or name@(outer,inner) shards a dim, (a b@axis c) is a '
    'fused dim, "..." stands for any leading dims.'
)


class Parts(NamedTuple):
    """The fields of a text, before they become a `Layout`."""

    dims: Dims
    partials: tuple[tuple[str, str], ...]
    dtype: Any  # its name, or None
    memory: Memory


def read(text: str, sizes: Mapping[str, int]) -> Parts:
    """Parse the text of a layout; `sizes` gives the sizes of its named factors.

    Raises:
        LayoutError: the text cannot be read. The message repeats it and names the offending part.
    """
    rest, colon, phase = text.partition(":")
    pattern, *partials = rest.split("+")
    dims = _read_dims(text, pattern, sizes)
    dtype, memory = _read_phase(text, phase) if colon else (None, "device")
    return Parts(dims, tuple(pair for term in partials for pair in _read_partial(text, term)), dtype, memory)


def write(parts: Parts, *, sizes: bool) -> str:
    """Write the canonical text; with `sizes`, factors of known size carry it, so that no information is lost."""
    words = [" ".join(_write_dim(dim, sizes) for dim in parts.dims)]
    by_op = groupby(sorted(parts.partials, key=lambda pair: (pair[1], pair[0])), key=lambda pair: pair[1])
    words += [f"+ {op}@{spell(tuple(axis for axis, _ in pairs))}" for op, pairs in by_op]
    phase = [parts.dtype] if parts.dtype else []
    phase += ["host"] if parts.memory == "host" else []
    words += [f": {' '.join(phase)}"] if phase else []
    return " ".join(word for word in words if word)


def _read_dims(text: str, pattern: str, sizes: Mapping[str, int]) -> Dims:
    factors: list[Factor] = []

    def lift(match: re.Match[str]) -> str:
        factors.append(_read_factor(text, match, sizes))
        return match[1]

    unread = _FACTOR.sub(lambda match: " " * len(match[0]), pattern)
    if stray := re.search(r"[@=?]", unread):
        _refuse(text, f'"{_word_at(pattern, stray.start())}" cannot be read', _GRAMMAR)
    bare = _FACTOR.sub(lift, pattern)
    if hollow := _HOLLOW.search(bare):
        _refuse(
            text, f'"{hollow[0]}" has a factor of one, or none', 'Leave such factors out; a dim of size one is "1".'
        )
    words = iter(factors)
    return tuple(_dim(text, names, words) for names in _composition(text, bare))


def _word_at(pattern: str, at: int) -> str:
    return next(word[0] for word in re.finditer(r"\S+", pattern) if at < word.end())


def _composition(text: str, bare: str) -> list[Any]:
    try:
        with warnings.catch_warnings():  # einops discourages Python keywords; "in" and "out" are fine names here
            warnings.simplefilter("ignore")
            parsed = ParsedExpression(bare, allow_underscore=True)
    except EinopsError as error:
        _refuse(text, " ".join(str(error).split()), _GRAMMAR)
    if parsed.has_ellipsis_parenthesized:
        _refuse(
            text, '"..." stands inside parentheses', 'Write "..." outside of any fused dim; it stands for whole dims.'
        )
    return parsed.composition


def _dim(text: str, names: Any, words: Iterator[Factor]) -> Any:
    if isinstance(names, str):
        return _ellipsis(text, next(words))
    return Dim(tuple(next(words) for _ in names or ["1"]))  # einops drops the name of a dim written "1"


def _ellipsis(text: str, word: Factor) -> Any:
    if word != Factor("..."):
        _refuse(text, '"..." carries axes or a size', 'Name the dim that is to be sharded; "..." is never sharded.')
    return ...


def _read_factor(text: str, match: re.Match[str], sizes: Mapping[str, int]) -> Factor:
    name, size, axes, optional = match.groups()
    if optional and not axes:
        _refuse(text, f'"{match[0]}" has "?" without an axis', "Write name@axis? to shard a dim only if it divides.")
    written = [int(word) for word in (size, name if name.isdecimal() else None) if word is not None]
    given = list(dict.fromkeys([*written, *([sizes[name]] if name in sizes else [])]))
    if len(given) > 1 or any(not isinstance(value, int) or value < 1 for value in given):
        values = " and ".join(repr(value) for value in given)
        _refuse(text, f'"{name}" has size {values}', "Give each name one positive size, in the text or in sizes.")
    return Factor(name, _read_axes(text, axes) if axes else (), given[0] if given else None, bool(optional))


def _read_axes(text: str, axes: str) -> tuple[str, ...]:
    names = tuple(axis.strip() for axis in axes.strip("()").split(","))
    if bad := [axis for axis in names if not axis.isidentifier()]:
        _refuse(
            text, f'"{bad[0]}" in "@{axes}" is not an axis name', "Write @axis, or @(outer,inner) for several axes."
        )
    return names


def _read_partial(text: str, term: str) -> list[tuple[str, str]]:
    match = _PARTIAL.fullmatch(term)
    if match is None:
        _refuse(text, f'"+{term}" cannot be read', 'Write a pending reduction as "+ sum@axis" or "+ avg@(a,b)".')
    op, axes = match.groups()
    if op not in REDUCTIONS:
        known = ", ".join(REDUCTIONS)
        _refuse(text, f'"{op}" is not a reduction', f"Known are {known}.{nearest(op, REDUCTIONS)}")
    return [(axis, op) for axis in _read_axes(text, axes)]


def _read_phase(text: str, phase: str) -> tuple[str | None, Memory]:
    dtype: str | None = None
    memory: Memory = "device"
    for word in phase.split():
        if word in ("device", "host"):
            memory = "host" if word == "host" else "device"
        elif is_dtype_name(word):
            dtype = word
        else:
            hint = nearest(word, ["device", "host", *NAMES])
            _refuse(text, f'"{word}" is not a dtype', f'After ":" give a dtype, "device" or "host".{hint}')
    return dtype, memory


def _refuse(text: str, fact: str, advice: str) -> NoReturn:
    raise LayoutError(f'Layout "{text}": {fact}. {advice}')


def _write_dim(dim: Any, sizes: bool) -> str:
    if dim is ...:
        return "..."
    words = [_write_factor(factor, sizes) for factor in dim.factors]
    return f"({' '.join(words)})" if dim.fused else words[0]


def _write_factor(factor: Factor, sizes: bool) -> str:
    size = f"={factor.size}" if sizes and factor.size is not None and not factor.name.isdecimal() else ""
    axes = f"@{spell(factor.axes)}" if factor.axes else ""
    return f"{factor.name}{size}{axes}{'?' if factor.optional else ''}"
