"""What holds of every transform, on a plan with fused, uneven, tied, frozen and tiny tensors."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from shardlib._plan import Plan, Row
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.testing.strategies._transforms import KINDS
from shardlib.transforms import Transform, parse, replicate
from tests.transforms.cases import laid_out, one_transform

PLAN = laid_out()
SEVERAL = st.lists(one_transform(), min_size=1, max_size=3)


def _applied(transforms: Sequence[Transform], to: Plan = PLAN) -> Plan:
    """The plan after transforms that go together; the others end the example."""
    try:
        for transform in transforms:
            to = to | transform
    except PlanError as error:
        event("refused")
        assume("Choose one" not in str(error) and "already" not in str(error))
        raise
    return to


def _what_it_does(plan: Plan) -> tuple[object, ...]:
    return plan.rows, plan.step, plan.units


@given(one_transform())
def test_a_transform_is_a_value_that_reads_as_its_call(transform: Transform):
    assert parse(repr(transform)) == transform
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert {transform: 1}[parse(repr(transform))] == 1


@given(SEVERAL)
def test_a_pipeline_is_a_transform_that_does_what_its_parts_do(transforms: list[Transform]):
    one_by_one = _applied(transforms)
    together = transforms[0]
    for each in transforms[1:]:
        together = together | each
    assert PLAN | together == one_by_one
    assert _what_it_does(together(PLAN)) == _what_it_does(one_by_one)
    assert laid_out(transforms=[together]) == one_by_one
    assert parse(repr(together)) == together
    assert one_by_one.transforms == tuple(map(repr, transforms))


@given(one_transform(), one_transform(), one_transform())
def test_composition_is_associative_and_has_an_identity(a: Transform, b: Transform, c: Transform):
    assert (a | b) | c == a | (b | c)
    assert _what_it_does(_applied([replicate(), a])) == _what_it_does(_applied([a, replicate()]))
    assert _what_it_does(_applied([a])) == _what_it_does(_applied([a, replicate()]))


@given(SEVERAL)
def test_saying_a_thing_again_changes_nothing(transforms: list[Transform]):
    once = _applied(transforms)
    assert _what_it_does(_applied([transforms[-1]], once)) == _what_it_does(once)


@given(SEVERAL)
def test_pieces_of_a_phase_lie_inside_those_of_the_phase_before(transforms: list[Transform]):
    made = _applied(transforms)
    for row in made.rows:
        phases = [row.layouts[phase] for phase in ("compute", "stored", "grad", "state") if phase in row.layouts]
        assert row.compute.axes.isdisjoint(made.mesh.data_axes)
        for outer, inner in itertools.pairwise(phases):
            _lies_inside(inner, outer, row, made)


def _lies_inside(inner: Layout, outer: Layout, row: Row, made: Plan) -> None:
    numbers = torch.arange(torch.Size(row.global_shape).numel()).reshape(row.global_shape)
    for rank in range(made.mesh.world_size):
        place = made.mesh.coordinate(rank)
        held = outer.take(numbers, made.mesh, place).flatten().tolist()
        assert set(inner.take(numbers, made.mesh, place).flatten().tolist()) <= set(held), (row.name, inner, outer)


@given(SEVERAL)
def test_what_the_rules_say_of_model_axes_stays(transforms: list[Transform]):
    made = _applied(transforms)
    data = made.mesh.data_axes
    for before, after in zip(PLAN.rows, made.rows, strict=True):
        assert before.name == after.name
        for phase, layout in after.layouts.items():
            bare = Layout(layout.with_axes_dropped(data).dims)
            assert bare == Layout(before.layouts[phase].resolve(before.global_shape, PLAN.mesh).dims)
        if before.kind == "buffer":
            assert after == before


@given(SEVERAL)
def test_a_transformed_plan_comes_back_from_its_text_and_prints(transforms: list[Transform]):
    made = _applied(transforms)
    assert Plan.from_json(made.to_json()) == made
    assert str(made).startswith("Plan on dp=2,fsdp=2,tp=2 (8 ranks) after ")
    assert _what_it_does(made) == _what_it_does(PLAN) or PLAN.diff(made)


@given(SEVERAL)
def test_memory_on_the_host_is_a_part_of_all_memory(transforms: list[Transform]):
    memory = _applied(transforms).memory()
    assert 0 <= memory.host <= memory.total
    assert memory.device + memory.host == memory.total


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "zero(stage)",
        "zero(2, *[1])",
        "zero(2, **{})",
        "zero(4)",
        "zero()",
        "zero(2) & zero(1)",
        "zro(2)",
        "zero(2",
        "",
        "offload(print('x'))",
        "zero(LossScale.__class__)",
        "(" * 5000,
        "lambda: zero(1)",
        "\x00",
    ],
)
def test_a_text_that_is_no_call_of_a_transform_is_refused(text: str):
    with pytest.raises(PlanError):
        parse(text)


def test_a_text_may_have_ten_thousand_characters():
    text = "zero(1)".ljust(10_000)
    assert parse(text) == parse("zero(1)")
    with pytest.raises(PlanError, match=r"it is not an expression \(too long\)"):
        parse(f"{text} ")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str):
    try:
        parse(text)
    except PlanError as error:
        assert str(error)


def test_an_unreadable_text_is_answered_with_the_nearest():
    with pytest.raises(PlanError) as raised:
        parse("ofload()")
    assert str(raised.value) == (
        'Transform "ofload()" cannot be read: "ofload" is not a transform. Write calls with plain values, joined by '
        '"|", as in zero(2, axis="dp") | offload("state"); known are "zero", "fsdp", "hsdp", "replicate", "offload", '
        '"fit_memory", "precision", "checkpoint_activations", "accumulate", "pipeline", "expert_capacity". Did you '
        'mean "offload"?'
    )


@pytest.mark.parametrize("mesh", ["tp=2", "dp=1", "dp=3,tp=2", "fsdp=2,dp=2"])
def test_what_is_drawn_for_cases_means_something_on_every_mesh(mesh: str):
    @given(st.lists(st.one_of(KINDS[1:]), max_size=2))  # the first leaves a plan as it is
    def on_this_mesh(transforms: list[Transform]) -> None:
        assert len(_applied(transforms, laid_out(mesh)).transforms) == len(transforms)

    on_this_mesh()
