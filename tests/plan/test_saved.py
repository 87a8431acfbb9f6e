"""Plans as JSON: every plan comes back equal, and what is not a plan is refused."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib._mesh_shape import MeshShape
from shardlib._plan import Blocks, DryRun, Gathered, LossScale, Plan, Recorded, Row, Step
from shardlib._plan.report import StageRun
from shardlib.errors import PlanError
from shardlib.layout import Layout
from shardlib.rules import Border, Stage
from tests.plan.cases import gpt_plan

NAMES = st.sampled_from(["embed.weight", "blocks.0.attn.qkv.weight", "blocks.11.w", "ünïcode.b", 'with "quotes"'])
TEXTS = st.one_of(st.just(""), st.text(max_size=20))
COUNTS = st.integers(0, 2**40)
LAYOUTS = st.sampled_from(
    [
        Layout.replicate(2),
        Layout.parse("vocab@tp embed"),
        Layout.parse("embed@(dp,tp) _"),
        Layout.parse("(qkv heads@tp head) embed", sizes={"qkv": 3, "heads": 4, "head": 8}),
        Layout.parse("ff@tp embed : bfloat16 host"),
        Layout.parse("batch embed + sum@tp"),
    ]
)
MAYBE = st.one_of(st.none(), LAYOUTS)
ROWS = st.builds(
    Row,
    name=NAMES,
    kind=st.sampled_from(["parameter", "buffer"]),
    global_shape=st.lists(st.integers(0, 10**6), max_size=4).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    requires_grad=st.booleans(),
    persistent=st.booleans(),
    tied=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    stored=LAYOUTS,
    compute=LAYOUTS,
    grad=MAYBE,
    state=MAYBE,
    rule=st.one_of(st.none(), TEXTS),
    note=TEXTS,
    reshard=st.booleans(),
)
DTYPES = st.sampled_from([None, torch.float32, torch.bfloat16])
STEPS = st.builds(
    Step,
    accumulate=st.integers(1, 8),
    bucket_mb=st.sampled_from([25, 0.5]),
    reduce_dtype=DTYPES,
    autocast=DTYPES,
    scaler=st.sampled_from([None, LossScale(), LossScale(init_scale=8.0)]),
    recompute=st.lists(NAMES, max_size=2).map(tuple),
    fp8=st.lists(NAMES, max_size=2).map(tuple),
    fp8_history=st.sampled_from([0, 16]),
    overlap=st.booleans(),
    schedule=st.sampled_from(["", "zbv"]),
    microbatches=st.integers(0, 4),
    capacity_factor=st.sampled_from([None, 1.25]),
)
BORDERS = st.builds(
    Border, NAMES, st.sampled_from(["input", "output"]), MAYBE, st.one_of(st.none(), TEXTS), reason=TEXTS
)
COLLECTIVES = st.builds(
    Recorded,
    kind=st.sampled_from(["all_reduce", "all_gather", "all_to_all"]),
    axes=st.lists(st.sampled_from(["dp", "tp"]), unique=True).map(tuple),
    bytes=COUNTS,
    size=st.integers(2, 16),
    module=NAMES,
    phase=st.sampled_from(["forward", "backward", "outside"]),
)
RUNS = st.builds(
    DryRun,
    collectives=st.lists(COLLECTIVES, max_size=4).map(tuple),
    gathered=st.lists(st.builds(Gathered, TEXTS, NAMES, TEXTS), max_size=3).map(tuple),
    start_bytes=COUNTS,
    peak_bytes=COUNTS,
    flops=COUNTS,
    activation_bytes=COUNTS,
)
REPORTS = st.builds(
    dataclasses.replace,
    RUNS,
    stages=st.lists(st.builds(StageRun, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS), max_size=2).map(tuple),
    ranks=st.lists(RUNS, max_size=1).map(tuple),
)
PLANS = st.builds(
    Plan,
    mesh=st.sampled_from([MeshShape("dp=2,tp=4"), MeshShape("pp=16,dp=8,fsdp=16,tp=8")]),
    rows=st.lists(ROWS, max_size=5).map(tuple),
    borders=st.lists(BORDERS, max_size=3).map(tuple),
    rules=st.none(),
    transforms=st.lists(TEXTS, max_size=2).map(tuple),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
    blocks=st.one_of(st.none(), st.builds(Blocks, NAMES, COUNTS, st.lists(NAMES, max_size=2).map(tuple))),
    report=st.one_of(st.none(), REPORTS),
    step=STEPS,
    units=st.lists(NAMES, max_size=2).map(tuple),
    repeated=st.lists(NAMES, max_size=2).map(tuple),
    stages=st.lists(st.builds(Stage, *[st.lists(NAMES, max_size=2).map(tuple)] * 2), max_size=2).map(tuple),
)


@given(PLANS)
def test_a_plan_comes_back_from_its_text(plan: Plan):
    text = plan.to_json()
    back = Plan.from_json(text)
    assert back == plan
    assert back.to_json() == text
    assert list(json.loads(text)) == [key for key in KEYS if key != "stages" or plan.stages]
    assert sum(line.startswith('    {"name": ') for line in text.splitlines()) == len(plan.rows)


KEYS = [
    "version",
    "mesh",
    "transforms",
    "notes",
    "blocks",
    "units",
    "repeated",
    "step",
    "stages",
    "rows",
    "borders",
    "report",
]


def test_a_plan_that_was_kept_before_steps_and_units_is_still_read():
    made = gpt_plan()
    data = json.loads(made.to_json())
    del data["units"], data["repeated"], data["step"]
    assert Plan.from_json(json.dumps(data)) == made.replace(units=(), repeated=())
    data = json.loads(made.replace(report=DryRun((), (), 1, 2)).to_json())
    del data["report"]["flops"], data["report"]["activation_bytes"]
    assert Plan.from_json(json.dumps(data)).report == DryRun((), (), 1, 2)


def test_a_plan_that_was_read_back_still_prints_counts_and_differs_in_nothing():
    made = gpt_plan()
    back = Plan.from_json(made.to_json())
    assert str(back) == str(made)
    assert back.memory() == made.memory()
    assert made.diff(back) == ""


def test_ranks_with_equal_lines_shard_alike():
    made = gpt_plan()
    assert made.lines() == gpt_plan().lines()
    assert made.lines() != gpt_plan("dp=4,tp=2").lines()
    assert made.lines() != made.replace(step=Step(accumulate=2)).lines()
    assert made.lines() != made.replace(units=()).lines()
    assert len(made.lines()) == 3 + len(made.rows) + len(made.borders)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"version": 1, "mesh": "tp=2", "transforms": [], "notes": [], "blocks": null, "step": {"autocast": "f8"}}',
            '"f8" is not a dtype; give a name such as "float32" or "bfloat16".',
        ),
        (
            '{"version": 99}',
            "The text is a plan of version 99; this shardlib reads version 1. Make the plan again with this version.",
        ),
        (
            "[]",
            "The text is a plan of version None; this shardlib reads version 1. Make the plan again with this version.",
        ),
        (
            '{"version": 1}',
            "The text is not a plan: KeyError: 'mesh'. Give what Plan.to_json or `shardlib plan --json` wrote, "
            "unchanged.",
        ),
        (
            "{",
            "The text is not a plan: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column "
            "2 (char 1). Give what Plan.to_json or `shardlib plan --json` wrote, unchanged.",
        ),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str):
    with pytest.raises(PlanError) as raised:
        Plan.from_json(text)
    assert str(raised.value) == message
