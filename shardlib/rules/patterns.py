"""Patterns over dotted names: parsed once, compiled to one regular expression, applied to many names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardlib.errors import RuleError

__all__ = ["TENSOR_REGEX", "NameIndex", "Pattern", "compile_pattern", "exactly"]

_GLOB = re.compile(r"[*?\[]")
TENSOR_REGEX = "tensor re:"
_FORMS = (
    "`*` stands for one segment (or part of one), `**` for any number of whole segments, `?` and `[...]` for one "
    'character; a pattern matches at the end of a name, "^" in front anchors it at the root, "re:" in front makes it '
    'a regular expression for the whole name, "tensor re:" one that never names a module'
)


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern.

    Attributes:
        tail: the literal last segment of every match, or None when there is none.
        tensors_only: whether it names tensors and never a module or an activation.
    """

    text: str
    regex: re.Pattern[str]
    tail: str | None
    tensors_only: bool = False

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches a dotted name.

        >>> compile_pattern("attn.qkv").matches("blocks.7.attn.qkv")
        True
        >>> compile_pattern("^attn.qkv").matches("blocks.7.attn.qkv")
        False
        """
        return self.regex.fullmatch(name) is not None


@lru_cache(maxsize=4096)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern; the same text is compiled once.

    Dotted, whole segments. `*` is one segment and shell globs work inside a segment; `**` is any number of segments,
    none included. The pattern matches at the *end* of a name; `^` anchors it at the root (`^` alone is the root
    itself); `re:` gives a regular expression that must match the whole name, and `tensor re:` one for names of tensors
    alone, as other libraries have them.

    Raises:
        RuleError: an empty pattern or segment, `**` as a part of a segment, an unclosed `[`, an invalid regex.

    >>> [name for name in ("h.0.mlp.up", "h.0.mlp.up.weight") if compile_pattern("h.*.mlp.**").matches(name)]
    ['h.0.mlp.up', 'h.0.mlp.up.weight']
    >>> compile_pattern("re:.*[02].up").matches("h.0.up")
    True
    """
    if text.startswith(TENSOR_REGEX):
        return Pattern(text, _compiled(text, text.removeprefix(TENSOR_REGEX)), None, tensors_only=True)
    if text.startswith("re:"):
        return Pattern(text, _compiled(text, text[3:]), None)
    anchored = text.startswith("^")
    segments = _segments(text, text.removeprefix("^"))
    return Pattern(text, _compiled(text, _source(segments, anchored, text)), _literal_tail(segments))


class NameIndex:
    """Names grouped by their last segment, so that most patterns are tested on few of them.

    >>> NameIndex(["wte", "h.0.mlp", "h.1.mlp"]).select(compile_pattern("h.*.mlp"))
    ['h.0.mlp', 'h.1.mlp']
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self._by_tail: dict[str, list[str]] = {}
        for name in self.names:
            self._by_tail.setdefault(name.rpartition(".")[2], []).append(name)

    def select(self, pattern: Pattern) -> list[str]:
        """Return the names that a pattern matches, in the order in which they were given."""
        candidates = self.names if pattern.tail is None else self._by_tail.get(pattern.tail, [])
        return [name for name in candidates if pattern.regex.fullmatch(name)]


def _segments(text: str, body: str) -> list[str]:
    if not body:
        if text == "^":
            return []
        raise RuleError(
            f'A pattern is empty. Name a module, a parameter, or an activation: {_FORMS}; "^" alone is the root.'
        )
    segments = body.split(".")
    if "" in segments:
        raise RuleError(f'Pattern "{text}" has an empty segment; write names as in "blocks.*.attn.qkv": {_FORMS}.')
    return segments


# A segment ends with a dot or with the name, and names never end with a dot; so `**` is one plain repetition.
_END = r"(?:\.|\Z)"
_ANY = rf"(?:[^.]+{_END})*"


def _source(segments: list[str], anchored: bool, text: str) -> str:
    # Without `^` a pattern may begin anywhere: that is a `**` in front. Two `**` in a row are one.
    full = segments if anchored else ["**", *segments]
    kept = [s for s, before in zip(full, ["", *full], strict=False) if (s, before) != ("**", "**")]
    return "".join(_ANY if segment == "**" else _one(segment, text) + _END for segment in kept)


def _one(segment: str, text: str) -> str:
    if segment == "*":
        return "[^.]+"
    if "**" in segment:
        raise RuleError(
            f'Pattern "{text}": `**` stands for whole segments and cannot be a part of "{segment}"; write `*` there, '
            "or give `**` a segment of its own."
        )
    return "".join(_glob(segment, text))


def _glob(segment: str, text: str) -> Iterator[str]:
    at = 0
    while at < len(segment):
        char = segment[at]
        if char == "[":
            end = _closing(segment, at, text)
            yield _char_class(segment[at + 1 : end])
            at = end
        else:
            yield {"*": "[^.]*", "?": "[^.]"}.get(char) or re.escape(char)
        at += 1


def _closing(segment: str, start: int, text: str) -> int:
    # As in a shell, a `]` that comes first belongs to the set.
    first = start + (2 if segment.startswith("!", start + 1) else 1)
    end = segment.find("]", first + 1)
    if end < 0:
        raise RuleError(
            f'Pattern "{text}": "[" in "{segment}" is never closed; write a set of characters as in "w[13]".'
        )
    return end


def _char_class(body: str) -> str:
    negated = body.startswith("!")
    escaped = re.sub(r"([\\\[\]&~|^])", r"\\\1", body[1:] if negated else body)
    return rf"(?!\.)[{'^' if negated else ''}{escaped}]"


def _literal_tail(segments: list[str]) -> str | None:
    return segments[-1] if segments and not _GLOB.search(segments[-1]) else None


def _compiled(text: str, source: str) -> re.Pattern[str]:
    try:
        return re.compile(source, re.DOTALL)
    except re.error as fault:
        raise RuleError(f'Pattern "{text}" is not a valid regular expression: {fault}. Correct it: {_FORMS}.') from None


def exactly(name: str) -> str:
    """Return a pattern that only this name matches, whatever characters it has."""
    return f"{TENSOR_REGEX}{re.escape(name)}" if _GLOB.search(name) else f"^{name}"
