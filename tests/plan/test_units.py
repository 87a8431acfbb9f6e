"""Which modules are gathered together."""

from __future__ import annotations

import pytest
from torch import nn

from shardlib._plan import Plan, plan
from shardlib._plan.units import find_units
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
def test_units_are_the_elements_of_the_outermost_lists(model: nn.Module, units: tuple[str, ...]):
    assert find_units(model) == units


def test_a_plan_finds_the_unit_of_a_row():
    made = gpt_plan(tied=False)
    assert made.units == tuple(f"blocks.{i}" for i in range(4))
    assert made.unit(made["blocks.3.mlp.up.weight"]) == "blocks.3"
    assert made.unit(made["embed.weight"]) == ""


def test_what_is_shared_with_the_outside_belongs_to_the_root_unit():
    made = plan(Shared(), "dp=2", {"**.weight": None, "**.bias": None})
    assert made.units == ("blocks.0", "blocks.1")
    assert made.unit(made["blocks.0.weight"]) == "blocks.0"
    assert made.unit(made["last.weight"]) == ""


def test_what_several_units_share_belongs_to_the_root_unit():
    model = _list(_linear(), _linear())
    model[1].weight = model[0].weight
    made = plan(model, "dp=2", {"**.weight": None, "**.bias": None})
    assert [made.unit(row) for row in made.rows] == ["", "0", "1"]


def test_units_are_kept_and_compared():
    made = gpt_plan()
    assert Plan.from_json(made.to_json()).units == made.units
    assert gpt_plan(n_layer=2).diff(made).splitlines()[0] == "~ units: blocks.{0-1} x2 -> blocks.{0-3} x4"
