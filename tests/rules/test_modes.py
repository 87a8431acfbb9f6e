"""Modes of rules: more rules, chosen by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardlib import layouts
from shardlib.errors import RuleError
from shardlib.rules import Rules

FILE = """
[axes]
ff = "tp"

[params]
up = "ff"
down = "rowwise"

[modes.split.axes]
seq = ["tp", "sp?"]

[modes.split.sizes]
seq = 6

[modes.split.activations]
"down.output" = "batch seq embed"

[modes.whole]
optional = ["norm"]

[modes.whole.params]
up = "replicate"
down = "replicate"
norm = "replicate"
"""


def model() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})


def test_a_mode_adds_to_the_rules_and_wins():
    rules = Rules.from_toml(FILE)
    assert rules.modes.keys() == {"split", "whole"} and "down.output" not in rules.activations
    assert Rules.from_toml(rules.to_toml()) == rules
    split, whole = rules.mode("split"), rules.mode("whole")
    assert rules.mode() == rules and not split.modes
    assert str(split.resolve(model(), "tp=2").tensors["up.weight"].layout) == "ff@tp in"
    assert not whole.resolve(model(), "tp=2").tensors["up.weight"].layout.axes
    both = rules.mode("split", "whole").resolve(model(), "tp=2")
    assert str(both.borders["down", "output"].layout) == "batch seq@tp embed"


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ("tp=2,sp=3", "batch seq@(tp,sp) embed"),
        ("tp=2,sp=2", "batch seq@tp embed"),
        ("sp=2", "batch seq@sp embed"),
        ("dp=2", "batch seq embed"),
    ],
)
def test_what_may_be_split_is_split_over_the_axes_that_divide_it(mesh: str, layout: str):
    found = Rules.from_toml(FILE).mode("split").resolve(model(), mesh).borders["down", "output"]
    assert str(found.layout) == layout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"a": {"params": {}}}, 'Mode "a" has the key "params"; a mode has rules, activations, axes, sizes, optional.'),
        ({"a": {"axes": {"ff": "sp"}}}, 'Mode "a": axes names "ff", which no layout of these rules mentions'),
        ({"a": {"activations": {"up": "b s"}}}, 'Mode "a": Rule "up": "b s" is in activations and does not name'),
        ({"a": ["up"]}, 'mode "a" was given as list'),
        (["a"], "modes was given as list"),
        ({"a": {"activations": {"up.output": "b s"}, "axes": {"s": "sp?"}}}, None),
    ],
)
def test_what_is_refused(given: Any, said: str | None):
    if said is not None:
        with pytest.raises(RuleError) as caught:
            Rules({"up": "colwise"}, modes=given)
        assert str(caught.value).startswith(said)
        return
    rules = Rules({"up": "colwise", "down": None}, modes=given).mode("a")
    with pytest.raises(RuleError, match=r'whether "s" is sharded cannot be decided .* sizes=\{"s": 8\}'):
        rules.resolve(model(), "sp=2")


def test_a_mode_that_is_not_there_is_named():
    with pytest.raises(RuleError, match=r'"split" was asked for as a mode of .*; they have none'):
        Rules({"up": "colwise"}).mode("split")
    with pytest.raises(RuleError, match="they have 'sequence', 'ulysses', 'ring', 'grid'"):
        layouts.load("gpt2", mode="spiral")
    with pytest.raises(RuleError, match="is not a section of a mode"):
        Rules.from_toml('[params]\nup = "colwise"\n[modes.a.parms]\nx = "colwise"')
