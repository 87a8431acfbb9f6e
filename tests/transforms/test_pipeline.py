"""Schedules and capacities: settings of the step that need stages, or experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import PlanError


def _staged(ranks: int = 2, per_rank: int = 1) -> sl.Plan:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    return sl.plan(model, f"pp={ranks}", sl.Rules({"**": None}, stages=sl.rules.Balanced(per_rank=per_rank)))


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 6, 5))

    def forward(self, tokens: Any, numbers: Any, weights: Any) -> Any: ...


def _spread(mesh: str = "dp=2,ep=2") -> sl.Plan:
    return sl.plan(nn.ModuleDict({"experts": _Experts()}), mesh, {"experts.up": "expert@ep ff embed"})


def test_a_pipeline_says_its_schedule_and_microbatches():
    for given, kept in [
        (sl.pipeline(), ("1f1b", 0)),
        (sl.pipeline("gpipe"), ("gpipe", 0)),
        (sl.pipeline("1f1b", 1), ("1f1b", 1)),
        (sl.pipeline(microbatches=3), ("1f1b", 3)),
    ]:
        step = (_staged() | given).step
        assert (step.schedule, step.microbatches) == kept
        assert sl.transforms.parse(repr(given)) == given
    assert (_staged(per_rank=2) | sl.pipeline()).step.schedule == "interleaved"
    assert (_staged() | sl.pipeline("gpipe", 4) | sl.pipeline("gpipe", 4)).step.microbatches == 4


def test_a_capacity_is_kept():
    for factor in (1, 0.5, 1.25):
        made = _spread() | sl.expert_capacity(factor)
        assert made.step.capacity_factor == factor and made == (made | sl.expert_capacity(factor)).replace(
            transforms=made.transforms
        )
    assert repr(sl.expert_capacity(2)) == "expert_capacity(2.0)"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sl.pipeline("gpip"), '"gpip" is not a schedule; the schedules are "gpipe", "1f1b", "interleaved",'),
        *(
            (lambda n=n: sl.pipeline("1f1b", n), f"pipeline(microbatches={n!r}): give a number of microbatches, from 1")
            for n in (-1, 2.0, True)
        ),
        (
            lambda: sl.plan(nn.Linear(4, 4), "dp=2", {"**": None}) | sl.pipeline("1f1b"),
            'pipeline("1f1b"): the plan has no stages. Name them in the rules, as in Rules(..., stages=Balanced()), '
            'and give the mesh a pipeline axis of two ranks at least; it is "dp=2".',
        ),
        (
            lambda: _staged() | sl.pipeline("zbv"),
            'The schedule "zbv" runs 2 stages on each of 2 ranks, and there are 2 stages. Split the model into 4 '
            "stages.",
        ),
        (lambda: _staged(per_rank=2) | sl.pipeline("interleaved", 5), "Choose another number of microbatches"),
        (
            lambda: _staged() | sl.pipeline("gpipe") | sl.pipeline("1f1b"),
            'pipeline("1f1b"): the plan was made with pipeline("gpipe"), which has other arguments. Choose one of '
            "the two.",
        ),
        *(
            (
                lambda factor=factor: sl.expert_capacity(factor),
                f"expert_capacity({factor!r}): give a positive number, such as 1.25; to drop nothing leave it out.",
            )
            for factor in (0, -1, True, "2", float("nan"))
        ),
        (
            lambda: _spread("dp=2,ep=1") | sl.expert_capacity(2),
            'expert_capacity(2.0): no experts are sharded over an expert axis of mesh "dp=2,ep=1", and a capacity '
            "limits the tokens that are sent to experts. Give the mesh an axis ep, and a rule such as "
            '"expert@ep out in".',
        ),
        (
            lambda: _spread() | sl.expert_capacity(2) | sl.expert_capacity(3),
            "expert_capacity(3.0): the plan has expert_capacity(2.0) already; choose one of them.",
        ),
    ],
)
def test_what_no_stages_or_experts_can_follow_is_refused(make: Any, said: str):
    with pytest.raises(PlanError) as raised:
        make()
    assert said in str(raised.value)
