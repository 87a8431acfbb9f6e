"""Stages by name and by balance: what they resolve to on models, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib.errors import RuleError
from shardlib.rules import Balanced
from shardlib.rules.stages import Stage, read_stages, resolve_stages
from shardlib.testing.models import Transformer


def gpt(**settings: Any) -> nn.Module:
    return Transformer(layers=4, **settings)


def modules(stages: Any, model: nn.Module, ranks: int) -> list[str]:
    return [" ".join(stage.modules) for stage in resolve_stages(read_stages(stages), model, ranks)]


def test_names_are_expanded_and_put_in_the_order_of_the_model():
    assert modules("position, embed, blocks.0-1 | blocks.2-3 , head, norm", gpt(), 2) == [
        "embed position blocks.0 blocks.1",
        "blocks.2 blocks.3 norm head",
    ]


def test_a_list_stands_for_its_elements_and_the_outermost_match_counts():
    """`norm` is no norm of a block; `attn` is every block's."""
    assert modules(["embed, position, blocks", "norm, head"], gpt(), 2) == [
        "embed position blocks.0 blocks.1 blocks.2 blocks.3",
        "norm head",
    ]


def test_a_parameter_that_a_stage_reads_itself():
    model = gpt(tied=True, bias=False)
    stages = resolve_stages("embed, position, blocks.0-3 | norm, embed.weight", model, 2)
    assert stages[1] == Stage(("norm",), ("embed.weight",))


def test_balance_by_parameters_and_by_blocks():
    """Of 16 tokens, 8 positions and width 8, a block has 872 parameters, embeddings 192, the head 144."""
    assert modules(Balanced(), gpt(), 2) == ["embed position blocks.0 blocks.1", "blocks.2 blocks.3 norm head"]
    assert modules(Balanced([1, 3]), gpt(), 2) == [
        "embed position blocks.0",
        "blocks.1 blocks.2 blocks.3 norm head",
    ]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=7).filter(any), st.integers(1, 4), st.integers(1, 2))
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[int], ranks: int, per_rank: int):
    count = ranks * per_rank
    assume(len(weights) >= count)
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in weights))
    asked: list[Any] = []

    def weigh(of: nn.Module, names: Sequence[str], by: str) -> list[int]:
        asked.append((of, [*names], by))
        return weights

    stages = resolve_stages(Balanced(by="flops", per_rank=per_rank), model, ranks, weigh)
    assert asked == [(model, list(map(str, range(len(weights)))), "flops")]
    runs = [[int(name) for name in stage.modules] for stage in stages]
    assert len(runs) == count and all(runs) and [i for run in runs for i in run] == list(range(len(weights)))

    def heaviest(ends: Iterable[int]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise((0, *ends, len(weights))))

    least = min(heaviest(ends) for ends in combinations(range(1, len(weights)), count - 1))
    assert max(sum(weights[i] for i in run) for run in runs) == least


class Holder(nn.Module):
    """Parameters beside blocks, at two depths."""

    def __init__(self, *, outer: bool = True) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(2))
        if outer:
            self.first, self.inside = nn.Linear(4, 4), Holder(outer=False)
        else:
            self.act, self.blocks = nn.ReLU(), nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])


def test_parameters_beside_blocks_go_with_the_first_module_beside_them():
    assert resolve_stages(Balanced(), Holder(), 3) == (
        Stage(("first",), ("gain",)),
        Stage(("inside.blocks.0",), ("inside.gain",)),
        Stage(("inside.blocks.2",)),
    )


class Named(nn.Module):
    """An encoder whose embedding has a name beside it too, as in T5, and blocks with common weights."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.shared, self.embed = nn.Embedding(words, 2), nn.Embedding(words, 2)
        self.embed.weight = self.shared.weight
        block = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        for each in self.blocks:
            each.weight, each.bias = block.weight, block.bias


def test_a_name_of_a_neighbours_weight_stays_with_the_neighbour():
    """The weight counts once: 4 words are 8 numbers, beside 4 blocks of 6. Blocks with common weights stand apart."""
    assert modules(Balanced(), Named(100), 2) == ["shared embed", "blocks.0 blocks.1 blocks.2 blocks.3"]
    assert modules(Balanced(), Named(4), 2) == ["shared embed blocks.0", "blocks.1 blocks.2 blocks.3"]
    assert modules(Balanced(), Named(4), 5) == ["shared embed", *(f"blocks.{i}" for i in range(4))]
    ran: list[str] = []

    def weigh(_model: nn.Module, names: Sequence[str], _by: str) -> list[int]:
        ran.extend(names)
        return [9 * (name == "embed") for name in names]

    stages = resolve_stages(Balanced(by="flops"), Named(4), 2, weigh)
    assert stages[0].modules == ("shared", "embed") and ran[:2] == ["shared", "embed"]
    assert "has 5 modules with parameters" in refusal(lambda: resolve_stages(Balanced(), Named(4), 6))


def test_counts_may_leave_a_stage_without_blocks_and_need_no_neighbours():
    lists = nn.ModuleDict({"a": nn.Linear(1, 1), "blocks": nn.ModuleList(nn.Linear(1, 1) for _ in range(3))})
    assert modules(Balanced([0, 3]), lists, 2) == ["a", "blocks.0 blocks.1 blocks.2"]
    assert modules(Balanced([2, 1]), lists, 2) == ["a blocks.0 blocks.1", "blocks.2"]


BALANCED = [
    (Balanced(), "balanced(params)", 'Balanced(by="params")'),
    (Balanced(by="flops"), "balanced(flops)", 'Balanced(by="flops")'),
    (Balanced(per_rank=2), "balanced(params, 2 on each rank)", 'Balanced(by="params", per_rank=2)'),
    (Balanced(by="time", per_rank=3), "balanced(time, 3 on each rank)", 'Balanced(by="time", per_rank=3)'),
    (Balanced([3, 5]), "balanced(3, 5)", "Balanced([3, 5])"),
    (Balanced([0, 4]), "balanced(0, 4)", "Balanced([0, 4])"),
]


@pytest.mark.parametrize(("made", "text", "shown"), BALANCED)
def test_balance_as_text(made: Balanced, text: str, shown: str):
    assert (made.text, repr(made)) == (text, shown)
    assert read_stages(text) == made
    assert read_stages(made) is made and read_stages(None) is None


@pytest.mark.parametrize("text", ["balanced", "Balanced()", " balanced( ) ", "balanced(by=params)"])
def test_balance_by_parameters_may_leave_that_out(text: str):
    assert read_stages(text) == Balanced()


def test_a_stage_holds_its_tensors_and_those_of_its_modules():
    stage = Stage(("blocks.1",), ("scale",))
    names = ["scale", "scales", "blocks.1.weight", "blocks.10.weight", "blocks.1"]
    assert [stage.holds(name) for name in names] == [True, False, True, False, False]


def test_stages_travel_through_files():
    for stages in (
        "embed | head",
        Balanced(),
        Balanced([3, 5]),
        Balanced(by="time", per_rank=2),
    ):
        rules = sl.Rules({"head": None}, stages=stages)
        assert sl.Rules.from_toml(rules.to_toml()) == rules
        assert rules.with_stages(None) == sl.Rules({"head": None})


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(RuleError) as caught:
        make()
    return str(caught.value)


ALL = "embed, position, blocks.0-3 | norm, head"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            "embed, position, blocks.0-3 | norm, heat",
            'stages="embed, position, blocks.0-3 | norm, heat": "heat" matches no module and no parameter of this '
            'Transformer. Did you mean "head"?',
        ),
        (
            "embed, position, blocks.0-3 | norm, head, blocks.3",
            'stages="embed, position, blocks.0-3 | norm, head, blocks.3": "blocks.3" is in stages 0 and 1. Name each '
            "module once.",
        ),
        (
            "embed, position, blocks.0-3 | norm, head, blocks.3.mlp",
            'stages="embed, position, blocks.0-3 | norm, head, blocks.3.mlp": "blocks.3.mlp" is in stages 0 and 1, '
            'since it is in "blocks.3". Name each module once.',
        ),
        (
            "embed, position, blocks.0-3 | head",
            'stages="embed, position, blocks.0-3 | head": the parameter "norm.weight" and 1 more is on no stage. Name '
            "its module, or the parameter itself, on the stage that reads it.",
        ),
        (
            "embed, position, blocks.2-3 | blocks.0-1, norm, head",
            'stages="embed, position, blocks.2-3 | blocks.0-1, norm, head": "blocks.2" runs after "blocks.1", and is '
            "on stage 0, before stage 1. Name the stages in the order in which their modules run.",
        ),
        (
            "embed | position, blocks.0-3 | norm, head",
            'stages="embed | position, blocks.0-3 | norm, head" names 3 stages, and the pipeline axis has 2 ranks, '
            "which cannot share them evenly. Name 2, or a multiple of it for a schedule with several on each.",
        ),
        (
            "embed, position, blocks, norm, head | blocks.0.dropout1",
            'stages="embed, position, blocks, norm, head | blocks.0.dropout1": "blocks.0.dropout1" is in stages 0 and '
            '1, since it is in "blocks.0". Name each module once.',
        ),
        (
            "embed, position, blocks, norm, head | blocks.0.dropout1, blocks.1.dropout1",
            'stages="embed, position, blocks, norm, head | blocks.0.dropout1, blocks.1.dropout1": "blocks.0.dropout1" '
            'is in stages 0 and 1, since it is in "blocks.0". Name each module once.',
        ),
        (
            Balanced(per_rank=5),
            'stages=Balanced(by="params", per_rank=5): this Transformer has 8 modules with parameters that can stand '
            "apart, and 10 stages are wanted. Use fewer ranks, or name the stages: "
            'stages="embed, blocks.0-3 | ...".',
        ),
        (
            Balanced(by="flops"),
            'stages=Balanced(by="flops") weighs modules by running them, and no example was given. Give the batch of '
            'one data rank as example=, to plan or shard_model; or use Balanced(by="params").',
        ),
        (
            Balanced([1, 2]),
            'stages=Balanced([1, 2]) names 3 blocks, and the model has 4 ("blocks.0" to "blocks.3"). Give counts that '
            "add up to these.",
        ),
    ],
)
def test_what_cannot_be(stages: Any, said: str):
    assert refusal(lambda: sl.plan(gpt(), "pp=2", sl.Rules({"**": None}, stages=stages))) == said


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("embed | ", 'stages="embed | ": stage 1 names no module. Name one, or take a bar away.'),
        (
            7,
            "stages was given as 7; give names of modules, with bars between stages, as in "
            '"embed, blocks.0-3 | blocks.4-7, norm, head", or Balanced().',
        ),
        ("blocks.3-1 | head", 'stages: "blocks.3-1" counts backwards from 3; write the smaller one first.'),
    ],
)
def test_what_cannot_be_read(stages: Any, said: str):
    assert refusal(lambda: sl.Rules(stages=stages)) == said


def test_weights_that_are_all_zero_cannot_be_balanced():
    said = refusal(lambda: resolve_stages(Balanced(by="time"), gpt(), 2, lambda *_: [0.0] * 8))
    assert said == (
        'stages=Balanced(by="time"): none of the modules that can stand apart computes anything on the example '
        '(embed, position, blocks.0, ...). Use Balanced(by="params"), or name the stages.'
    )


def test_a_stage_without_parameters_and_a_module_named_twice_on_one():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    assert refusal(lambda: resolve_stages("0, 2 | 1", model, 2)) == (
        'stages="0, 2 | 1": "2" runs after "1", and is on stage 0, before stage 1. Name the stages in the order in '
        "which their modules run."
    )
    named = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ReLU()})
    assert refusal(lambda: resolve_stages("a | b", named, 2)) == (
        'stages="a | b": stage 1 has no parameters, and its ranks would have nothing to train. Join it with a '
        "neighbour."
    )
    inner = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1))})
    assert refusal(lambda: resolve_stages("a, a.0", inner, 1)) == (
        'stages="a, a.0": "a.0" is in stage 0 twice, since it is in "a". Name each module once.'
    )
    assert refusal(lambda: resolve_stages("a", nn.ModuleDict({"a": nn.Linear(1, 1), "c": nn.PReLU()}), 1)) == (
        'stages="a": the parameter "c.weight" is on no stage. Name its module, or the parameter itself, on the stage '
        "that reads it."
    )


def test_a_module_that_is_shared_may_be_named_by_its_other_name():
    shared = nn.Linear(1, 1)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(1, 1), "c": shared})
    assert modules("b, c", model, 1) == ["b c"]


def test_counts_that_are_none():
    for count in (True, 1.0, "2"):
        assert refusal(lambda count=count: Balanced([count])).startswith(f"Balanced was given the count {count!r};")
    for settings in ({"per_rank": 0}, {"per_rank": True}, {"counts": [1], "per_rank": 2}):
        assert refusal(lambda settings=settings: Balanced(**settings)).startswith("Balanced was given per_rank=")
    assert refusal(lambda: Balanced([1], by="time")).startswith("Balanced was given by='time' and counts; give")
    assert refusal(lambda: Balanced([1, -2])) == (
        "Balanced was given the count -2; give numbers of blocks, one for each stage, as in Balanced([3, 5])."
    )
    assert refusal(lambda: Balanced(by="weight")) == (  # type: ignore[arg-type]
        'Balanced was given by=\'weight\'; give "params", "flops" or "time", or say how many blocks: Balanced([3, 5]).'
    )
