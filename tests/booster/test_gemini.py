"""`GeminiPlugin(placement_policy="auto")`: as little goes to host memory as a budget asks for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import shardlib as sl
from shardlib.booster import GeminiPlugin
from shardlib.errors import PlanError


def _plan(model: nn.Module, plugin: GeminiPlugin) -> sl.Plan:
    return sl.plan(model, "dp=4", plugin.rules(model), transforms=plugin.transforms(model))


def test_auto_keeps_to_its_budget_and_takes_no_more_than_a_fraction_would():
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(8)))
    whole = _plan(model, GeminiPlugin(precision="bf16")).memory()
    budget = whole.device + whole.buckets
    auto = _plan(model, GeminiPlugin(precision="bf16", placement_policy="auto", memory_budget=budget)).memory()
    assert auto.device + auto.buckets <= 0.9 * budget
    fractions = (share / 10 for share in range(11))
    static = (_plan(model, GeminiPlugin(precision="bf16", offload_optim_frac=share)).memory() for share in fractions)
    fitting = [memory.host for memory in static if memory.device + memory.buckets <= 0.9 * budget]
    assert fitting and auto.host <= min(fitting)


def test_the_share_of_the_budget_is_said():
    plugin = GeminiPlugin(placement_policy="auto", memory_budget=1e9, steady_cuda_cap_ratio=0.5)
    assert plugin.transforms(nn.Linear(2, 2))[-1] == sl.fit_memory(0.5e9)
    # One memory, and nothing said of it: nothing goes.
    assert len(GeminiPlugin(placement_policy="auto", precision="fp32").transforms(nn.Linear(2, 2))) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"memory_budget": 1e9},
            'GeminiPlugin(memory_budget=1000000000.0): a budget is what placement_policy="auto" keeps to; "static" '
            "keeps to fractions.",
        ),
        (
            {"placement_policy": "auto", "offload_optim_frac": 1.0},
            "GeminiPlugin(placement_policy='auto', offload_optim_frac=1.0): \"auto\" chooses what is offloaded; give "
            'fractions with placement_policy="static".',
        ),
        (
            {"placement_policy": "auto", "steady_cuda_cap_ratio": 1.5},
            "GeminiPlugin(placement_policy='auto', steady_cuda_cap_ratio=1.5): steady_cuda_cap_ratio is a fraction of "
            "the budget, above 0 and up to 1.",
        ),
    ],
)
def test_budgets_that_say_nothing_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(PlanError) as raised:
        GeminiPlugin(**given).transforms(nn.Linear(2, 2))
    assert str(raised.value) == said
