"""Repeated blocks are written once, and unfolding what is written gives the names back."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from shardlib._plan.fold import fold

_SEGMENT = st.one_of(st.sampled_from(["blocks", "attn", "w"]), st.integers(0, 12).map(str))
NAMES = st.lists(st.lists(_SEGMENT, min_size=1, max_size=4).map(".".join), unique=True, max_size=30)


def _unfolded(name: str) -> list[str]:
    """Every name that a folded one stands for."""
    parts = [_numbers(segment) for segment in re.split(r"\.(?![^{]*})", name)]
    return [".".join(choice) for choice in itertools.product(*parts)]


def _numbers(segment: str) -> list[str]:
    if not segment.startswith("{"):
        return [segment]
    runs = [run.split("-") for run in segment[1:-1].split(",")]
    return [str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]


@given(NAMES)
def test_folded_names_stand_for_exactly_the_names_that_were_folded(names: list[str]):
    folded = fold(names, name=str, same=lambda _: None)
    unfolded = [name for group in folded for name in _unfolded(group.name)]
    assert sorted(unfolded) == sorted(names)
    assert [group.count for group in folded] == [len(_unfolded(group.name)) for group in folded]


def test_names_are_folded_where_the_items_are_alike_and_the_numbers_make_all_combinations():
    names = [f"layers.{i}.experts.{j}.w" for i in (0, 1, 3) for j in (0, 1)] + ["layers.7.experts.0.w", "norm"]
    folded = fold(names, name=str, same=lambda _: None)
    assert [group.title for group in folded] == [
        "layers.0.experts.{0-1}.w x2",
        "layers.1.experts.{0-1}.w x2",
        "layers.3.experts.{0-1}.w x2",
        "layers.7.experts.0.w",
        "norm",
    ]
    assert [g.title for g in fold(names[:6], name=str, same=lambda _: None)] == ["layers.{0-1,3}.experts.{0-1}.w x6"]


def test_items_that_differ_are_kept_apart():
    items = [("b.0.w", "x"), ("b.1.w", "y"), ("b.2.w", "x")]
    folded = fold(items, name=lambda item: item[0], same=lambda item: item[1])
    assert [group.title for group in folded] == ["b.{0,2}.w x2", "b.1.w"]
