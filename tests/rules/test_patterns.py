"""The pattern language against a slow reference, its corner cases, and its errors word for word."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.errors import RuleError
from shardlib.rules.patterns import NameIndex, compile_pattern

SEGMENTS = st.sampled_from(["a", "b", "ab", "w1", "w2", "0", "12", "attn", "q-k"])
GLOBS = st.sampled_from(["*", "a*", "*b", "?", "w?", "w[12]", "w[!1]", "[!a]*", "*t*", "[0-9]", "[]a]", "**"])
NAMES = st.lists(SEGMENTS, min_size=0, max_size=5).map(".".join)
PATTERNS = st.builds(
    lambda anchor, parts: anchor + ".".join(parts),
    st.sampled_from(["", "^"]),
    st.lists(SEGMENTS | GLOBS, min_size=1, max_size=4),
)


def reference(pattern: str, name: str) -> bool:
    """The definition, one segment at a time."""
    segments = name.split(".") if name else []
    if not pattern.startswith("^"):
        pattern = "**." + pattern
    return _walk(pattern.removeprefix("^").split("."), segments)


def _walk(pattern: list[str], segments: list[str]) -> bool:
    if not pattern:
        return not segments
    if pattern[0] == "**":
        return any(_walk(pattern[1:], segments[skip:]) for skip in range(len(segments) + 1))
    return bool(segments) and fnmatch.fnmatchcase(segments[0], pattern[0]) and _walk(pattern[1:], segments[1:])


@given(PATTERNS, NAMES)
def test_agrees_with_the_definition(pattern: str, name: str) -> None:
    assert compile_pattern(pattern).matches(name) == reference(pattern, name)


@given(PATTERNS, st.lists(NAMES, max_size=8, unique=True))
def test_an_index_selects_what_matches_in_order(pattern: str, names: list[str]) -> None:
    compiled = compile_pattern(pattern)
    assert NameIndex(names).select(compiled) == [name for name in names if compiled.matches(name)]


@given(NAMES.filter(bool), st.integers(0, 5))
def test_every_ending_of_a_name_finds_it(name: str, drop: int) -> None:
    segments = name.split(".")
    ending = ".".join(segments[min(drop, len(segments) - 1) :])
    assert compile_pattern(ending).matches(name)
    assert compile_pattern("^" + ending).matches(name) == (ending == name)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("attn.qkv", "blocks.7.attn.qkv", True),
        ("attn.qkv", "blocks.7.xattn.qkv", False),
        ("attn.qkv", "blocks.7.attn.qkv.weight", False),
        ("blocks.*.up", "blocks.1.mlp.up", False),
        ("blocks.**.up", "blocks.1.mlp.up", True),
        ("blocks.**.up", "blocks.up", True),
        ("**", "", True),
        ("^", "", True),
        ("^", "a", False),
        ("*", "", False),
        ("re:blocks\\.[0-3]\\.up", "blocks.2.up", True),
        ("re:up", "blocks.2.up", False),
    ],
)
def test_cases(pattern: str, name: str, matches: bool) -> None:
    assert compile_pattern(pattern).matches(name) is matches


FORMS = (
    "`*` stands for one segment (or part of one), `**` for any number of whole segments, `?` and `[...]` for one "
    'character; a pattern matches at the end of a name, "^" in front anchors it at the root, "re:" in front makes it '
    'a regular expression for the whole name, "tensor re:" one that never names a module'
)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", f'A pattern is empty. Name a module, a parameter, or an activation: {FORMS}; "^" alone is the root.'),
        ("a..b", f'Pattern "a..b" has an empty segment; write names as in "blocks.*.attn.qkv": {FORMS}.'),
        (
            "a.x**",
            'Pattern "a.x**": `**` stands for whole segments and cannot be a part of "x**"; write `*` there, or give '
            "`**` a segment of its own.",
        ),
        (
            "a.w[13",
            'Pattern "a.w[13": "[" in "w[13" is never closed; write a set of characters as in "w[13]".',
        ),
        (
            "re:a(",
            'Pattern "re:a(" is not a valid regular expression: missing ), unterminated subpattern at position 1. '
            f"Correct it: {FORMS}.",
        ),
    ],
)
def test_errors(pattern: str, message: str) -> None:
    with pytest.raises(RuleError) as caught:
        compile_pattern(pattern)
    assert str(caught.value) == message
