"""Which modules are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardlib._plan import Plan, make_plan
from shardlib._plan.units import find_repeated, find_units
from tests.plan.cases import gpt_plan


def _list(*modules: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(modules)


def _linear() -> nn.Linear:
    return nn.Linear(2, 2)


class Shared(nn.Module):
    """Two blocks, one of which stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = _linear()
        self.blocks = _list(_linear(), _linear())
        self.last = self.blocks[1]


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (_linear(), ()),
        (nn.Sequential(_linear(), _linear()), ()),
        (_list(_linear(), _linear()), ("0", "1")),
        (nn.ModuleDict({"one": _list(_linear())}), ()),
        (nn.ModuleDict({"h": _list(_linear(), nn.ReLU(), _linear())}), ("h.0", "h.2")),
        (nn.ModuleDict({"acts": _list(nn.ReLU(), nn.ReLU())}), ()),
        (nn.ModuleDict({"enc": _list(_linear(), _linear()), "dec": _list(_linear(), _linear())}),
         ("enc.0", "enc.1", "dec.0", "dec.1")),
        # A list inside of a block belongs to the block; one inside of an only block does not.
        (_list(_list(_linear(), _linear()), _linear()), ("0", "1")),
        (_list(_list(_linear(), _linear())), ("0.0", "0.1")),
    ],
)  # fmt: skip
def test_repeated_blocks_are_the_elements_of_the_outermost_lists(model: nn.Module, units: tuple[str, ...]):
    assert find_repeated(model) == units


class Parts(nn.Module):
    """A parameter of its own beside layers, one of which has parts with parameters, and two tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.head = _linear()
        self.attention = nn.MultiheadAttention(2, 1)
        self.blocks = _list(nn.Sequential(_linear(), _linear()), nn.Sequential(_linear(), _linear()))
        self.norm = nn.LayerNorm(2)
        self.one, self.other = nn.Linear(2, 2, bias=False), _linear()
        self.one.weight = self.other.weight


def test_units_are_the_blocks_and_layers_outside_of_them():
    """Of two layers that share a weight, the one that has a bias besides is a unit: of the bias."""
    assert find_units(Parts()) == ("head", "attention.out_proj", "blocks.0", "blocks.1", "norm", "other")
    made = make_plan(Parts(), "dp=2", {"**": "replicate"})
    assert {row.name for row in made.rows if made.unit(row) == ""} == {
        "scale",
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "one.weight",
    }


def test_a_model_that_is_one_layer_has_no_unit():
    assert find_units(_linear()) == ()


def test_a_plan_finds_the_unit_of_a_row():
    made = gpt_plan(tied=False)
    assert made.repeated == tuple(f"blocks.{i}" for i in range(4))
    assert made.units == ("embed", "position", *made.repeated, "norm", "head")
    assert made.unit(made["blocks.3.mlp.up.weight"]) == "blocks.3"
    assert made.unit(made["embed.weight"]) == "embed"


def test_what_is_shared_with_the_outside_belongs_to_the_root_unit():
    made = make_plan(Shared(), "dp=2", {"**.weight": None, "**.bias": None})
    assert made.units == ("first", "blocks.0", "blocks.1")
    assert made.unit(made["blocks.0.weight"]) == "blocks.0"
    assert made.unit(made["last.weight"]) == ""


def test_what_several_units_share_belongs_to_the_root_unit():
    model = _list(_linear(), _linear())
    model[1].weight = model[0].weight
    made = make_plan(model, "dp=2", {"**.weight": None, "**.bias": None})
    assert [made.unit(row) for row in made.rows] == ["", "0", "1"]


def test_units_are_kept_and_compared():
    made = gpt_plan()
    read = Plan.from_json(made.to_json())
    assert (read.units, read.repeated) == (made.units, made.repeated)
    assert (
        gpt_plan(n_layer=2).diff(made).splitlines()[0]
        == "~ units: position and blocks.{0-1} x2 and norm -> position and blocks.{0-3} x4 and norm"
    )
