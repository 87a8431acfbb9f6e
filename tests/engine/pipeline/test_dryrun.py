"""What a dry run predicts of stages is what a run measures on the ranks that run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlib as sl
from shardlib._plan import DryRun
from shardlib._plan.readable import human_bytes
from shardlib.engine.feature.recording import record_collectives
from shardlib.engine.pipeline import fake_run
from shardlib.testing.models import Transformer, rules_for

IDS = torch.zeros(5, 6, dtype=torch.long)  # three microbatches of two, two and one row


def gpt() -> nn.Module:
    return Transformer(layers=2, vocab=7, tied=True, bias=False)


def rules(stages: Any = None) -> sl.Rules:
    return rules_for(gpt()).with_stages(stages or sl.rules.Balanced())


CASES: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "1f1b": ("pp=2", (sl.pipeline("1f1b", 3),), None),
    "gpipe, tp": ("pp=2,tp=2", (sl.pipeline("gpipe", 3),), None),
    "zero 2": ("dp=2,pp=2", (sl.pipeline("1f1b", 3), sl.zero(2)), None),
    "zero 3": ("pp=2,dp=2", (sl.pipeline("1f1b", 3), sl.zero(3)), None),
    "zero 3, gradients of weights late": (
        "pp=2,dp=2",
        (sl.pipeline("zbv", 4), sl.zero(3)),
        "embed, position | blocks.0 | blocks.1 | norm, head",
    ),
    "interleaved": (
        "pp=2",
        (sl.pipeline("interleaved", 4),),
        "embed, position | blocks.0 | blocks.1 | norm, head",
    ),
}


def _measured(case: str) -> tuple[DryRun, Any]:
    mesh, transforms, stages = CASES[case]
    model = sl.shard_model(gpt(), mesh, rules(stages), transforms=transforms, compile=None)
    plan = sl.get_plan(model)
    fake_run.run(model, plan, IDS)
    with record_collectives(model, mesh=sl.mesh(mesh)) as log:
        own = fake_run.run(model, plan, IDS, log)
    return log.report(), own


def _gathered(rank: DryRun) -> int:
    """Bytes of parameters that a rank of stage 3 sends to others of its stage while modules compute."""
    return sum(c.sent for c in rank.collectives if c.axes == ("dp",) and c.phase != "outside")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.deep) if name in ("zero 2", "zero 3", "interleaved") else name
        for name in CASES
    ],
)
def test_collectives_messages_memory_and_operations_are_predicted(ranks, case: str):
    mesh, transforms, stages = CASES[case]
    plan = sl.plan(gpt(), mesh, rules(stages), transforms=transforms, example=IDS)
    assert plan.report is not None and sl.Plan.from_json(plan.to_json()) == plan
    measured = ranks(sl.MeshShape(mesh).world_size).run(_measured, case)
    line = plan.mesh.groups(("pp",))[0]
    for predicted, (found, own) in zip(plan.report.ranks, [measured[rank] for rank in line], strict=True):
        assert predicted.collectives == found.collectives
        assert predicted.count(kind="send", axis="pp") > 0
        assert predicted.start_bytes == found.start_bytes
        assert predicted.flops == found.flops == sum(stage.flops for stage in own) > 0
        # What is under way when a real rank's peak is reached depends on when messages come.
        assert abs(found.peak_bytes - predicted.peak_bytes) <= 2 * predicted.bytes()
        predicted_own = [stage for stage in plan.report.stages if stage.rank == own[0].rank]
        assert [(s.stage, s.flops, s.sent) for s in predicted_own] == [(s.stage, s.flops, s.sent) for s in own]
    assert [stage.stage for stage in plan.report.stages] == list(range(len(plan.stages)))
    assert max(map(_gathered, plan.report.ranks)) == sum(
        each.bytes for each in plan.traffic() if each.what in ("parameters, forward", "parameters, backward")
    )


def test_the_table_of_stages_has_it():
    plan = sl.plan(gpt(), "pp=2", rules(), transforms=[sl.pipeline("gpipe", 2)], example=IDS)
    assert plan.report is not None
    said = str(plan)
    heading, _, first, *_ = said.split("Stages of the pipeline")[1].strip().splitlines()
    assert heading.split("  ")[-1].strip() == "peak of its rank"
    assert first.split("  ")[-1].strip() == human_bytes(plan.report.ranks[0].peak_bytes)
    assert "Collectives of one training step, rank 1 of pp" in said


def test_a_model_may_be_on_meta_and_is_left_as_it_is():
    with torch.device("meta"):
        model = gpt()
    report = sl.plan(model, "pp=2,dp=8", rules(), example={"ids": IDS}).report
    assert report is not None and {c.size for c in report.collectives} == {2, 8, 16}
    assert all(p.is_meta for p in model.parameters()) and not dist.is_initialized()
