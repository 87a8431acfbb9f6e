"""Stages of ZeRO, and what goes by other names: which phases of which tensors are split, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from shardlib import plan
from shardlib._plan import Plan
from shardlib.errors import PlanError, RuleError
from shardlib.transforms import Transform, fsdp, hsdp, replicate, zero
from tests.transforms.cases import laid_out


def _layouts(made: Plan, name: str) -> dict[str, str]:
    return {phase: str(layout) for phase, layout in made[name].layouts.items()}


@pytest.mark.parametrize(("stage", "split"), [(1, {"state"}), (2, {"grad", "state"}), (3, {"stored", "grad", "state"})])
def test_each_stage_splits_its_phases(stage: int, split: set[str]):
    made = laid_out("dp=2,tp=2") | zero(stage)
    for name, whole, parted in [
        ("embed.weight", "vocab@tp embed", "vocab@tp embed@dp"),
        ("blocks.0.qkv.weight", "(qkv heads@tp head) in", "(qkv heads@tp head) in@dp"),
        ("blocks.1.qkv.bias", "(qkv heads@tp head)", "(qkv heads@tp head)"),  # torch gathers two axes wrongly
        ("blocks.1.proj.weight", "out in@tp", "out@dp in@tp"),
    ]:
        phases = ("stored", "compute", "grad", "state")
        assert _layouts(made, name) == {phase: parted if phase in split else whole for phase in phases}


def test_updates_overlap_where_they_are_told_to():
    assert not (laid_out("dp=2") | zero(1)).step.overlap
    assert (laid_out("dp=2") | zero(1, overlap=True)).step.overlap


def test_a_function_that_was_not_called_and_a_word_for_a_flag_are_refused():
    for given in (zero, fsdp, hsdp, replicate):
        with pytest.raises(PlanError, match=rf"Call it, and give what it returns: {given.__name__}\(\.\.\.\)"):
            laid_out("dp=2") | given  # type: ignore[operator]
    with pytest.raises(PlanError, match=r"overlap='no'.*give True or False"):
        zero(1, overlap="no")  # type: ignore[arg-type]


def test_frozen_parameters_are_split_in_stage_three_alone_and_buffers_never():
    plain = laid_out("dp=2")
    for stage in (1, 2):
        assert (plain | zero(stage))["frozen.weight"] == plain["frozen.weight"]
    made = plain | zero(3)
    assert _layouts(made, "frozen.weight") == {"stored": "_@dp _", "compute": "_ _"}
    assert made["norm.running_mean"] == plain["norm.running_mean"]


def test_a_scalar_stays_whole_and_says_why():
    made = laid_out("dp=2") | zero(3) | zero(3)
    assert made["count"].stored.axes == frozenset()
    assert made["count"].note == "replicated; too small to shard over dp"


def test_axes_may_be_chosen_and_ordered():
    assert str((laid_out() | zero(2, axis="fsdp"))["norm.weight"].grad) == "_@fsdp"
    assert str((laid_out() | zero(2, axis=("fsdp", "dp")))["norm.weight"].grad) == "_@(fsdp,dp)"
    assert str((laid_out() | zero(2))["norm.weight"].grad) == "_@(dp,fsdp)"


def test_tensors_may_be_chosen():
    made = laid_out() | zero(3, only=("blocks.0", "embed"))
    split = {row.name for row in made.rows if row.stored != row.compute}
    assert split == {"blocks.0.qkv.weight", "blocks.0.proj.weight", "blocks.0.proj.bias", "embed.weight"}
    assert made["blocks.0.qkv.bias"].note.endswith("fused dim not sharded over dp,fsdp")


def test_a_tied_tensor_is_chosen_by_any_of_its_names():
    assert (laid_out() | zero(1, only="head"))["embed.weight"].state.axes >= {"dp"}


def test_a_later_stage_adds_to_an_earlier_one_and_an_earlier_one_undoes_nothing():
    plain = laid_out()
    assert (plain | zero(1) | zero(3)).rows == (plain | zero(3)).rows
    assert (plain | zero(3) | zero(1)).rows == (plain | zero(3)).rows


@pytest.mark.parametrize("transform", [fsdp("fsdp") | zero(1), zero(1, axis="dp") | fsdp("fsdp")])
def test_optimizer_state_may_be_split_further_than_parameters(transform: Transform):
    row = (laid_out() | transform)["norm.weight"]
    assert (str(row.stored), str(row.grad), str(row.state)) == ("_@fsdp", "_@fsdp", "_@(fsdp,dp)")


def test_an_axis_that_a_rule_uses_is_left_where_it_is():
    model = laid_out("dp=2,fsdp=2")
    split = model.map_rows(
        lambda row: row if row.name != "frozen.weight" else row.replace(stored=row.stored.with_axes(1, ("fsdp",)))
    )
    assert str((split | zero(3))["frozen.weight"].stored) == "_ _@(fsdp,dp)"


@pytest.mark.parametrize(("bucket_mb", "blocks", "resharded"), [(25, 5, False), (1e-3, 2, False), (1e-3, 3, True)])
def test_fsdp_reshards_repeated_blocks_if_they_need_more_than_two_buckets(bucket_mb, blocks, resharded):
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleList([nn.Linear(32, 32) for _ in range(blocks)]))
    made = plan(model, "dp=2", {"**": None})
    made = made.replace(step=made.step.replace(bucket_mb=bucket_mb)) | fsdp()
    assert made.repeated == tuple(f"1.{i}" for i in range(blocks))
    assert {made.unit(row) for row in made.rows if row.reshard} == ({*made.repeated} if resharded else set())
    assert "stays unsharded until its backward" in str(made)


def test_what_lies_in_no_unit_stays_gathered():
    for transform in (zero(3), fsdp(reshard_after_forward=True)):
        made = laid_out() | transform
        assert {made.unit(row) for row in made.rows if row.stored != row.compute and not row.reshard} == {""}
        assert {made.unit(row) for row in made.rows if row.stored != row.compute and row.reshard} == {*made.units}
    never = laid_out() | fsdp(reshard_after_forward=False)
    assert {row.name for row in never.rows if row.reshard} == {row.name for row in never.rows if not _split(row)}


def _split(row) -> bool:
    return row.stored != row.compute


def test_hsdp_shards_over_one_axis_and_replicates_over_another():
    plain = laid_out()
    assert (plain | hsdp(shard="fsdp", replicate="dp")).rows == (plain | fsdp("fsdp")).rows
    kinds = {(t.what, t.kind, t.axes) for t in (plain | hsdp(shard="fsdp", replicate="dp")).traffic()}
    assert ("gradients", "reduce_scatter", ("fsdp",)) in kinds
    assert ("gradients", "all_reduce", ("dp",)) in kinds
    assert {axes for what, _, axes in kinds if what.startswith("parameters")} == {("fsdp",)}


def test_replicate_takes_splits_away_where_it_is_told_to():
    plain = laid_out()
    made = plain | fsdp() | replicate("norm")
    assert made["norm.weight"] == plain["norm.weight"]
    assert made["frozen.weight"] == (plain | fsdp())["frozen.weight"]
    whole, told = plain | fsdp() | replicate("^"), plain | zero(1, only=("^count", "blocks.*.qkv.bias"))
    assert whole.rows == told.rows  # but for the notes of what cannot be split


@pytest.mark.parametrize("mesh", ["tp=2", "dp=1,tp=2"])
def test_without_data_ranks_nothing_changes_and_the_plan_says_so(mesh: str):
    plain = laid_out(mesh)
    made = plain | zero(3) | zero(3) | fsdp()
    assert made.rows == plain.rows
    why = f'shards nothing: no such data axis of "{mesh}" has more than one rank.'
    assert made.notes == (f"zero(3) {why}", f"fsdp() {why}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: zero(4),
            "zero(4): the stages are 1 (optimizer state is sharded), 2 (and gradients), 3 (and parameters); give one "
            "of them. To shard nothing leave it out, or write replicate().",
        ),
        (
            lambda: laid_out() | zero(2, axis="fsdq"),
            'zero(2, axis="fsdq"): mesh "dp=2,fsdp=2,tp=2" has no axis "fsdq"; its data axes are "dp", "fsdp". Name '
            'one of them, or add the axis to the mesh. Did you mean "fsdp"?',
        ),
        (
            lambda: laid_out() | zero(2, axis="tp"),
            'zero(2, axis="tp"): "tp" is a model axis of mesh "dp=2,fsdp=2,tp=2"; state is sharded over data axes '
            'only, here "dp", "fsdp". To shard over "tp" write a rule.',
        ),
        (
            lambda: laid_out() | zero(1, axis=("dp", "dp")),
            'zero(1, axis=("dp", "dp")): axis "dp" is named twice; name each axis once.',
        ),
        (
            lambda: laid_out() | zero(1, only="embd.weight"),
            'zero(1, only="embd.weight"): "embd.weight" matches none of the 14 parameters, nor a module that one is '
            "in; patterns are written as in rules. print(plan) lists the names. Did you mean "
            '"embed.weight"?',
        ),
        (
            lambda: laid_out() | fsdp(only="running_mean"),
            'fsdp(only="running_mean"): "running_mean" matches none of the 14 parameters, nor a module that one is in; '
            "patterns are written as in rules. print(plan) lists the names.",
        ),
        (
            lambda: laid_out() | hsdp(shard="dp", replicate="dp"),
            'hsdp(shard="dp", replicate="dp"): name different data axes, one to shard over and one to replicate over; '
            'mesh "dp=2,fsdp=2,tp=2" has "dp", "fsdp".',
        ),
        (
            lambda: laid_out() | fsdp("dp", only="norm") | hsdp(shard="fsdp", replicate="dp"),
            'hsdp(shard="fsdp", replicate="dp"): "dp" shards norm.weight already (of 2 tensors). Take the axis out of '
            "the rule or the transform that shards them, or replicate over another.",
        ),
        (lambda: zero(1) | 3, "zero(1) | 3: give functions that take a Plan and return a Plan."),
        (
            lambda: laid_out(transforms="zero(1)"),
            "transforms='zero(1)' was given; give functions plan -> plan, such as shardlib.zero(2). "
            "shardlib.transforms.parse reads a text.",
        ),
        (
            lambda: laid_out(transforms=3),
            "transforms=3 was given; give functions plan -> plan, such as shardlib.zero(2). "
            "shardlib.transforms.parse reads a text.",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], message: str):
    with pytest.raises(PlanError) as raised:
        make()
    assert str(raised.value) == message


def test_one_transform_is_as_a_list_of_one():
    assert laid_out(transforms=zero(1)) == laid_out(transforms=[zero(1)]) == laid_out() | zero(1)


def test_a_pattern_that_cannot_be_read_is_refused_as_in_rules():
    with pytest.raises(RuleError, match="empty segment"):
        laid_out() | zero(1, only="a..b")


def test_a_plain_function_composes_with_a_transform():
    def unchanged(plan: Plan) -> Plan:
        return plan

    assert repr(unchanged | zero(1) | unchanged) == "unchanged | zero(1) | unchanged"
    assert (laid_out() | (unchanged | zero(1))).transforms == ("unchanged", "zero(1)")
