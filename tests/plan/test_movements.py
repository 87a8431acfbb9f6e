"""What a step moves: the transitions between phases, when they happen, and what they send."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib._plan import Movement, Plan, Traffic, make_plan
from shardlib.errors import PlanError
from shardlib.layout import Layout
from tests.plan.cases import MLP_RULES, gpt_plan, mlp


def _split(made: Plan, **phases: str) -> Plan:
    return made.map_rows(lambda row: row.replace(**{phase: Layout.parse(text) for phase, text in phases.items()}))


def _weight(mesh: str, **phases: str) -> Plan:
    return _split(make_plan(nn.Linear(6, 10, bias=False), mesh, {"weight": "out in"}), **phases)


def _listed(made: Plan) -> list[str]:
    return [
        f"{one.name}, {one.purpose}: {one.source} -> {one.target}, {one.ready} .. {one.needed} of {one.unit!r}, "
        f"{one.times}x " + ", ".join(f"{each.kind}({','.join(each.axes)})" for each in one.collectives)
        for one in made.movements()
    ]


def _two_layers(*transforms: sl.Transform) -> Plan:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return make_plan(model, "dp=2", {"*.weight": "out in"}, transforms=transforms)


def test_whole_parameters_are_reduced_once_a_step():
    assert _listed(_two_layers(sl.accumulate(3))) == [
        f"{name}, gradients: out in + sum@dp : float32 -> out in : float32, gradient .. step ends of {name[0]!r}, "
        "1x all_reduce(dp)"
        for name in ("0.weight", "1.weight")
    ]


def test_shards_are_gathered_for_each_unit_and_reduced_after_each_pass():
    whole, shard = "out in : float32", "out@dp in : float32"
    assert _listed(_two_layers(sl.zero(3), sl.accumulate(3)))[3:] == [
        f"1.weight, parameters, forward: {shard} -> {whole}, step begins .. forward of '1', 3x all_gather(dp)",
        f"1.weight, parameters, backward: {shard} -> {whole}, step begins .. backward of '1', 3x all_gather(dp)",
        f"1.weight, gradients: out in + sum@dp : float32 -> {shard}, gradient .. pass ends of '1', "
        "3x reduce_scatter(dp)",
    ]


def test_what_stays_whole_until_backward_is_gathered_once():
    made = _two_layers(sl.zero(3)).map_rows(lambda row: row.replace(reshard=row.name == "0.weight"))
    again = [one.name for one in made.movements() if one.purpose == "parameters, backward"]
    assert again == ["0.weight"]


@pytest.mark.parametrize(("overlap", "needed"), [(False, "step ends"), (True, "forward")])
def test_updates_are_needed_when_the_step_ends_or_in_the_next_forward(overlap: bool, needed: str):
    made = _two_layers(sl.zero(2))
    made = made.replace(step=made.step.replace(overlap=overlap))
    updates = [one for one in made.movements() if one.purpose == "updated parameters"]
    assert [(one.name, one.ready, one.needed) for one in updates] == [
        ("0.weight", "optimizer", needed),
        ("1.weight", "optimizer", needed),
    ]


def test_copies_between_memories_stand_at_the_borders_of_phases():
    def copies(made: Plan) -> dict[str, list[str]]:
        return {one.purpose: [each.kind for each in one.collectives] for one in made.movements()}

    assert copies(_two_layers(sl.offload())) == {
        "gradients": ["all_reduce"],
        "parameters, step": ["copy"],
        "gradients, step": ["copy"],
        "updated parameters": ["copy"],
    }
    assert copies(_two_layers(sl.zero(1), sl.offload()))["updated parameters"] == ["copy", "all_gather"]
    assert copies(_two_layers(sl.zero(3), sl.offload("all"))) == {
        "parameters, forward": ["copy", "all_gather"],
        "parameters, backward": ["copy", "all_gather"],
        "gradients": ["reduce_scatter", "copy"],
    }


def test_a_copy_on_one_rank_is_a_movement_that_sends_nothing():
    made = make_plan(nn.Linear(4, 4, bias=False), "dp=1", {"weight": "out in"}, transforms=[sl.offload()])
    assert [(one.purpose, one.bytes) for one in made.movements()] == [
        ("parameters, step", 0),
        ("gradients, step", 0),
        ("updated parameters", 0),
    ]
    assert made.traffic() == ()


def _moved(made: Plan, **kwargs) -> list[tuple[str, list[str], int]]:
    return [
        (one.purpose, [f"{each.kind} {each.bytes}" for each in one.collectives if each.kind != "slice"], one.times)
        for one in made.movements(**kwargs)
        if "step" in one.purpose or "updated" in one.purpose
    ]


def test_full_tensors_go_to_the_rank_that_steps_them_and_back():
    """Of 240 bytes and four ranks: whichever is the owner, three quarters are on other ranks, and a rank sends a
    quarter of that."""
    made = _weight("dp=2,fsdp=2", state="out@fsdp in")
    assert _moved(made, optimizer="per_tensor", state=lambda shape: [shape, (), (shape[0], 1)]) == [
        ("parameters, step", ["gather 45"], 1),
        ("gradients, step", ["gather 45"], 1),
        ("state, step", ["gather 45"], 1),
        ("updated parameters", ["scatter 180"], 1),
        ("updated state", ["scatter 90"], 1),
        ("updated state", ["scatter 3"], 1),
        ("updated state", ["scatter 30"], 1),
    ]
    low = _weight("dp=4", stored="out in : bfloat16", grad="out in : bfloat16", state="out in : float32")
    assert [what for what, _, _ in _moved(low, optimizer="per_tensor", state=lambda _shape: [])] == [
        "gradients, step",
        "state, step",  # the master copy
        "updated parameters",
        "updated state",
    ]


def test_full_tensors_are_where_the_plan_splits_none():
    made = _weight("dp=4")
    assert made.movements(optimizer="per_tensor") == made.movements()


def test_full_gradients_are_gathered_for_an_optimizer_of_unknown_kind():
    made = _weight("dp=2", state="out@dp in")
    assert _moved(made, optimizer="unknown") == [("gradients, step", ["all_gather 120"], 1)]
    assert [each.kind for each in made.traffic(optimizer="unknown")] == ["reduce_scatter", "all_gather"]


def test_gradients_that_are_partial_over_a_model_axis_are_summed_over_it_too():
    made = _weight("tp=2,dp=2", grad="out@dp in", state="out@dp in")
    made = made.map_rows(lambda row: row.replace(partial=("tp",)))
    (one,) = (one for one in made.movements() if one.purpose == "gradients")
    assert [(each.kind, each.axes) for each in one.collectives] == [
        ("reduce_scatter", ("dp",)),
        ("all_reduce", ("tp",)),
    ]
    assert Plan.from_json(made.to_json()) == made


def test_gradients_of_a_tensor_of_several_stages_are_summed_over_those():
    made = gpt_plan("pp=4,dp=2", tied=True)
    shared = [one for one in made.movements() if one.purpose == "gradients, stages"]
    ((name, size),) = {(one.name, math.prod(one.global_shape) * one.dtype.itemsize) for one in shared}
    assert len(made[name].tied) == 2
    (sum_,) = shared[0].collectives
    assert (sum_.kind, sum_.axes, sum_.bytes) == ("all_reduce", ("pp",), size)  # two of the four ranks hold it
    holding = [made.movements(pipeline_rank=rank) for rank in range(4)]
    assert [any(one.purpose == "gradients, stages" for one in each) for each in holding] == [True, False, False, True]


def test_each_rank_of_a_pipeline_moves_its_own():
    made = gpt_plan("pp=2,dp=2", tied=False)

    def moved(rank: int | None) -> set[Movement]:
        return set(made.movements(pipeline_rank=rank))

    assert moved(0) | moved(1) == moved(None)
    assert not moved(0) & moved(1)
    assert all(moved(rank) for rank in (0, 1))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_a_pipeline_does_not_have_is_refused(rank: int):
    with pytest.raises(PlanError, match=f"pipeline_rank={rank}.*has 2 ranks: give 0 to 1, or leave it out"):
        gpt_plan("pp=2,dp=2", tied=False).movements(pipeline_rank=rank)


def test_whole_tensors_are_all_reduced_over_all_data_axes():
    assert _weight("dp=2,fsdp=3").traffic() == (
        Traffic("gradients", "all_reduce", ("dp", "fsdp"), bytes=2 * 4 * 60 * 5 // 6, tensors=1),
    )


def test_only_a_rank_s_own_part_is_reduced():
    made = make_plan(mlp(), "dp=2,tp=2", MLP_RULES)
    # Of 16 x 32, 32, 32 x 16 and 16 elements all but the last bias are halved; a ring of two sends what it reduces.
    assert made.traffic() == (Traffic("gradients", "all_reduce", ("dp",), 4 * (256 + 16 + 256 + 16), 4),)


def test_uneven_pieces_are_counted_as_they_are():
    made = _weight("dp=4", stored="out@dp in", grad="out@dp in", state="out@dp in")
    # Pieces of 3, 3, 3 and 1 rows of six: a rank lacks what it does not hold, 60 - 15 elements on average.
    gathered = [each.bytes for each in made.traffic() if each.kind == "all_gather"]
    assert gathered == [4 * 45, 4 * 45]


def test_frozen_parameters_that_are_stored_in_pieces_are_gathered_and_no_more():
    model = nn.Linear(6, 10, bias=False).requires_grad_(False)
    made = _split(make_plan(model, "dp=2", {"weight": "out in"}), stored="out@dp in")
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
    assert "Sent by one rank" not in str(made)


def test_a_pipeline_stage_sends_what_it_holds():
    whole, stages = gpt_plan("dp=2", tied=False), gpt_plan("pp=2,dp=2", tied=False)
    sent = [sum(each.bytes for each in made.traffic()) for made in (whole, stages)]
    assert sent[0] / 2 <= sent[1] < sent[0] * 0.6


def test_the_table_and_the_page_show_it():
    made = _weight("dp=2", grad="out@dp in", state="out@dp in")
    lines = [line.split() for line in str(made).splitlines()]
    assert ["gradients", "reduce_scatter", "dp", "1", "1", "120", "B"] in lines
    assert "<td>reduce_scatter</td>" in made._repr_html_()


def test_an_unknown_kind_of_optimizer_is_refused():
    for ask in (gpt_plan("dp=2").movements, gpt_plan("dp=2").traffic):
        with pytest.raises(PlanError, match=r"optimizer='per-tensor' was given.*Did you mean .per_tensor."):
            ask(optimizer="per-tensor")
