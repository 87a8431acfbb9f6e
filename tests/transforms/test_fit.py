"""`fit` moves what a budget asks for, and little more."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib._plan import Row
from shardlib.errors import PlanError
from shardlib.testing.models import Transformer, rules_for

PLANS = {
    name: sl.plan(Transformer(vocab=67, heads=4, head=16, layers=3), mesh, rules_for(Transformer())) | transforms
    for name, mesh, transforms in [
        ("stage 2", "dp=4", sl.zero(2)),
        ("stage 3", "dp=4", sl.zero(3)),
        ("mixed", "dp=2,tp=2", sl.zero(3) | sl.precision("bf16")),
    ]
}


def _held(plan: sl.Plan) -> int:
    return plan.memory().device + plan.memory().buckets


def _on_host(plan: sl.Plan) -> list[tuple[str, str]]:
    return [(row.name, phase) for row in plan.rows for phase, layout in row.layouts.items() if layout.memory == "host"]


@given(name=st.sampled_from(sorted(PLANS)), share=st.floats(0.05, 1.2))
def test_what_fits_fits_with_as_little_as_can_be(name: str, share: float):
    plan = PLANS[name]
    budget = int(share * _held(plan))
    try:
        fitted = plan | sl.fit(budget)
    except PlanError:
        everything = plan | sl.offload("state") if name == "stage 2" else plan | sl.offload("all")
        assert _held(everything) > budget
        return
    assert _held(fitted) <= budget
    if share >= 1:
        assert fitted.rows == plan.rows
    phases = {phase for _, phase in _on_host(fitted)}
    if phases == {"state"}:  # not one of these could have stayed
        assert all(_held(_with_state_on_device(fitted, name)) > budget for name, _ in _on_host(fitted))
    elif phases:  # all state goes before the first stored part does
        assert [row for row in fitted.rows if row.state is not None and row.state.memory != "host"] == []


def _with_state_on_device(plan: sl.Plan, name: str) -> sl.Plan:
    def back(row: Row) -> Row:
        return row.replace(state=dataclasses.replace(row.state, memory="device")) if row.name == name else row

    return plan.map_rows(back)


def test_state_of_other_optimizers_counts():
    plan = sl.plan(nn.Linear(100, 100, bias=False), "dp=1", {"**": None}) | sl.replicate()
    assert _on_host(plan | sl.fit(120_000, state_tensors=1)) == []
    assert _on_host(plan | sl.fit(120_000)) == [("weight", "state")]


def test_the_plan_tells_what_went():
    plan = sl.plan(nn.Linear(100, 100, bias=False), "dp=1", {"**": None}) | sl.fit("0.1 MB")
    assert "fit(100000) moved 78.1 KiB of each rank to host memory." in plan.notes
    assert "fit(100000)" in str(plan)


@pytest.mark.parametrize("budget", [0, -1, "much", "3 XB", True, None, float("inf"), float("nan")])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(PlanError) as raised:
        sl.fit(budget)
    assert str(raised.value) == f'fit({budget!r}): give bytes of device memory, such as "40GB", "40GiB" or 40e9.'


def test_what_cannot_fit_is_refused():
    plan = sl.plan(nn.Linear(100, 100, bias=False), "dp=1", {"**": None})
    with pytest.raises(PlanError) as raised:
        _ = plan | sl.fit(50_000)
    assert str(raised.value) == (
        "fit(50000): with all in host memory that may lie there, a rank's device still holds 78.1 KiB. Divide more, "
        "with zero(3) or over more ranks, or give a larger budget."
    )


def test_it_reads_as_it_is_written():
    assert sl.transforms.parse('zero(3) | fit("1GiB")') == sl.zero(3) | sl.fit(2**30)
    assert repr(sl.fit("1GB", state_tensors=1)) == "fit(1000000000, state_tensors=1)"
