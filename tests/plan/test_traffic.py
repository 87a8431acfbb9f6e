"""What a step sends over data axes: the transitions between phases, and when they happen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardlib._plan import Plan, Traffic, plan
from shardlib.layout import Layout
from tests.plan.cases import MLP_RULES, gpt_plan, mlp


def _split(made: Plan, **phases: str) -> Plan:
    return made.map_rows(lambda row: row.replace(**{phase: Layout.parse(text) for phase, text in phases.items()}))


def _weight(mesh: str, **phases: str) -> Plan:
    return _split(plan(nn.Linear(6, 10, bias=False), mesh, {"weight": "out in"}), **phases)


def test_whole_tensors_are_all_reduced_over_all_data_axes():
    assert _weight("dp=2,fsdp=3").traffic() == (
        Traffic("gradients", "all_reduce", ("dp", "fsdp"), bytes=2 * 4 * 60 * 5 // 6, tensors=1),
    )


def test_only_a_rank_s_own_part_is_reduced():
    made = plan(mlp(), "dp=2,tp=2", MLP_RULES)
    # Of 16 x 32, 32, 32 x 16 and 16 elements all but the last bias are halved; a ring of two sends what it reduces.
    assert made.traffic() == (Traffic("gradients", "all_reduce", ("dp",), 4 * (256 + 16 + 256 + 16), 4),)


def test_uneven_pieces_are_counted_as_they_are():
    made = _weight("dp=4", stored="out@dp in", grad="out@dp in", state="out@dp in")
    # Pieces of 3, 3, 3 and 1 rows of six: a rank lacks what it does not hold, 60 - 15 elements on average.
    gathered = [each.bytes for each in made.traffic() if each.kind == "all_gather"]
    assert gathered == [4 * 45, 4 * 45]


def test_frozen_parameters_that_are_stored_in_pieces_are_gathered_and_no_more():
    model = nn.Linear(6, 10, bias=False).requires_grad_(False)
    made = _split(plan(model, "dp=2", {"weight": "out in"}), stored="out@dp in")
    assert [each.what for each in made.traffic()] == ["parameters, forward", "parameters, backward"]
    kept = made.map_rows(lambda row: row.replace(reshard=False))
    assert [each.what for each in kept.traffic()] == ["parameters, forward"]


def test_dtypes_of_phases_are_those_in_which_tensors_travel():
    low = {"stored": "out@dp in : bfloat16", "compute": "out in : bfloat16", "grad": "out@dp in : bfloat16"}
    made = _weight("dp=2", **low, state="out@dp in : float32")
    assert [each.bytes for each in made.traffic()] == [60, 60, 60]
    wide = made.replace(step=made.step.replace(reduce_dtype=torch.float32))
    assert [each.bytes for each in wide.traffic()] == [60, 60, 120]


def test_host_memory_takes_no_part():
    made = _weight("dp=2", grad="out@dp in", state="out@dp in")
    assert _weight("dp=2", grad="out@dp in", state="out@dp in : host").traffic() == made.traffic()


def test_pieces_are_reduced_over_axes_that_do_not_split_them():
    made = _weight("dp=2,fsdp=2", grad="out@fsdp in", state="out@fsdp in")
    assert made.traffic() == (
        Traffic("gradients", "reduce_scatter", ("fsdp",), 4 * 30, 1),
        Traffic("gradients", "all_reduce", ("dp",), 4 * 30, 1),
        Traffic("updated parameters", "all_gather", ("fsdp",), 4 * 30, 1),
    )


@pytest.mark.parametrize(
    ("phases", "times"),
    [
        ({}, {"gradients": 1}),
        ({"state": "out@dp in"}, {"gradients": 1, "updated parameters": 1}),
        ({"grad": "out@dp in", "state": "out@dp in"}, {"gradients": 3, "updated parameters": 1}),
        (
            dict.fromkeys(("stored", "grad", "state"), "out@dp in"),
            {"parameters, forward": 3, "parameters, backward": 3, "gradients": 3},
        ),
    ],
)
def test_split_gradients_are_reduced_at_every_microbatch_and_whole_ones_once(phases: dict, times: dict[str, int]):
    made = _weight("dp=2", **phases)
    several = made.replace(step=made.step.replace(accumulate=3)).traffic()
    assert {each.what: each.times for each in several} == times
    once = {each.what: each.bytes for each in made.traffic()}
    assert {each.what: each.bytes for each in several} == {what: n * once[what] for what, n in times.items()}


def test_a_pipeline_gathers_for_each_of_its_microbatches_what_it_lets_go():
    made = _weight("dp=2", **dict.fromkeys(("stored", "grad", "state"), "out@dp in"))
    made = made.replace(step=made.step.replace(accumulate=3, microbatches=4))
    kept = made.map_rows(lambda row: row.replace(reshard=False))
    late = made.replace(step=made.step.replace(schedule="zbv"))
    assert [each.times for each in made.traffic()] == [12, 12, 3]
    assert [each.times for each in kept.traffic()] == [each.times for each in late.traffic()] == [3, 3]


@pytest.mark.parametrize("mesh", ["tp=4", "dp=1,tp=4"])
def test_one_data_rank_sends_nothing(mesh: str):
    made = gpt_plan(mesh)
    assert made.traffic() == ()
    assert "over data axes" not in str(made)


def test_a_pipeline_stage_sends_what_it_holds():
    whole, stages = gpt_plan("dp=2", tied=False), gpt_plan("pp=2,dp=2", tied=False)
    sent = [sum(each.bytes for each in made.traffic()) for made in (whole, stages)]
    assert sent[0] / 2 <= sent[1] < sent[0] * 0.6


def test_the_table_and_the_page_show_it():
    made = _weight("dp=2", grad="out@dp in", state="out@dp in")
    lines = [line.split() for line in str(made).splitlines()]
    assert ["gradients", "reduce_scatter", "dp", "1", "1", "120", "B"] in lines
    assert "<td>reduce_scatter</td>" in made._repr_html_()
