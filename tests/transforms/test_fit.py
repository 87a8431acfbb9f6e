"""`fit_memory` moves what a budget asks for, and little more."""

from __future__ import annotations

import dataclasses

import pytest
import torch
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
    memory = plan.memory()
    return memory.device + memory.buckets


HELD = {name: _held(plan) for name, plan in PLANS.items()}


def _on_host(plan: sl.Plan) -> list[tuple[str, str]]:
    return [(row.name, phase) for row in plan.rows for phase, layout in row.layouts.items() if layout.memory == "host"]


@given(name=st.sampled_from(sorted(PLANS)), share=st.floats(0.05, 1.2))
def test_what_fits_fits_with_as_little_as_can_be(name: str, share: float):
    plan = PLANS[name]
    budget = int(share * HELD[name])
    try:
        fitted = plan | sl.fit_memory(budget)
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
    assert _on_host(plan | sl.fit_memory(120_000, state_tensors=1)) == []
    assert _on_host(plan | sl.fit_memory(120_000)) == [("weight", "state")]


def _four() -> sl.Plan:
    """Tensors whose state takes 400, 240, 160 and 160 bytes, of 1920 in all."""
    sizes = {"a": 50, "b": 30, "c": 20, "d": 20}
    model = nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
    return sl.plan(model, "dp=1", {"**": None})


@pytest.mark.parametrize(
    ("over", "gone"),
    [
        (0, ""),
        (1, "c"),
        (160, "c"),
        (161, "b"),
        (240, "b"),
        (241, "a"),
        (400, "a"),
        (401, "ac"),
        (561, "ab"),
        (960, "abcd"),
    ],
)
def test_state_goes_largest_first_and_last_the_smallest_that_makes_up_what_is_left(over: int, gone: str):
    made = _four() | sl.fit_memory(1920 - over)
    assert _on_host(made) == [(name, "state") for name in gone]
    moved = sum({"a": 400, "b": 240, "c": 160, "d": 160}[name] for name in gone)
    assert made.notes == ((f"fit_memory({1920 - over}) moved {moved} B of each rank to host memory.",) if gone else ())


def test_stored_parts_follow_when_all_state_has_gone():
    plan = _four().map_rows(lambda row: row)
    with pytest.raises(PlanError):  # what is not stored in parts stays
        _ = plan | sl.fit_memory(959)
    parted = sl.plan(nn.Linear(16, 16, bias=False), "dp=2", {"**": None}) | sl.zero(3)
    memory = parted.memory()  # halves of 1 KiB: stored 512, gradient 512, state 1024
    assert (memory.device, _on_host(parted | sl.fit_memory(1024 + memory.buckets))) == (2048, [("weight", "state")])
    made = parted | sl.fit_memory(1023 + memory.buckets)
    assert _on_host(made) == [("weight", phase) for phase in ("stored", "grad", "state")]
    assert made.notes[-1] == f"fit_memory({1023 + memory.buckets}) moved 2.00 KiB of each rank to host memory."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7", 7),
        (" 40 GB ", 40 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("2kb", 2000),
        ("2KiB", 2048),
        ("3mb", 3 * 10**6),
        ("3MiB", 3 * 2**20),
        ("1TB", 10**12),
        ("1tib", 2**40),
        (1e3, 1000),
    ],
)
def test_budgets_are_read(text: str | float, count: int):
    assert sl.fit_memory(text) == sl.fit_memory(count)


@pytest.mark.parametrize("budget", [0, -1, "much", "3 XB", "1.2.3", "GB", "0", True, None, float("inf"), float("nan")])
def test_what_is_no_budget_is_refused(budget):
    with pytest.raises(PlanError) as raised:
        sl.fit_memory(budget)
    assert str(raised.value) == f'fit_memory({budget!r}): give bytes of device memory, such as "40GB", "40GiB" or 40e9.'


def test_what_cannot_fit_is_refused():
    plan = sl.plan(nn.Linear(100, 100, bias=False), "dp=1", {"**": None})
    with pytest.raises(PlanError) as raised:
        _ = plan | sl.fit_memory(50_000)
    assert str(raised.value) == (
        "fit_memory(50000): with everything offloaded that can be, a rank's device still holds 78.1 KiB. Divide more, "
        "with zero(3) or over more ranks, or give a larger budget."
    )


def test_it_reads_as_it_is_written():
    assert sl.transforms.parse('zero(3) | fit_memory("1GiB")') == sl.zero(3) | sl.fit_memory(2**30)
    assert repr(sl.fit_memory("1GB", state_tensors=1)) == "fit_memory(1000000000, state_tensors=1)"
