"""Stages by name and by balance: what they resolve to on models, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import shardlib as sl
from shardlib.errors import RuleError
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
    assert modules(sl.Balanced(), gpt(), 2) == ["embed position blocks.0 blocks.1", "blocks.2 blocks.3 norm head"]
    assert modules(sl.Balanced([1, 3]), gpt(), 2) == ["embed position blocks.0", "blocks.1 blocks.2 blocks.3 norm head"]


def test_stages_travel_through_files():
    for stages in ("embed | head", sl.Balanced(), sl.Balanced([3, 5])):
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
            sl.Balanced([1, 2]),
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


def test_counts_that_are_none():
    assert refusal(lambda: sl.Balanced([1, -2])) == (
        "Balanced was given the count -2; give numbers of blocks, one for each stage, as in Balanced([3, 5])."
    )
    assert refusal(lambda: sl.Balanced(by="weight")) == (  # type: ignore[arg-type]
        'Balanced was given by=\'weight\'; give "params", "flops" or "time", or say how many blocks: Balanced([3, 5]).'
    )
