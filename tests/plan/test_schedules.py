"""Schedules: every action once, nothing waits for ever, and the bubbles that their authors give."""

from __future__ import annotations

from itertools import product

import pytest

import shardlib as sl
from shardlib._plan.schedules import (
    SCHEDULES,
    Action,
    bubble,
    in_flight,
    order,
    rank_of_stage,
    splits_backward,
    timeline,
)
from shardlib.errors import PlanError
from shardlib.testing.models import Transformer

CASES = [
    (name, ranks, ranks * chunks, microbatches)
    for name, ranks, microbatches in product(SCHEDULES, (1, 2, 3, 4), (1, 2, 3, 4, 8, 12))
    for chunks in ({"gpipe": (1,), "1f1b": (1,), "zbv": (2,)}.get(name, (2, 3)))
]


@pytest.mark.parametrize(("name", "ranks", "stages", "microbatches"), CASES)
def test_every_action_is_done_once_by_the_rank_that_has_the_stage(
    name: str, ranks: int, stages: int, microbatches: int
):
    try:
        actions = order(name, ranks, stages, microbatches)
    except PlanError as error:
        assert "multiple" in str(error) and "interleaved" in name
        return
    for rank, mine in enumerate(actions):
        own = [s for s in range(stages) if rank_of_stage(name, ranks, s) == rank]
        done = {(a.kind if a.kind != "B" else half, a.stage, a.microbatch) for a in mine for half in ("I", "W")}
        assert done == {(kind, s, m) for kind, s, m in product("FIW", own, range(microbatches))}
        assert len(mine) == len(set(mine))
    timeline(actions)  # and it ends


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 8), (4, 16)])
def test_bubbles_are_those_of_the_papers(p: int, m: int):
    """Narayanan et al. 2021, section 2.2: (p-1)/m of the ideal time, which is (p-1)/(m+p-1) of the whole; with v stages
    on a rank, v times less."""
    for name in ("gpipe", "1f1b"):
        assert bubble(timeline(order(name, p, p, m))) == pytest.approx((p - 1) / (m + p - 1))
    for v in (2, 4):
        idle = (p - 1) / v
        assert bubble(timeline(order("interleaved", p, p * v, m))) == pytest.approx(idle / (m + idle))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_zero_bubble_is_less_idle(p: int, m: int):
    """Qi et al. 2023: where 1F1B is idle for (p-1)(F+B+W), ZB-H1 is for (p-1)(F+B-W): with unit costs, for a third.
    With v stages on a rank each of these is v times shorter, and ZB-V has two."""
    for name, v in (("interleaved-zb", 1), ("interleaved-zb", 2), ("zbv", 2)):
        assert bubble(timeline(order(name, p, v * p, m))) == pytest.approx((p - 1) / (3 * v * m + p - 1))


def test_what_is_in_flight():
    """GPipe holds all microbatches, 1F1B as many as stages follow, ZB-V what 1F1B's first rank does, on every rank."""
    assert [in_flight(rank) for rank in order("gpipe", 4, 4, 8)] == [8, 8, 8, 8]
    assert [in_flight(rank) for rank in order("1f1b", 4, 4, 8)] == [4, 3, 2, 1]
    assert [in_flight(rank) for rank in order("zbv", 4, 8, 8)] == [8, 8, 8, 8]  # half a stage each


def test_orders_that_wait_for_each_other_are_refused():
    forever = [[Action("F", 0, 0), Action("B", 0, 0)], [Action("B", 1, 0), Action("F", 1, 0)]]
    with pytest.raises(PlanError, match=r"0B0, 1B0 wait for each other"):
        timeline(forever)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: order("gpip", 2, 2, 2),
            '"gpip" is not a schedule; the schedules are "gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv". Did '
            "you mean "
            '"gpipe"?',
        ),
        (
            lambda: order("1f1b", 2, 4, 2),
            'The schedule "1f1b" runs 1 stage on each of 2 ranks, and there are 4 stages. Use "interleaved", or split '
            "the model into 2 stages.",
        ),
        (
            lambda: order("zbv", 2, 2, 2),
            'The schedule "zbv" runs 2 stages on each of 2 ranks, and there are 2 stages. Split the model into 4 '
            "stages.",
        ),
        (lambda: order("1f1b", 2, 2, 0), "A pipeline was given 0 microbatches; give one at least."),
    ],
)
def test_what_has_no_order(call, said):
    with pytest.raises(PlanError) as caught:
        call()
    assert str(caught.value) == said


def test_the_plan_shows_stages_and_time():
    rules = sl.Rules({"**": None}, stages=sl.rules.Balanced())
    plan = sl.plan(Transformer(layers=4), "pp=2,dp=2", rules, transforms=[sl.pipeline("1f1b", 3)])
    text = str(plan)
    assert "2 stages on 2 ranks by 1f1b, 3 microbatches: ranks stand idle for 25.0% of a step" in text
    assert " 1       1      blocks.{2-3} x2, norm, head        1.90 k       7.44 KiB   1" in text
    assert plan.timeline().splitlines() == [
        "rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .",
    ]
    assert sl.Plan.from_json(plan.to_json()) == plan
    assert "<svg" in plan._repr_html_() and "backward of microbatch 2 on stage 1" in plan._repr_html_()
    assert splits_backward("zbv") and not splits_backward("1f1b")
