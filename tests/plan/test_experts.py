"""Rules that spread experts: what the plan says of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.errors import PlanError
from tests.engine.mixture import Experts, Model

_SPREAD = {"experts.up": "expert@ep ff embed", "experts.down": "expert@ep embed ff"}


def _plan(mesh: str = "dp=2,ep=2", changed: dict[str, Any] | None = None, model: nn.Module | None = None, **to: Any):
    rules = sl.Rules({**_SPREAD, **(changed or {})}, unmatched="replicate")
    return sl.plan(Model() if model is None else model, mesh, rules, **to)


def test_experts_are_split_in_every_phase_and_all_else_as_over_data_axes():
    made = _plan(transforms=[sl.zero(3)])
    up, router = made["layers.0.1.experts.up"], made["layers.0.1.router.weight"]
    assert str(up.compute) == "expert@ep ff embed" and up.added("stored") == {"dp"}
    assert router.compute.axes == frozenset() and router.stored.axes == {"dp", "ep"}
    assert up.note == "expert-parallel (dim 0); uneven"


def test_traffic_counts_gradients_of_experts_over_the_other_data_axes():
    sums = {each.axes: each.bytes for each in _plan().traffic() if each.what == "gradients"}
    experts = 2 * 2 * 5 * 10 * 6 * 4  # bytes of up and down of two layers
    assert sums[("dp",)] == experts / 2  # of what a rank has on average, on two ranks
    assert set(sums) == {("dp",), ("dp", "ep")}


def test_memory_is_that_of_a_rank_s_experts():
    model = nn.ModuleDict({"experts": Experts(experts=4)})
    assert _plan("ep=4", model=model).memory().parameters == 2 * 10 * 6 * 4


def test_notes_say_what_is_sent_for_tokens():
    note = 'Over "ep" forward sends tokens to the ranks of their experts and results back, and backward sends their '
    note += "gradients: {count} sends a token once to each other rank that has experts of it, which are at most "
    note += "{others}, and no more than the experts that the token chooses."
    assert _plan().notes == (note.format(count="each of the 2 modules of experts", others="1 rank"),)
    one = nn.ModuleDict({"experts": Experts(experts=4)})
    assert _plan("ep=4", model=one).notes == (note.format(count="the module of experts", others="3 ranks"),)
    assert _plan("dp=2,ep=1").notes == ()


class _Shared(Experts):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class _OtherCall(Experts):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tokens


def _with(experts: nn.Module) -> nn.Module:
    return nn.ModuleDict({"experts": experts})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"changed": {"first.weight": "out@ep in"}},
        '"first" (Linear) has its experts sharded over "ep", but its forward cannot be given the tokens that other '
        "ranks send. Write",
    ),
    (
        {"changed": {"experts.up": "expert ff@ep embed"}},
        'has the layout "expert ff@ep embed". Only the dim that counts experts can be sharded over "ep": write this '
        'axis, and no other one, at the first dim of a parameter of experts, as in "expert@ep out in".',
    ),
    (
        {"changed": {"experts.down": "expert embed ff"}},
        '"layers.0.1.experts.up" has the layout "expert@ep ff embed", and "layers.0.1.experts.down", of the same '
        'module and of global shape (5, 6, 10), has "expert embed ff". All experts of a module go to the same ranks: '
        "give both the same axis at their first dim.",
    ),
    ({"mesh": "ep=8"}, '"layers.0.1.experts.up" has 5 experts, fewer than the 8 ranks of "ep". Make the axis smaller'),
    (
        {"changed": {"layers.*.output": "batch@ep seq embed"}},
        'The output of "layers.0" has the layout "batch@ep seq embed", and "ep" carries different tokens on each',
    ),
    (
        {"model": _with(_Shared())},
        '"experts.scale" of global shape (3,) belongs to all experts of "experts", which are',
    ),
    (
        {"model": _with(_OtherCall())},
        '"experts" (_OtherCall) has its experts sharded over "ep", but its forward cannot be given the tokens that '
        "other ranks send. Write forward(self, tokens, numbers, weights)",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_experts_cannot_is_refused_with_what_to_do(given: dict[str, Any], said: str):
    with pytest.raises(PlanError) as raised:
        _plan(**given)
    assert said in str(raised.value)
